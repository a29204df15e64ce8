# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzz of what untrusted bytes reach: frames and torch's pickled state.

    python tests/fuzz/fuzz_c10d.py -max_total_time=60 [CORPUS_DIRECTORY]

All options are libFuzzer's. It ends with status 0 if no input broke a promise: bytes are taken or
refused with our own error, what was taken survives being written again, and nothing of the
pickle's choosing is ever called.
"""

from __future__ import annotations

import pickle
import sys
from base64 import b64decode, b64encode
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import atheris

with atheris.instrument_imports(include=["launcher_shim.c10d"]):
    from launcher_shim.c10d import pickle_reader, state_codec
    from launcher_shim.tcpstore import wire
    from launcher_shim.tcpstore.requests import RequestParser

from rdzv.errors import StateError

_NODES = [state_codec.NodeDesc("worker-0", 17, 0), state_codec.NodeDesc("worker-1", 70_000, 1)]
_SEED_STATE = state_codec.TorchState(
    round=1,
    deadline=datetime(2026, 1, 1, tzinfo=UTC),
    participants={node: rank for rank, node in enumerate(_NODES)},
    wait_list=frozenset(_NODES[:1]),
    last_heartbeats=dict.fromkeys(_NODES, datetime(2100, 1, 1, tzinfo=UTC)),
)


def fuzz_frames(data: bytes) -> None:
    """Parse the same bytes whole and in pieces: both must come to the same."""
    whole = _parse([data])
    cut = len(data) // 3
    pieces = _parse([data[:cut], data[cut : 2 * cut], data[2 * cut :]])
    if whole != pieces:
        raise AssertionError(f"whole: {whole!r}, in pieces: {pieces!r}")
    requests, failed = whole
    again = _parse([b"".join(map(wire.encode, requests))])
    if again != (requests, False):
        raise AssertionError(f"{requests!r} came back as {again!r} (failed before: {failed})")


def _parse(segments: list[bytes]) -> tuple[list[wire.Request], bool]:
    parser = RequestParser()
    requests = parser.feed(wire.HANDSHAKE)[1:]
    try:
        for segment in segments:
            requests += parser.feed(segment)
    except wire.FrameError as error:
        return [*requests, *error.before], True
    if parser.held > sum(map(len, segments)):
        raise AssertionError(f"the parser holds {parser.held} bytes of {segments!r}")
    return requests, False


def fuzz_state(data: bytes) -> None:
    """Decode the bytes as a pickle; what is accepted must mean the same when written again."""
    try:
        value, flavour = state_codec.decode(b64encode(b"\x80\x04" + data))
    except StateError:
        return
    again, _ = state_codec.decode(state_codec.encode(value, flavour))
    if again != value:
        raise AssertionError(f"{value!r} came back as {again!r}")


def fuzz_one(data: bytes) -> None:
    """Let the first byte choose what the others are."""
    if data:
        (fuzz_frames if data[0] % 2 else fuzz_state)(data[1:])


def _forbid_unpickling() -> None:
    """End the run if anything is ever looked up for, or by, a real unpickler."""

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("pickle.find_class", "os.system", "subprocess.Popen"):
            raise AssertionError(f"{event} {arguments!r}")

    sys.addaudithook(refuse)


def _seeds() -> list[bytes]:
    written = b64decode(state_codec.encode(_SEED_STATE, state_codec.Flavour(aware=True)))
    requests: list[wire.Request] = [
        wire.Set(b"/a", b"1"),
        wire.Wait((b"/a", b"/b")),
        wire.MultiSet(((b"/a", b""),)),
    ]
    return [
        b"\x00" + written[2:],
        b"\x00" + pickle.dumps({"round": 1}, 4)[2:],
        b"\x01" + b"".join(map(wire.encode, requests)),
        b"\x01" + wire.encode(wire.CompareSet(b"/a", b"x", b"y")),
    ]


def main() -> None:
    """Run libFuzzer with the arguments of the command line."""
    for seed in _seeds():
        fuzz_one(seed)
    if pickle_reader.MODULE.encode() not in _seeds()[0]:
        raise AssertionError("the seed is no state")
    corpus = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    for directory in corpus[:1]:
        for number, seed in enumerate(_seeds()):
            (Path(directory) / f"seed-{number}").write_bytes(seed)
    atheris.Setup(sys.argv, fuzz_one)
    _forbid_unpickling()
    atheris.Fuzz()


if __name__ == "__main__":
    main()
