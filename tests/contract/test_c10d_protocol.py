# SPDX-License-Identifier: Apache-2.0
"""torch's own TCPStore server and rendezvous state are the oracle: ours answer the same."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from launcher_shim.c10d.state_codec import SENTINEL, Flavour, NodeDesc, TorchState, decode, encode
from launcher_shim.tcpstore import wire
from tests.support.sidecars.processes import PATIENCE_S
from tests.support.sidecars.torch_states import STATES

ROOT = Path(__file__).parents[2]
END = wire.Ping(0xC0FFEE)
CLOSED = b"closed"


class Servers(NamedTuple):
    """The ports of torch's own server and of ours, both empty at first."""

    torchs: int
    ours: int


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    store = torchs_server()
    with our_server(request.param) as port:
        yield Servers(store.port, port)


def torchs_server() -> dist.TCPStore:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert store.libuvBackend
    return store


@contextmanager
def our_server(loop: str) -> Iterator[int]:
    """Run our server over a store in memory with native semantics; yields its port."""
    command = [sys.executable, "-m", "tests.support.sidecars.c10d_memory_server", loop]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


def ask(port: int, frames: Sequence[wire.Request | bytes]) -> bytes:
    """Send the frames at once; return what is answered before the last ping, or the close."""
    stream = b"".join(f if isinstance(f, bytes) else wire.encode(f) for f in frames)
    end = wire.pong(END.nonce)
    answers = b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        try:
            client.sendall(wire.HANDSHAKE + stream + wire.encode(END))
            while not answers.endswith(end):
                if not (got := client.recv(1 << 20)):
                    return answers + CLOSED
                answers += got
        except (ConnectionResetError, BrokenPipeError):
            # A reset may overtake the answers that came before it.
            return CLOSED
    return answers


