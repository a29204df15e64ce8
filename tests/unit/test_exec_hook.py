# SPDX-License-Identifier: Apache-2.0
"""How long a hook looks for a way to its agent, while the sidecar beside it comes and goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher_shim.horovod.exec import client
from launcher_shim.horovod.exec.client import RemoteCommand, UnknownEnd
from launcher_shim.rundir.exec_frames import ATTACHED, EXIT, LEASE_TTL_S, encode, patience_s

PATIENCE_S = patience_s(LEASE_TTL_S)


class Connection:
    """A connection to a sidecar that ends at ``until_s``, or brings the command's end."""

    def __init__(self, times: Times, until_s: float, answers: bytes) -> None:
        self._times = times
        self._until_s = until_s
        self._answers = answers

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def sendall(self, data: bytes) -> None:
        pass

    def recv(self, size: int) -> bytes:
        answers, self._answers = self._answers, b""
        if not answers:
            self._times.now_s = self._until_s
        return answers


class Times:
    """Time that passes only by waiting; a sidecar listens in each of ``spans``.

    The last one has a way to the agent.
    """

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        self.now_s = 0.0
        self._spans = spans

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def monotonic(self) -> float:
        return self.now_s

    def connect(self, host: str) -> Connection:
        for number, (from_s, until_s) in enumerate(self._spans, 1):
            if from_s <= self.now_s < until_s:
                last = encode(ATTACHED) + encode(EXIT, b"7", 1)
                return Connection(self, until_s, last if number == len(self._spans) else b"")
        raise ConnectionRefusedError("nothing listens there")


@pytest.fixture(autouse=True)
def _of_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_RUN_DIR", str(tmp_path))


def run(monkeypatch: pytest.MonkeyPatch, *spans: tuple[float, float]) -> int:
    times = Times(spans)
    monkeypatch.setattr(client, "time", times)
    monkeypatch.setattr(client, "connect", times.connect)
    return RemoteCommand("node-0.1a2b3c4d", "true").run()


def test_i5_sidecars_that_know_no_way_while_the_store_is_away_end_no_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each gap is within its patience, all of them together are not.
    assert run(monkeypatch, (6, 106), (112, 130), (137, 145), (150, 200)) == 7


@pytest.mark.parametrize(
    "spans",
    [
        [(PATIENCE_S + 1, 100)],
        # A sidecar that ends as soon as it has begun is none.
        [(8, 8.5), (16.5, 17), (25, 100)],
        [(8, 8.5), (8.5 + PATIENCE_S + 1, 100)],
    ],
)
def test_where_no_sidecar_stays_the_end_is_unknown(
    monkeypatch: pytest.MonkeyPatch, spans: list[tuple[float, float]]
) -> None:
    with pytest.raises(UnknownEnd, match="there is no way to host"):
        run(monkeypatch, *spans)
