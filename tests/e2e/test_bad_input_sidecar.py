# SPDX-License-Identifier: Apache-2.0
"""Bytes that nobody should send, to running sidecars and into their store (I8).

Each fails its own request with a clear log line; the real job beside it makes its steps all the
time, with the same processes.
"""

from __future__ import annotations

import pickle
import random
import socket
import struct
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from rdzv.records.codec import dump_record
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.training.job import Job, Node
from tests.support.training.step_log import World

pytestmark = [pytest.mark.torch, pytest.mark.etcd, pytest.mark.timeout(600)]

HANDSHAKE = b"\x00\xce\xf7\x85\x3c"
SET, COMPARE_SET, GET, ADD, CHECK, WAIT, MULTI_SET, PING = 1, 2, 3, 4, 5, 6, 11, 13
KEY_MAX, VALUE_MAX, KEYS_MAX = 8 * 1024, 8 * 1024 * 1024, 128 * 1024
STORE_VALUE_MAX = 1024 * 1024
NO_STATE = b"Y2FuaW1hZGFt"
"""What torch's first compare-and-set makes of a rendezvous without a state."""

_JUMPING_CLOCK = """
import itertools, sys, time
_real, _jumps = time.time, itertools.cycle([0.0, 4e8, -1.2e9, 3600.0, -86400.0])
def _jumping():
    # grpc hands its deadlines to its core as times of this clock, which there has not jumped.
    if sys._getframe(1).f_globals["__name__"].startswith("grpc"):
        return _real()
    return _real() + next(_jumps)
time.time = _jumping
"""


def count(number: int) -> bytes:
    return struct.pack("<Q", number)


def text(value: bytes) -> bytes:
    return count(len(value)) + value


def request(opcode: int, *parts: bytes) -> bytes:
    return bytes([opcode]) + b"".join(map(text, parts))


class Client:
    """A client of a sidecar's rendezvous endpoint that sends whatever it is told."""

    def __init__(self, node: Node) -> None:
        self._socket = socket.create_connection(("127.0.0.1", node.c10d_port), timeout=20)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def greet(self) -> Client:
        nonce = b"\x01\x02\x03\x04"
        self.send(HANDSHAKE + bytes([PING]) + nonce)
        assert self.read(4) == nonce
        return self

    def send(self, content: bytes) -> None:
        self._socket.sendall(content)

    def read(self, size: int) -> bytes:
        """Read exactly so many bytes, fewer only at the end of the connection."""
        content = b""
        while len(content) < size:
            try:
                piece = self._socket.recv(size - len(content))
            except ConnectionError:
                break
            if not piece:
                break
            content += piece
        return content

    def value(self) -> bytes:
        (size,) = struct.unpack("<Q", self.read(8))
        return self.read(size)

    def is_closed(self) -> bool:
        """Whether the other side ends the connection, within the time-out."""
        return self.read(1) == b""


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def job(
    run_job: Callable[..., AbstractContextManager[Job]],
    cluster: EtcdCluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Job]:
    # The sidecars of this job live with a wall clock that jumps by years, at every look.
    clock: Path = tmp_path_factory.mktemp("clock")
    (clock / "sitecustomize.py").write_text(_JUMPING_CLOCK)
    root = Path(__file__).parent.parent.parent
    environ = {"PYTHONPATH": f"{clock}:{root}"}
    with run_job(cluster.endpoints, least=2, most=3, sidecar_environ=environ) as job:
        job.add(2)
        yield job


@pytest.fixture
def world(job: Job) -> Iterator[World]:
    """The job's world, which takes no notice of the test."""
    world = job.world_of(job.nodes.values())
    since_s, before = time.monotonic(), job.round
    yield world
    job.until(job.in_agreement, 60, "everybody agrees")
    job.goes_on(world)
    job.undisturbed(world, since_s)
    assert job.round.number == before.number


@pytest.fixture
def node(job: Job, world: World) -> Node:
    return job.nodes[world.workers[0].node]


def logs_one_line_that_says(node: Node, words: str) -> bool:
    return any(words in line for line in node.sidecar_log().splitlines())


def test_a_wall_clock_that_jumps_is_not_looked_at(job: Job, world: World) -> None:
    began_s = time.monotonic()
    while time.monotonic() - began_s < 2 * job.lease_s:
        job.goes_on(world)
    job.until(
        lambda: len({m.incarnation for m in job.witness.sight.membership.members.values()}) == 2,
        60,
        "both are members",
    )
    assert all("starts" in n.sidecar_log().splitlines()[0] for n in job.nodes.values())


def test_i8_random_bytes(node: Node) -> None:
    randomness = random.Random(1)
    for number in range(150):
        with Client(node) as client:
            if number % 2:
                client.greet()
            try:
                client.send(randomness.randbytes(randomness.randrange(1, 4000)))
            except ConnectionError:
                continue
    assert node.ask("healthz") == (200, "healthy\n")