W, G, S = wire.Wait, wire.Get, wire.Set
CASES: dict[str, list[wire.Request | bytes]] = {
    "a missing value": [G(b"/nothing")],
    "an empty key": [S(b"", b"x"), G(b"")],
    "an empty value": [S(b"/e", b""), G(b"/e"), wire.Check((b"/e",))],
    "empty lists": [W(()), wire.Check(()), wire.MultiGet(()), wire.MultiSet(())],
    "a value is replaced": [S(b"/r", b"1"), S(b"/r", b"2"), G(b"/r")],
    "the last of equal keys": [wire.MultiSet(((b"/ms", b"1"), (b"/ms", b"2"))), G(b"/ms")],
    "many values": [S(b"/m", b"1"), wire.MultiGet((b"/m", b"/none", b"/m"))],
    "delete": [S(b"/d", b"1"), wire.DeleteKey(b"/d"), wire.DeleteKey(b"/d"), G(b"/d")],
    "append": [wire.Append(b"/a", b"x"), wire.Append(b"/a", b"y"), G(b"/a")],
    "compare_set creates": [wire.CompareSet(b"/c1", b"", b"d"), G(b"/c1")],
    "compare_set lies about a missing key": [
        wire.CompareSet(b"/c2", b"e", b"d"),
        G(b"/c2"),
        wire.Check((b"/c2",)),
    ],
    "compare_set replaces": [S(b"/c3", b"e"), wire.CompareSet(b"/c3", b"e", b"d"), G(b"/c3")],
    "compare_set loses": [S(b"/c4", b"x"), wire.CompareSet(b"/c4", b"e", b"d"), G(b"/c4")],
    "compare_set of empty with empty": [
        S(b"/c5", b""),
        wire.CompareSet(b"/c5", b"", b"d"),
        G(b"/c5"),
    ],
    "add": [wire.Add(b"/n", 5), wire.Add(b"/n", -7), G(b"/n")],
    "add to text of a number": [S(b"/n1", b"  12abc"), wire.Add(b"/n1", 1), G(b"/n1")],
    "add to a signed number": [S(b"/n2", b"+7"), wire.Add(b"/n2", 1), G(b"/n2")],
    "add to leading zeros": [S(b"/n3", b"0" * 30 + b"7"), wire.Add(b"/n3", 1)],
    "add wraps": [S(b"/n4", b"%d" % (2**63 - 1)), wire.Add(b"/n4", 1), G(b"/n4")],
    "add wraps downwards": [wire.Add(b"/n5", -(2**63)), wire.Add(b"/n5", -1), G(b"/n5")],
    "add to no number": [S(b"/n6", b"abc"), wire.Add(b"/n6", 1)],
    "add to nothing": [S(b"/n7", b""), wire.Add(b"/n7", 1)],
    "add to too much": [S(b"/n8", b"%d" % 2**63), wire.Add(b"/n8", 1)],
    "wait for what is there": [S(b"/w", b""), W((b"/w",)), G(b"/w")],
    "a wait lets others pass": [S(b"/w1", b"v"), W((b"/w2",)), G(b"/w1"), S(b"/w2", b"")],
    "a wait counts a key twice": [W((b"/w3", b"/w3")), S(b"/w3", b""), G(b"/w3")],
    "a wait keeps what came and went": [
        W((b"/w4", b"/w5")),
        S(b"/w4", b""),
        wire.DeleteKey(b"/w4"),
        S(b"/w5", b""),
    ],
    "append ends a wait": [W((b"/w6",)), wire.Append(b"/w6", b"x")],
    "add ends a wait": [W((b"/w7",)), wire.Add(b"/w7", 1)],
    "compare_set ends a wait": [W((b"/w8",)), wire.CompareSet(b"/w8", b"", b"x")],
    "multi_set ends a wait": [W((b"/w9",)), wire.MultiSet(((b"/w9", b""),))],
    "cancel": [W((b"/x",)), wire.CancelWait(), S(b"/x", b"")],
    "cancel too late": [W((b"/x1",)), S(b"/x1", b""), wire.CancelWait()],
    "cancel nothing": [wire.CancelWait()],
    "queue": [
        wire.QueuePush(b"/q", b"a"),
        wire.QueuePush(b"/q", b"b"),
        wire.QueueLen(b"/q"),
        wire.Check((b"/q",)),
        W((b"/q",)),
        wire.QueuePop(b"/q"),
        wire.QueuePop(b"/q"),
        wire.QueuePop(b"/q"),
        wire.Check((b"/q",)),
        wire.QueueLen(b"/q"),
    ],
    "a queue is no value": [wire.QueuePush(b"/q1", b"a"), G(b"/q1"), wire.DeleteKey(b"/q1")],
    "a push ends a wait": [W((b"/q2",)), wire.QueuePush(b"/q2", b"a")],
    "a push ends a wait for twice the key": [
        W((b"/q3", b"/q3")),
        wire.QueuePush(b"/q3", b"a"),
        wire.Ping(1),
        wire.QueuePush(b"/q3", b"b"),
    ],
    "barrier": [wire.Barrier(b"/b", 2), G(b"/b"), wire.Barrier(b"/b", 2), G(b"/b")],
    "a barrier is not used again": [
        wire.Barrier(b"/b1", 1),
        wire.Barrier(b"/b1", 1),
        wire.Barrier(b"/b1", 1),
        G(b"/b1"),
    ],
    "cancel does not leave a barrier": [
        wire.Barrier(b"/b2", 2),
        wire.CancelWait(),
        wire.Barrier(b"/b2", 2),
    ],
    "a barrier for nobody": [wire.Barrier(b"/b3", 0), wire.Barrier(b"/b3", -1)],
    "a barrier ends a wait": [W((b"/b4",)), wire.Barrier(b"/b4", 1)],
    "a barrier at no number": [S(b"/b5", b"abc"), wire.Barrier(b"/b5", 1)],
    "no such operation": [b"\x13"],
    "the handshake again": [wire.Validate()],
    "the longest key": [S(b"k" * wire.KEY_MAX, b"v"), G(b"k" * wire.KEY_MAX)],
    "a key too long": [G(b"k" * (wire.KEY_MAX + 1))],
    "the longest value": [S(b"/v", b"v" * wire.VALUE_MAX), G(b"/v")],
    "a value too long": [S(b"/v1", b"v" * (wire.VALUE_MAX + 1))],
    "append beyond the longest value": [
        S(b"/v2", b"v" * wire.VALUE_MAX),
        wire.Append(b"/v2", b"v"),
        G(b"/v2"),
    ],
    "too many keys": [wire.MultiGet((b"",) * (wire.KEYS_MAX + 1))],
    "too many items": [wire.MultiSet(((b"", b""),) * (wire.KEYS_MAX + 1))],
    "a length of 8 EiB": [b"\x03" + b"\xff" * 7 + b"\x7f"],
}


@pytest.mark.parametrize("frames", CASES.values(), ids=CASES.keys())
def test_answers_are_those_of_torch(servers: Servers, frames: list[wire.Request | bytes]) -> None:
    expected, answers = (ask(port, frames) for port in servers)
    if CLOSED in (expected[-6:], answers[-6:]):
        assert answers.endswith(CLOSED)
        assert expected.endswith(CLOSED)
    else:
        assert answers == expected


