# SPDX-License-Identifier: Apache-2.0
"""The state codec: round trips, and bytes that must make nothing happen."""

from __future__ import annotations

import pickle
import sys
import tracemalloc
from base64 import b64decode, b64encode
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.c10d.pickle_reader import MODULE
from launcher_shim.c10d.state_codec import (
    SENTINEL,
    STATE_MAX,
    Flavour,
    NodeDesc,
    TorchState,
    decode,
    encode,
)
from rdzv.errors import StateError
from tests.support.sidecars.torch_states import NODES, STATES

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    st.binary(max_size=255),
    NODES,
)
extras = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=9).map("_".__add__),
    st.one_of(
        plain,
        st.lists(plain, max_size=3),
        st.lists(plain, max_size=3).map(tuple),
        st.sets(plain, max_size=3),
        st.dictionaries(plain, plain, max_size=3),
    ),
    max_size=3,
)


def blob(pickled: bytes) -> bytes:
    return b64encode(pickled)


@given(STATES, st.booleans(), extras)
def test_a_state_comes_back_as_it_was(
    state: TorchState, aware: bool, extra: dict[str, object]
) -> None:
    flavour = Flavour(aware, True, extra)  # type: ignore[arg-type]
    back, seen = decode(encode(state, flavour))
    assert back == state
    assert list(back.participants) == list(state.participants)
    has_time = state.deadline is not None or bool(state.last_heartbeats)
    assert seen == Flavour(aware if has_time else None, True, extra)  # type: ignore[arg-type]


def test_times_need_a_known_flavour() -> None:
    with pytest.raises(ValueError, match="time zone"):
        encode(TorchState(deadline=datetime(2026, 1, 1, tzinfo=UTC)), Flavour())


def test_nodes_are_ordered_as_torch_ranks_them() -> None:
    assert sorted([NodeDesc("b", 1, 0), NodeDesc("a", 2, 1), NodeDesc("a", 2, 0)])[0].local_id == 0


def test_the_sentinel_is_no_state() -> None:
    with pytest.raises(StateError):
        decode(SENTINEL)


