# SPDX-License-Identifier: Apache-2.0
"""torch's rendezvous state as a plain value, its codec, and the wish that a change stands for.

torch keeps ``base64(pickle(_RendezvousState))`` in its store. ``decode`` reads that with the
interpreter of ``pickle_reader``, as the bytes are untrusted; ``encode`` writes the operations by
hand, and torch's own unpickler makes its own classes of them.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from datetime import UTC, datetime
from itertools import islice
from struct import Struct
from typing import Literal, TypeVar, cast

from launcher_shim.c10d.pickle_reader import MODULE, PLAIN, NodeDesc, read
from rdzv.dataclass import dataclass
from rdzv.errors import StateError
from rdzv.records.codec import INT64_MAX

__all__ = ["SENTINEL", "STATE_MAX", "Flavour", "NodeDesc", "TorchState", "decode", "encode"]

T = TypeVar("T")
K = TypeVar("K")

SENTINEL = b"Y2FuaW1hZGFt"
"""The value that torch stores before there is a first state; it stands for "no state"."""
STATE_MAX = 1024 * 1024
"""Maximum length of a pickled state in bytes: several thousand nodes."""

Plain = None | bool | int | float | str | bytes | datetime | NodeDesc
"""The types of values that a container in a state may hold."""
Attribute = Plain | list[Plain] | tuple[Plain, ...] | set[Plain] | dict[Plain, Plain]
"""The types that an attribute of a state may have."""


@dataclass(frozen=True, slots=True)
class TorchState:
    """The state of one rendezvous. All times are aware and in UTC, whatever torch's flavour."""

    round: int = 0
    complete: bool = False
    deadline: datetime | None = None
    closed: bool = False
    participants: Mapping[NodeDesc, int] = field(default_factory=dict)
    wait_list: frozenset[NodeDesc] = frozenset()
    redundancy_list: frozenset[NodeDesc] = frozenset()
    last_heartbeats: Mapping[NodeDesc, datetime] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Flavour:
    """The way in which one torch version writes its state.

    ``aware``: its times have a time zone (since torch 2.6); None: the state showed no time, so
    nothing with a time can be written for it yet. ``redundancy``: it has a redundancy_list (since
    torch 2.3). ``extra``: attributes that are unknown here, carried as they came.
    """

    aware: bool | None = None
    redundancy: bool = True
    extra: Mapping[str, Attribute] = field(default_factory=dict)


def decode(blob: bytes) -> tuple[TorchState, Flavour]:
    """Decode the bytes that torch keeps in its store.

    Raises StateError if torch could not have written them.
    """
    if len(blob) > STATE_MAX * 4 // 3:
        raise StateError(f"a state of {len(blob)} bytes is longer than any rendezvous needs")
    try:
        pickle = b64decode(blob, validate=True)
    except binascii.Error as problem:
        raise StateError(f"the state is not base64: {problem}") from problem
    return _from_attributes(read(pickle))


def encode(state: TorchState, flavour: Flavour) -> bytes:
    """Encode a state as the bytes that torch of that flavour reads.

    Raises ValueError if there is a time to write, and the flavour does not say which kind.
    """
    return _Writer(flavour).write(state)


# --- attributes to value --------------------------------------------------------------------


class _Times:
    """A converter of times to UTC that remembers whether they were aware."""

    def __init__(self) -> None:
        self.aware: bool | None = None

    def to_utc(self, time: datetime) -> datetime:
        aware = time.tzinfo is not None
        if self.aware not in (None, aware):
            raise StateError("the state mixes times with and without a time zone")
        self.aware = aware
        try:
            return time.astimezone(UTC) if aware else time.replace(tzinfo=UTC)
        except OverflowError as problem:
            raise StateError(f"the time {time} does not exist in UTC") from problem


def _from_attributes(attributes: Mapping[object, object]) -> tuple[TorchState, Flavour]:
    times = _Times()
    match attributes:
        case {
            "round": int(number),
            "complete": bool(complete),
            "deadline": (None | datetime()) as deadline,
            "closed": bool(closed),
            "participants": dict(participants),
            "wait_list": set(wait_list),
            "last_heartbeats": dict(last_heartbeats),
            **rest,
        } if not isinstance(number, bool):
            pass
        case _:
            raise StateError(f"the state has the wrong attributes: {_outline(attributes)}")
    redundancy_list = rest.pop("redundancy_list", None)
    if not isinstance(redundancy_list, set | None):
        raise StateError("the state's redundancy_list is no set")
    state = TorchState(
        round=number,
        complete=complete,
        deadline=None if deadline is None else times.to_utc(deadline),
        closed=closed,
        participants={
            _as_node(node): _as(int, rank, "a rank") for node, rank in participants.items()
        },
        wait_list=frozenset(map(_as_node, wait_list)),
        redundancy_list=frozenset(map(_as_node, redundancy_list or ())),
        last_heartbeats={
            _as_node(node): times.to_utc(_as(datetime, time, "a time"))
            for node, time in last_heartbeats.items()
        },
    )
    extra = {_as(str, name, "a name"): _as_attribute(name, value) for name, value in rest.items()}
    return state, Flavour(times.aware, redundancy_list is not None, extra)