def test_as_many_keys_as_torch_allows(servers: Servers) -> None:
    frames: list[wire.Request | bytes] = [
        S(b"/k", b""),
        wire.Check((b"/k",) * wire.KEYS_MAX),
        wire.MultiSet(((b"/k", b"v"),) * wire.KEYS_MAX),
        G(b"/k"),
    ]
    assert ask(servers.ours, frames) == wire.READY + wire.vec(b"v") + wire.pong(END.nonce)


examples = count()
key = st.sampled_from([b"a", b"b", b"c"])
value = st.sampled_from([b"", b"x", b"7", b" -3 ", b"99999999999999999999"])
key_lists = st.lists(key, max_size=3).map(tuple)
delta = st.sampled_from([0, 1, -(2**63), 2**63 - 1])
operations = st.one_of(
    st.builds(wire.Set, key, value),
    st.builds(wire.CompareSet, key, value, value),
    st.builds(wire.Get, key),
    st.builds(wire.Add, key, delta),
    st.builds(wire.Check, key_lists),
    st.builds(wire.DeleteKey, key),
    st.builds(wire.Append, key, value),
    st.builds(wire.MultiGet, key_lists),
    st.builds(wire.MultiSet, st.lists(st.tuples(key, value), max_size=3).map(tuple)),
    st.builds(wire.QueuePush, key, value),
    st.builds(wire.QueuePop, key),
    st.builds(wire.QueueLen, key),
    st.just(wire.CancelWait()),
)


def placed(request: wire.Request, prefix: bytes) -> wire.Request:
    """Move a request's keys to where no other example has been."""
    if isinstance(request, wire.MultiSet):
        return wire.MultiSet(tuple((prefix + key, value) for key, value in request.items))
    if isinstance(request, (wire.Check, wire.Wait, wire.MultiGet)):
        return request._replace(keys=tuple(prefix + key for key in request.keys))
    if isinstance(
        request, (wire.Validate, wire.Ping, wire.NumKeys, wire.ListKeys, wire.CancelWait)
    ):
        return request
    return request._replace(key=prefix + request.key)


# No deadline: torch's server asks the DNS for the name of every client.
@settings(max_examples=150)
@given(
    # Left out, for torch's server lets them end a wait whose keys are not all there: a second
    # wait, a compare_set that stores nothing, a push to one of several keys.
    st.none() | st.builds(wire.Wait, key_lists),
    st.lists(operations, max_size=12),
)
def test_any_sequence_is_answered_as_by_torch(
    servers: Servers, wait: wire.Wait | None, sequence: list[wire.Request]
) -> None:
    if wait is not None:
        sequence = [r for r in sequence if not isinstance(r, (wire.CompareSet, wire.QueuePush))]
        sequence.insert(0, wait)
    prefix = b"/example/%d/" % next(examples)
    frames: list[wire.Request | bytes] = [placed(request, prefix) for request in sequence]
    expected, answers = (ask(port, frames) for port in servers)
    if CLOSED in (expected[-6:], answers[-6:]):
        assert answers[-6:] == expected[-6:]
    else:
        assert answers == expected


def drive(port: int) -> Iterator[object]:
    """Do with torch's own client all that it can do, and yield what comes of it."""
    store = dist.TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    short = timedelta(seconds=0.05)
    yield store.set("a", "1")
    yield store.get("a")
    yield store.add("a", 41)
    yield store.compare_set("a", "42", "x")
    yield store.compare_set("a", "42", "y")
    yield store.compare_set("fresh", "", "made")
    yield store.check(["a", "b"]), store.check(["a"])
    yield store.multi_set(["m1", "m2"], ["v1", "v2"])
    yield store.multi_get(["m1", "m2"])
    yield store.append("m1", "+"), store.get("m1")
    yield store.delete_key("m1"), store.delete_key("m1")
    yield store.num_keys()
    yield sorted(store.list_keys())
    yield store.wait(["a", "m2"])
    yield fails(lambda: store.wait(["missing"], short))
    yield store.get("a")
    yield store.queue_push("q", "e"), store.queue_len("q"), store.queue_pop("q")
    yield fails(lambda: store.queue_pop("q", False))
    prefixed = dist.PrefixStore("p", store)
    yield prefixed.set("k", "v"), prefixed.get("k"), store.get("p/k")
    yield store.set("big", "v" * 5_000_000), len(store.get("big"))
    other = store.clone()
    yield other.get("a"), other.set("b", "2"), store.wait(["b"])


def fails(call: Callable[[], object]) -> str:
    with pytest.raises(dist.DistError) as caught:
        call()
    return type(caught.value).__name__


def test_torchs_own_client_sees_no_difference() -> None:
    # Servers of its own: what other tests stored would count in num_keys and list_keys.
    theirs = torchs_server()
    with our_server("asyncio") as port:
        assert list(drive(port)) == list(drive(theirs.port))