class _Local:
    """Something a pickle must not be able to make."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def __setstate__(self, state: object) -> None:
        type(self).made += 1

    def __reduce__(self) -> tuple[object, ...]:
        return (_Local, ())


def _global(module: str, name: str) -> bytes:
    return b"\x8c%c%s\x8c%c%s\x93" % (len(module), module.encode(), len(name), name.encode())


_DATETIME = _global("datetime", "datetime")
_STATE = _global(MODULE, "_RendezvousState") + b")\x81"
_NODE = _global(MODULE, "_NodeDesc") + b")\x81"
_DAY = b"C\x0a\x07\xea\x01\x01\x00\x00\x00\x00\x00\x00"

HOSTILE = {
    "reduce to os.system": b"\x80\x04" + _global("os", "system") + b"\x8c\x02id\x85R.",
    "global by text": b"\x80\x04cos\nsystem\n\x8c\x02id\x85R.",
    "inst": b"(S'id'\nios\nsystem\n.",
    "obj": b"\x80\x04(cos\nsystem\n\x8c\x02ido.",
    "newobj of another class": b"\x80\x04" + _global("builtins", "object") + b")\x81.",
    "newobj_ex": b"\x80\x04" + _global("builtins", "object") + b")}\x92.",
    "newobj of a time": b"\x80\x04" + _DATETIME + b")\x81.",
    "newobj with arguments": b"\x80\x04" + _global(MODULE, "_RendezvousState") + b"K\x01\x85\x81.",
    "reduce of the state's class": b"\x80\x04" + _global(MODULE, "_RendezvousState") + b")R.",
    "another name of the module": b"\x80\x04" + _global(MODULE, "logger") + b".",
    "a dotted name": b"\x80\x04" + _global("datetime", "datetime.now") + b")R.",
    "a name of no text": b"\x80\x04K\x01K\x02\x93.",
    "extension": b"\x80\x04\x82\x01.",
    "persistent id": b"\x80\x04\x8c\x01xQ.",
    "persistent id by text": b"\x80\x04Px\n.",
    "build of a number": b"\x80\x04K\x01}b.",
    "build of a time": b"\x80\x04" + _DATETIME + _DAY + b"\x85R}b.",
    "build with slots": b"\x80\x04" + _STATE + b"}}\x86b.",
    "build of a name": b"\x80\x04" + _DATETIME + b"}b.",
    "node with setstate": b"\x80\x04" + _NODE + b"}(\x8c\x0c__setstate__K\x01ub.",
    "reduce of a result": b"\x80\x04" + _DATETIME + _DAY + b"\x85R)R.",
    "a time of nonsense": b"\x80\x04" + _DATETIME + b"C\x0a" + b"\xff" * 10 + b"\x85R.",
    "a time of text": b"\x80\x04" + _DATETIME + b"\x8c\x0a0123456789\x85R.",
    "a time with a made-up zone": b"\x80\x04" + _DATETIME + _DAY + b"}\x86R.",
    "a huge time difference": b"\x80\x04"
    + _global("datetime", "timedelta")
    + b"\x8a\x08"
    + b"\xff" * 7
    + b"\x7fK\x00K\x00\x87R.",
    "a huge number": b"\x80\x04\x8a\xff" + b"\xff" * 255 + b".",
    "a number of 4 GiB": b"\x80\x04\x8b\xff\xff\xff\xff.",
    "text of 4 GiB": b"\x80\x04X\xff\xff\xff\xffabc.",
    "text that is none": b"\x80\x04\x8c\x02\xff\xfe.",
    "bytes of 8 EiB": b"\x80\x04\x8e" + b"\xff" * 8 + b"abc.",
    "bytearray": b"\x80\x05\x96" + b"\x00" * 8 + b".",
    "out-of-band buffer": b"\x80\x05\x97.",
    "a memo that is not there": b"\x80\x04h\x07.",
    "a memo far away": b"\x80\x04}r\xff\xff\xff\x7f.",
    "a batch that never began": b"\x80\x04}u.",
    "an odd batch": b"\x80\x04}(K\x01u.",
    "a set of a dictionary": b"\x80\x04\x8f(}\x90.",
    "a dictionary with a list for key": b"\x80\x04}]K\x01s.",
    "a list in itself": b"\x80\x04]\x94h\x00a.",
    "a node that is not built": b"\x80\x04\x8f(" + _NODE + b"\x90.",
    "nothing on the stack": b"\x80\x04R.",
    "only stop": b"\x80\x04.",
    "two values": b"\x80\x04NN.",
    "no end": b"\x80\x04" + _STATE,
    "protocol 2": pickle.dumps({"round": 1}, 2),
    "protocol 9": b"\x80\x09N.",
    "a dictionary for a state": pickle.dumps({"round": 1}, 4),
    "a state without attributes": b"\x80\x04" + _STATE + b"}b.",
    "a class of another module": pickle.dumps(_Local(), 4),
    "empty": b"",
}


@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE.keys())
def test_i8_a_hostile_pickle_is_refused_and_runs_nothing(program: bytes) -> None:
    modules, made = set(sys.modules), _Local.made
    with pytest.raises(StateError):
        decode(blob(program))
    assert _Local.made == made
    assert set(sys.modules) == modules


_GOOD = b64decode(
    encode(
        TorchState(
            3,
            True,
            datetime(2026, 1, 1, tzinfo=UTC),
            False,
            {NodeDesc("a", 1, 0): 0, NodeDesc("b", 70000, 0): 1},
            frozenset({NodeDesc("c", 3, 0)}),
            frozenset(),
            {NodeDesc("a", 1, 0): datetime(2027, 1, 1, tzinfo=UTC)},
        ),
        Flavour(aware=True),
    )
)


@given(
    st.lists(
        st.tuples(st.integers(0, len(_GOOD) - 1), st.integers(0, 3), st.binary(max_size=3)),
        max_size=6,
    )
)
def test_i8_a_damaged_state_is_read_or_refused(damages: list[tuple[int, int, bytes]]) -> None:
    program = _GOOD
    for at, cut, put in damages:
        program = program[:at] + put + program[at + cut :]
    try:
        state, flavour = decode(blob(program))
    except StateError:
        pass
    else:
        assert decode(encode(state, flavour))[0] == state


@given(st.binary(max_size=300))
def test_i8_any_bytes_are_refused(junk: bytes) -> None:
    for candidate in (junk, blob(junk), blob(b"\x80\x04" + junk)):
        with pytest.raises(StateError):
            decode(candidate)


@pytest.mark.parametrize("step", [b"}\x94", b"]", b"(", b")\x85", b"K\x01\x85", b"}(", b"N\x940"])
def test_i8_a_bomb_stays_within_its_own_size(step: bytes) -> None:
    size = STATE_MAX // 4
    program = b"\x80\x04" + step * (size // len(step)) + b"."
    whole = blob(program)
    tracemalloc.start()
    try:
        with pytest.raises(StateError):
            decode(whole)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * size


def test_a_state_beyond_any_rendezvous_is_refused_unread() -> None:
    with pytest.raises(StateError, match="longer than any rendezvous needs"):
        decode(b"A" * (2 * STATE_MAX))


def test_a_foreign_time_zone_is_brought_to_utc() -> None:
    east = datetime(2026, 1, 1, 5, tzinfo=timezone(timedelta(hours=5)))
    zone = pickle.dumps(east.tzinfo, 4)[2 + 9 : -1]  # without protocol, frame and stop
    text = b"\x80\x04" + _STATE + b"}("
    for name, value in {
        "round": b"K\x00",
        "complete": b"\x89",
        "closed": b"\x89",
        "participants": b"}",
        "wait_list": b"\x8f",
        "last_heartbeats": b"}",
        "deadline": _DATETIME + b"C\x0a\x07\xea\x01\x01\x05\x00\x00\x00\x00\x00" + zone + b"\x86R",
    }.items():
        text += b"\x8c%c%s" % (len(name), name.encode()) + value
    state, flavour = decode(blob(text + b"ub."))
    assert state.deadline == east
    assert state.deadline is not None
    assert state.deadline.utcoffset() == timedelta()
    assert flavour == Flavour(aware=True, redundancy=False)