def _outline(attributes: Mapping[object, object]) -> str:
    return ", ".join(
        f"{name!s:.40}: {type(value).__name__}" for name, value in islice(attributes.items(), 16)
    )


def _as(kind: type[T], value: object, what: str) -> T:
    if isinstance(value, kind) and not isinstance(value, bool):
        return value
    raise StateError(f"the state has a {type(value).__name__} in the place of {what}")


def _as_node(value: object) -> NodeDesc:
    return _as(NodeDesc, value, "a node")


def _as_attribute(name: object, value: object) -> Attribute:
    match value:
        case dict():
            plain = all(type(item) in PLAIN for item in value.values())
        case list() | tuple() | set() if not isinstance(value, NodeDesc):
            plain = all(type(item) in PLAIN for item in value)
        case _:
            plain = type(value) in PLAIN
    if not plain:
        raise StateError(f"the state's attribute {name!s:.40} is of a kind torch never used")
    return cast(Attribute, value)


# --- value to bytes -------------------------------------------------------------------------

_BATCH = 1000
_I32 = Struct("<i")
_I64 = Struct("<q")
_U32 = Struct("<I")
_F64 = Struct(">d")
_DATE = Struct(">HBBBBB")
_REMEMBER = b"\x94"
_DROP = b"0"


def _text(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) < 256:
        return b"\x8c" + bytes((len(encoded),)) + encoded
    return b"X" + _U32.pack(len(encoded)) + encoded


def _integer(number: int) -> bytes:
    if 0 <= number < 256:
        return b"K" + bytes((number,))
    if -(2**31) <= number < 2**31:
        return b"J" + _I32.pack(number)
    return b"\x8a\x08" + _I64.pack(number)