def test_torchs_own_client_waits_for_what_another_sets(servers: Servers) -> None:
    waiting, setting = (dist.TCPStore("127.0.0.1", servers.ours, is_master=False) for _ in "ab")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(waiting.get, "later")
        setting.set("unrelated", "1")
        assert not answer.done()
        setting.set("later", "came")
        assert answer.result(PATIENCE_S) == b"came"


def as_torch_has_it(state: TorchState, aware: bool) -> torchs._RendezvousState:
    def node(desc: NodeDesc) -> torchs._NodeDesc:
        return torchs._NodeDesc(*desc)

    def time(utc: datetime) -> datetime:
        return utc if aware else utc.replace(tzinfo=None)

    made = torchs._RendezvousState()
    made.round, made.complete, made.closed = state.round, state.complete, state.closed
    made.deadline = None if state.deadline is None else time(state.deadline)
    made.participants = {node(desc): rank for desc, rank in state.participants.items()}
    made.wait_list = {node(desc) for desc in state.wait_list}
    made.redundancy_list = {node(desc) for desc in state.redundancy_list}
    made.last_heartbeats = {node(desc): time(at) for desc, at in state.last_heartbeats.items()}
    return made


@given(STATES, st.booleans())
def test_torch_reads_what_we_write(state: TorchState, aware: bool) -> None:
    read = pickle.loads(b64decode(encode(state, Flavour(aware))))
    assert type(read) is torchs._RendezvousState
    assert read.__dict__ == as_torch_has_it(state, aware).__dict__
    assert list(read.__dict__) == list(torchs._RendezvousState().__dict__)
    assert list(read.participants) == list(as_torch_has_it(state, aware).participants)
    assert all(type(desc) is torchs._NodeDesc for desc in read.participants)


@given(STATES, st.booleans(), st.sampled_from([4, 5]))
def test_we_read_what_torch_writes(state: TorchState, aware: bool, protocol: int) -> None:
    written = b64encode(pickle.dumps(as_torch_has_it(state, aware), protocol))
    has_time = state.deadline is not None or bool(state.last_heartbeats)
    assert decode(written) == (state, Flavour(aware if has_time else None))


def test_thousands_of_nodes_pass_both_ways() -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    everyone = [NodeDesc(f"worker-{i}.job.training.svc", 7 + i, i % 3) for i in range(3000)]
    state = TorchState(
        participants={desc: rank for rank, desc in enumerate(everyone)},
        last_heartbeats={desc: start + timedelta(seconds=i) for i, desc in enumerate(everyone)},
    )
    flavour = Flavour(aware=True)
    theirs = as_torch_has_it(state, aware=True)
    assert decode(b64encode(pickle.dumps(theirs))) == (state, flavour)
    assert decode(encode(state, flavour)) == (state, flavour)
    assert pickle.loads(b64decode(encode(state, flavour))).__dict__ == theirs.__dict__


def test_attributes_of_a_later_torch_are_carried() -> None:
    later = torchs._RendezvousState()
    node = torchs._NodeDesc("a", 1, 0)
    later.epoch, later.spares, later.note = 3, [node], {"why": None}
    state, flavour = decode(b64encode(pickle.dumps(later)))
    assert flavour.extra == {"epoch": 3, "spares": [NodeDesc("a", 1, 0)], "note": {"why": None}}
    assert pickle.loads(b64decode(encode(state, flavour))).__dict__ == later.__dict__


def test_a_torch_before_2_3_has_no_redundancy_list() -> None:
    older = torchs._RendezvousState()
    del older.redundancy_list
    state, flavour = decode(b64encode(pickle.dumps(older)))
    assert (state, flavour.redundancy) == (TorchState(), False)
    assert pickle.loads(b64decode(encode(state, flavour))).__dict__ == older.__dict__


def test_the_sentinel_is_torchs() -> None:
    assert C10dRendezvousBackend._NULL_SENTINEL.encode() == SENTINEL


@pytest.mark.parametrize("nodes_count", [2, 64, 256])
def test_a_state_of_ours_is_no_larger_than_torchs(nodes_count: int) -> None:
    far = datetime(2100, 1, 1, tzinfo=UTC)
    everyone = [NodeDesc(f"worker-{i}", 1000 + i, 0) for i in range(nodes_count)]
    state = TorchState(
        participants={desc: rank for rank, desc in enumerate(everyone)},
        last_heartbeats=dict.fromkeys(everyone, far),
    )
    theirs = b64encode(pickle.dumps(as_torch_has_it(state, aware=True)))
    # Some names that torch would need only once there is a first time are always written.
    assert len(encode(state, Flavour(aware=True))) <= len(theirs) + 64