def test_i8_truncated_requests(node: Node) -> None:
    whole = request(SET, b"/key", b"value") + request(COMPARE_SET, b"/key", b"value", b"other")
    for size in range(len(whole)):
        with Client(node).greet() as client:
            client.send(whole[:size])
    assert node.ask("healthz") == (200, "healthy\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "Closed the c10d connection"),
        (HANDSHAKE + bytes([99]), "Closed the c10d connection"),
        (HANDSHAKE + bytes([SET]) + count(2**64 - 1), "Closed the c10d connection"),
        (HANDSHAKE + bytes([GET]) + count(KEY_MAX + 1), str(KEY_MAX)),
        (HANDSHAKE + request(SET, b"/k")[:-2] + b"/k" + count(VALUE_MAX + 1), str(VALUE_MAX)),
        (HANDSHAKE + bytes([WAIT]) + count(KEYS_MAX + 1), str(KEYS_MAX)),
        (HANDSHAKE + bytes([CHECK]) + count(2**63), str(KEYS_MAX)),
        (HANDSHAKE + request(SET, b"/w", b"many") + request(ADD, b"/w") + count(1), "many"),
    ],
    ids=["http", "opcode", "length", "key", "value", "keys", "count", "no-number"],
)
def test_i8_a_hostile_request_ends_its_own_connection(
    job: Job, node: Node, content: bytes, words: str
) -> None:
    with Client(node) as client:
        client.send(content)
        assert client.is_closed()
    job.until(lambda: logs_one_line_that_says(node, words), 20, f"the log says {words!r}")


def test_i8_keys_and_values_at_the_limits(job: Job, node: Node) -> None:
    key, value = b"/" + b"k" * (KEY_MAX - 1), b"v" * STORE_VALUE_MAX
    with Client(node).greet() as client:
        client.send(request(SET, key, value) + request(GET, key))
        assert client.value() == value
    with Client(node).greet() as client:
        client.send(request(SET, b"/large", b"v" * VALUE_MAX))
        assert client.is_closed()
    words = f"the store takes at most {STORE_VALUE_MAX}"
    job.until(lambda: logs_one_line_that_says(node, words), 20, "the log says why")


def test_many_keys_in_one_request(node: Node) -> None:
    # torch's rank 0 sets one key for each node of a round.
    keys = [b"/many/%d" % number for number in range(1000)]
    items = b"".join(text(key) + text(b"value") for key in keys)
    with Client(node).greet() as client:
        client.send(bytes([MULTI_SET]) + count(len(keys)) + items)
        client.send(bytes([WAIT]) + count(len(keys)) + b"".join(map(text, keys)))
        assert client.read(1) == b"\x00"


class _Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str, str], object], tuple[str, str]]:
        return open, (str(self._path), "w")


def test_i8_a_pickle_that_names_another_type(job: Job, node: Node, tmp_path: Path) -> None:
    target = tmp_path / "the-pickle-was-run"
    bomb = b64encode(pickle.dumps(_Bomb(target)))
    key = f"/torch.rendezvous.{job.name}".encode()
    # Beside the torchrun of a pod nobody else is listened to; where there is none, anybody is.
    with Client(node).greet() as client:
        client.send(request(COMPARE_SET, key, b"", NO_STATE))
        assert client.is_closed()
    (vacant,) = job.add(launch=False)
    with Client(vacant).greet() as client:
        client.send(request(COMPARE_SET, key, b"", NO_STATE))
        assert client.value() == NO_STATE
        for expected in (b"", NO_STATE, bomb):
            client.send(request(COMPARE_SET, key, expected, bomb))
            assert client.value() == NO_STATE
    job.until(
        lambda: logs_one_line_that_says(vacant, "ignoring a compare-and-set"), 20, "the log says so"
    )
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


@pytest.mark.parametrize("which", ["job", "member", "incarnation", "node", "round", "drain"])
def test_i8_corrupt_records_in_the_store(job: Job, world: World, node: Node, which: str) -> None:
    generation = job.keys.in_generation(1)
    run = generation.run(job.name)
    key = {
        "job": job.keys.job,
        "member": generation.member(node.name),
        "incarnation": job.keys.incarnation(node.name),
        "node": run.node(node.name),
        "round": run.round,
        "drain": generation.drain("nobody"),
    }[which]
    for garbage in GARBAGE:
        job.tell(f"{key} becomes {garbage[:30]!r}")
        job.witness.put(key, garbage)
        job.goes_on(world, 10)
    if which not in ("incarnation", "drain"):
        job.until(
            lambda: (kv := job.witness.kvs().get(key)) is not None and kv.value not in GARBAGE,
            60,
            "the record is put right",
        )
    job.until(
        lambda: any(key in n.sidecar_log() for n in job.nodes.values()),
        60,
        f"a sidecar has logged a line about {key}",
    )


def test_a_node_joins_after_all_that(job: Job) -> None:
    job.add()
    job.world_of(job.nodes.values())
    job.until(job.in_agreement, 60, "everybody agrees")