def _name(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


# Constants that every state refers to repeatedly are stored first, at these places of the memo.
_NODE_CLASS, _ADDR, _PID, _LOCAL_ID, _DATETIME_CLASS, _UTC = (
    b"h" + bytes((at,)) for at in range(6)
)
_UTC_VALUE = (
    _name("datetime", "timezone")
    + _name("datetime", "timedelta")
    + b"".join((_integer(0), _integer(0), _integer(0), b"\x87R\x85R"))
)
_PROLOGUE = b"\x80\x04" + b"".join(
    constant + _REMEMBER + _DROP
    for constant in (
        _name(MODULE, "_NodeDesc"),
        _text("addr"),
        _text("pid"),
        _text("local_id"),
        _name("datetime", "datetime"),
        _UTC_VALUE,
    )
)
_PROLOGUE_STATE = _PROLOGUE + _name(MODULE, "_RendezvousState") + b")\x81}("


def _batches(items: Iterable[bytes], close: bytes) -> bytes:
    """Close a batch after each thousand items, as picklers do: readers bound their stack."""
    rest = iter(items)
    written = b""
    while batch := list(islice(rest, _BATCH)):
        written += b"(" + b"".join(batch) + close
    return written


class _Writer:
    """The writer of one state; nodes and times that occur again are written once."""

    def __init__(self, flavour: Flavour) -> None:
        self._flavour = flavour
        self._memo: dict[NodeDesc | datetime, bytes] = {}

    def write(self, state: TorchState) -> bytes:
        parts = [
            _PROLOGUE_STATE,
            *(_text("round"), self._value(state.round)),
            *(_text("complete"), self._value(state.complete)),
            *(_text("deadline"), self._value(state.deadline)),
            *(_text("closed"), self._value(state.closed)),
            *(_text("participants"), self._pairs(state.participants, self._node, _integer)),
            *(_text("wait_list"), self._set(state.wait_list)),
        ]
        if self._flavour.redundancy:
            parts += (_text("redundancy_list"), self._set(state.redundancy_list))
        beats = self._pairs(state.last_heartbeats, self._node, self._time)
        parts += (_text("last_heartbeats"), beats)
        for name, value in self._flavour.extra.items():
            parts += (_text(name), self._value(value))
        parts.append(b"ub.")
        return b64encode(b"".join(parts))

    def _value(self, value: object) -> bytes:
        match value:
            case NodeDesc():
                return self._node(value)
            case datetime():
                return self._time(value)
            case None | bool():
                return {None: b"N", True: b"\x88", False: b"\x89"}[value]
            case int():
                return _integer(value)
            case str():
                return _text(value)
            case float():
                return b"G" + _F64.pack(value)
            case bytes() if len(value) < 256:
                return b"C" + bytes((len(value),)) + value
            case dict():
                return self._pairs(value, self._value, self._value)
            case set():
                return self._set(value)
            case list():
                return b"]" + _batches(map(self._value, value), b"e")
            case tuple():
                return b"(" + b"".join(map(self._value, value)) + b"t"
        raise TypeError(f"a {type(value).__name__} has no place in a rendezvous state")

    def _pairs(
        self, items: Mapping[K, T], key: Callable[[K], bytes], value: Callable[[T], bytes]
    ) -> bytes:
        return b"}" + _batches((key(one) + value(item) for one, item in items.items()), b"u")

    def _set(self, items: Iterable[object]) -> bytes:
        return b"\x8f" + _batches(map(self._value, items), b"\x90")

    def _node(self, node: NodeDesc) -> bytes:
        again = self._memo.get(node)
        if again is not None:
            return again
        self._memo[node] = self._recall()
        return b"".join(
            (
                _NODE_CLASS + b")\x81}(" + _ADDR,
                _text(node.addr),
                _PID,
                _integer(node.pid),
                _LOCAL_ID,
                _integer(node.local_id),
                b"ub" + _REMEMBER,
            )
        )

    def _time(self, time: datetime) -> bytes:
        again = self._memo.get(time)
        if again is not None:
            return again
        if self._flavour.aware is None:
            raise ValueError("the flavour does not say whether times bear a time zone")
        self._memo[time] = self._recall()
        utc = time.astimezone(UTC)
        packed = _DATE.pack(utc.year, utc.month, utc.day, utc.hour, utc.minute, utc.second)
        packed += utc.microsecond.to_bytes(3, "big")
        make = _UTC + b"\x86R" if self._flavour.aware else b"\x85R"
        return _DATETIME_CLASS + b"C\x0a" + packed + make + _REMEMBER

    def _recall(self) -> bytes:
        """Return the reference to the value that is put into the memo next."""
        at = 6 + len(self._memo)
        return b"h" + bytes((at,)) if at < 256 else b"j" + _U32.pack(at)


def spell_flavour(flavour: Flavour) -> str:
    """Encode a flavour for the store."""
    times = "aware" if flavour.aware else "naive"
    return f"{times},redundancy" if flavour.redundancy else times


def read_flavour(spelt: str) -> Flavour:
    """Decode a flavour from the store; missing parts are as in new versions of torch."""
    words = spelt.split(",")
    return Flavour(aware="naive" not in words, redundancy=not spelt or "redundancy" in words)


ADDRESS_MAX = 255
"""Maximum length of a host name or address, in characters."""

Change = Literal["", "join", "leave", "step_off"]
"""``step_off``: off the redundancy list, as torch does before it looks for a place again."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The change that the sender of one request wants for itself."""

    change: Change = ""
    closes: bool = False


def wish(expected: TorchState, desired: TorchState, me: NodeDesc) -> Wish:
    """Read the wish of ``me`` out of the two states of its request."""
    was_in = me in expected.participants or me in expected.wait_list
    was_redundant = me in expected.redundancy_list
    is_in = me in desired.participants or me in desired.wait_list
    is_in = is_in or me in desired.redundancy_list
    change: Change = ""
    if not is_in and was_in:
        change = "leave"
    elif not is_in and was_redundant:
        change = "step_off"
    elif is_in and not was_in and not was_redundant:
        change = "join"
    return Wish(change, closes=desired.closed and not expected.closed)


def first_name(desired: TorchState) -> NodeDesc | None:
    """Return the sender of a state made from nothing: the one node that it names; else None."""
    named = {*desired.participants, *desired.wait_list, *desired.redundancy_list}
    me = named.pop() if len(named) == 1 else None
    if me is None or len(me.addr) > ADDRESS_MAX:
        return None
    return me if min(me.pid, me.local_id) >= 0 and max(me.pid, me.local_id) <= INT64_MAX else None


def foreign_size(desired: TorchState, min_nodes: int, max_nodes: int) -> bool:
    """Return whether a first own state shows that ``--nnodes`` of the launcher is not the job's.

    With itself as the only participant, torch sets a deadline if its minimum is 1, and marks the
    round complete, which clears the deadline again, if its maximum is 1.
    """
    its_max_is_1 = desired.complete
    if its_max_is_1 or max_nodes == 1:
        return its_max_is_1 != (max_nodes == 1)
    return (desired.deadline is not None) != (min_nodes == 1)
