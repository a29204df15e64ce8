# SPDX-License-Identifier: Apache-2.0
"""Bytes that nobody should send, to running sidecars and into their store (I8).

Each fails its own request with a clear log line; the real job beside it makes its steps all the
time, with the same processes. What else may be sent is in ``tests/fuzz`` and ``tests/contract``.
"""

from __future__ import annotations

import pickle
import socket
import struct
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from rdzv.records.codec import dump_record
from tests.support.training.job import Job, RunJob
from tests.support.training.pods import ROOT, Node
from tests.support.training.step_log import World

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

HANDSHAKE = b"\x00\xce\xf7\x85\x3c"
SET, COMPARE_SET, GET, ADD, CHECK, WAIT = 1, 2, 3, 4, 5, 6
KEY_MAX, VALUE_MAX, KEYS_MAX = 8 * 1024, 8 * 1024 * 1024, 128 * 1024
NO_STATE = b"Y2FuaW1hZGFt"
"""What torch's first compare-and-set makes of a rendezvous without a state."""

_JUMPING_CLOCK = """
import itertools, time
_real, _jumps = time.time, itertools.cycle([0.0, 4e8, -1.2e9, 3600.0, -86400.0])
time.time = lambda: _real() + next(_jumps)
"""


def count(number: int) -> bytes:
    return struct.pack("<Q", number)


def request(opcode: int, *parts: bytes) -> bytes:
    return bytes([opcode]) + b"".join(count(len(part)) + part for part in parts)


def answer(node: Node, content: bytes, size: int = 1) -> bytes:
    """Send something to a node's rendezvous port; so many bytes of the answer, or all of it."""
    got = b""
    with socket.create_connection(("127.0.0.1", node.pod.c10d_port), timeout=60) as client:
        try:
            client.sendall(content)
            while len(got) < size and (piece := client.recv(size - len(got))):
                got += piece
        except ConnectionError:
            pass
    return got


def send(node: Node, content: bytes) -> None:
    """Send something to a node's rendezvous port, and close the connection at once."""
    address = ("127.0.0.1", node.pod.c10d_port)
    # It may close first.
    with socket.create_connection(address, timeout=60) as client, suppress(ConnectionError):
        client.sendall(content)


@pytest.fixture(scope="module")
def job(
    run_job: RunJob, embedded: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Job]:
    # The sidecars of this job live with a wall clock that jumps by years, at every look.
    clock: Path = tmp_path_factory.mktemp("clock")
    (clock / "sitecustomize.py").write_text(_JUMPING_CLOCK)
    environ = {"PYTHONPATH": f"{clock}:{ROOT}"}
    with run_job(embedded, least=2, most=3, lease_s=30.0, sidecar_environ=environ) as job:
        job.add(2)
        yield job


@pytest.fixture
def world(job: Job) -> Iterator[World]:
    """The job's world, which takes no notice of the test."""
    world = job.world_of(job.nodes.values())
    before = job.round
    yield world
    job.until(job.in_agreement, 60, "everybody agrees")
    job.undisturbed(world)
    assert job.round.number == before.number


def until_logged(job: Job, node: Node, words: str) -> None:
    job.until(lambda: words in node.sidecar_log(), 60, f"{node.name} logs {words!r}")


HOSTILE = [
    (b"GET / HTTP/1.1\r\n\r\n", "Closed the c10d connection"),
    (HANDSHAKE + bytes([99]), "Closed the c10d connection"),
    (HANDSHAKE + bytes([SET]) + count(2**64 - 1), "Closed the c10d connection"),
    (HANDSHAKE + bytes([CHECK]) + count(2**63), str(KEYS_MAX)),
    (HANDSHAKE + bytes([GET]) + count(KEY_MAX + 1), str(KEY_MAX)),
    (HANDSHAKE + request(SET, b"/k")[:-2] + b"/k" + count(VALUE_MAX + 1), str(VALUE_MAX)),
    (HANDSHAKE + bytes([WAIT]) + count(KEYS_MAX + 1), str(KEYS_MAX)),
    (HANDSHAKE + request(SET, b"/w", b"many") + request(ADD, b"/w") + count(1), "many"),
    (HANDSHAKE + request(SET, b"/large", b"v" * VALUE_MAX), "the store takes at most"),
]


def test_i8_bytes_that_a_sidecar_is_sent(job: Job, world: World) -> None:
    node = job.nodes[world.workers[0].node]
    for content, words in HOSTILE:
        assert answer(node, content) == b""
        until_logged(job, node, words)
    assert node.ask("healthz") == (200, "healthy\n")


def test_i8_requests_that_end_in_the_middle_and_bytes_at_random(job: Job, world: World) -> None:
    node = job.nodes[world.workers[0].node]
    whole = request(SET, b"/cut", b"value") + request(COMPARE_SET, b"/cut", b"value", b"other")
    for size in range(len(whole)):
        send(node, HANDSHAKE + whole[:size])
    randomness = Random(1)
    for number in range(150):
        content = randomness.randbytes(randomness.randrange(1, 4000))
        send(node, HANDSHAKE + content if number % 2 else content)
    assert answer(node, HANDSHAKE + request(GET, b"/cut"), 13) == count(5) + b"value"
    assert node.ask("healthz") == (200, "healthy\n")


class _Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str, str], object], tuple[str, str]]:
        return open, (str(self._path), "w")


def test_i8_a_pickle_that_names_another_type(job: Job, world: World, tmp_path: Path) -> None:
    target = tmp_path / "the-pickle-was-run"
    bomb = b64encode(pickle.dumps(_Bomb(target)))
    key = f"/torch.rendezvous.{job.name}".encode()
    # Beside the torchrun of a pod nobody else is listened to; where there is none, anybody is.
    node = job.nodes[world.workers[0].node]
    assert answer(node, HANDSHAKE + request(COMPARE_SET, key, b"", NO_STATE)) == b""
    (vacant,) = job.add(launch=False, environ={"MUSTER_LEASE_TTL": "8"})  # it is killed below
    changes = [(b"", NO_STATE), *((expected, bomb) for expected in (b"", NO_STATE, bomb))]
    sent = b"".join(request(COMPARE_SET, key, *change) for change in changes)
    wanted = (count(len(NO_STATE)) + NO_STATE) * len(changes)
    assert answer(vacant, HANDSHAKE + sent, len(wanted)) == wanted
    until_logged(job, vacant, "ignoring a compare-and-set")
    assert not target.exists()
    job.kill_node(vacant)


GARBAGE = [
    b"",
    b"\x00\xff\xfe not json",
    b"[" * 100_000,
    b'{"schema": 1}',
    dump_record({"round": -1, "complete": "yes", "closed": 7, "finishing": None, "frozen": [[]]}),
    b'{"schema": 999, "round": 7}',
]


def test_i8_corrupt_records_in_the_store(job: Job, world: World) -> None:
    node = job.nodes[world.workers[0].node]
    generation = job.keys.in_generation(1)
    run = generation.run(job.name)
    # Those of the run first: a member that has lost its own record registers after a pause only.
    put_right = [run.node(node.name), run.round, job.keys.job, generation.member(node.name)]
    stay = [job.keys.incarnation(node.name), generation.drain("nobody")]
    for key in stay + put_right:
        for garbage in GARBAGE:
            job.tell(f"{key} becomes {garbage[:30]!r}")
            job.witness.put(key, garbage)
            job.goes_on(world, 1)
    job.until(
        lambda: all(
            (kv := job.witness.kvs().get(key)) is not None and kv.value not in GARBAGE
            for key in put_right
        ),
        60,
        "the records are put right",
    )
    logs = "".join(each.sidecar_log() for each in job.nodes.values())
    assert [key for key in stay + put_right if key not in logs] == []


@pytest.mark.long
def test_a_node_joins_after_all_that(job: Job) -> None:
    job.add()
    job.world_of(job.nodes.values())
    job.until(job.in_agreement, 60, "everybody agrees")
