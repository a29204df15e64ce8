# SPDX-License-Identifier: Apache-2.0
"""Reads torch's pickled rendezvous state without unpickling anything.

The bytes come from a client, so they are untrusted. This is an interpreter of its own for the
operations that torch's pickles (protocols 4 and 5) consist of. It knows five names and what each
makes; nothing in it calls, imports or looks up what the bytes say. Containers hold plain values
only, so no value is deeper than the attributes of the state, and no operation costs more than
its own bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta, timezone
from struct import Struct, error
from typing import Final, NamedTuple

from rdzv.errors import StateError

MODULE: Final = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_STACK_MAX = 4096
"""Twice what a batch of 1000 pairs, the largest that a pickler writes, needs."""


class NodeDesc(NamedTuple):
    """One node as torch describes it; ordered as torch orders ranks."""

    addr: str
    pid: int
    local_id: int


PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes, datetime, NodeDesc})
"""The types that a container in a state may hold."""
_ARGUMENT = PLAIN | {timedelta, timezone}


def read(pickle: bytes) -> dict[object, object]:
    """Return the attributes of the rendezvous state that is pickled there.

    Raises StateError if the pickle is not one that torch makes of its state. The values are
    plain, or containers of anything the pickle could hold: the caller checks them.
    """
    return _Interpreter(pickle).run()


class _Name:
    """One of the five names that a state refers to."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[tuple[object, ...]], object] | None) -> None:
        self.make = make


class _Unbuilt:
    """An object of which only the class is known yet. ``memo_at``: where it is remembered."""

    __slots__ = ("memo_at", "name")

    def __init__(self, name: _Name) -> None:
        self.name = name
        self.memo_at: int | None = None


class _Built:
    """The state itself: the attributes that torch gave it."""

    __slots__ = ("attributes",)

    def __init__(self, attributes: dict[object, object]) -> None:
        self.attributes = attributes


class _Mark:
    """Where a batch of items begins."""


def _make_timedelta(arguments: tuple[object, ...]) -> timedelta:
    match arguments:
        case (int(days), int(seconds), int(microseconds)):
            return timedelta(days, seconds, microseconds)
    raise StateError("a time difference is not three numbers")


def _make_timezone(arguments: tuple[object, ...]) -> timezone:
    match arguments:
        case (timedelta() as offset,) | (timedelta() as offset, str()):
            return timezone(offset)
    raise StateError("a time zone is not an offset")


def _make_datetime(arguments: tuple[object, ...]) -> datetime:
    match arguments:
        case (bytes(packed),):
            zone = None
        case (bytes(packed), timezone() as zone):
            pass
        case _:
            raise StateError("a time is neither naive nor in a fixed time zone")
    if len(packed) != 10:
        raise StateError(f"a time of {len(packed)} bytes")
    # CPython's own constructor from bytes would check nothing but the month.
    year, month, day, hour, minute, second = _DATE.unpack_from(packed)
    microsecond = int.from_bytes(packed[7:], "big")
    fold, month = month >> 7, month & 0x7F
    return datetime(year, month, day, hour, minute, second, microsecond, zone, fold=fold)


_DATE = Struct(">HBBBBB")
_U16 = Struct("<H")
_I32 = Struct("<i")
_U32 = Struct("<I")
_F64 = Struct(">d")

_STATE_NAME = _Name(None)
_NODE_NAME = _Name(None)
_NAMES = {
    (MODULE, "_RendezvousState"): _STATE_NAME,
    (MODULE, "_NodeDesc"): _NODE_NAME,
    ("datetime", "datetime"): _Name(_make_datetime),
    ("datetime", "timezone"): _Name(_make_timezone),
    ("datetime", "timedelta"): _Name(_make_timedelta),
}


class _Interpreter:
    """Runs one pickle. Every operation either makes a value of ours or raises StateError."""

    def __init__(self, program: bytes) -> None:
        self._program = program
        self._at = 0
        self._stack: list[object] = []
        self._memo: list[object] = []

    def run(self) -> dict[object, object]:
        """Return the attributes of the state that the pickle describes."""
        stack, operations = self._stack, _OPERATIONS
        try:
            while True:
                code = self._program[self._at]
                self._at += 1
                if code == _STOP:
                    break
                operations[code](self)
                if len(stack) > _STACK_MAX:
                    raise StateError("the state's pickle piles up more than torch ever does")
        except KeyError:
            raise StateError(f"pickle operation {code:#04x} occurs in no state of torch") from None
        except (IndexError, error):
            raise StateError(
                "the state's pickle is cut short or asks for what is not there"
            ) from None
        except (ValueError, OverflowError) as problem:
            raise StateError(
                f"the state's pickle holds an impossible value: {problem}"
            ) from problem
        match stack:
            case [_Built(attributes=attributes)]:
                return attributes
        raise StateError("the pickle is not one rendezvous state")

    def _take(self, size: int) -> bytes:
        taken = self._program[self._at : self._at + size]
        if len(taken) < size:
            raise StateError("the state's pickle is cut short")
        self._at += size
        return taken

    def _number(self, layout: Struct) -> int:
        (number,) = layout.unpack_from(self._program, self._at)
        self._at += layout.size
        return int(number)

    def _byte(self) -> int:
        self._at += 1
        return self._program[self._at - 1]

    def _items(self) -> list[object]:
        """Take everything since the last mark off the stack."""
        stack = self._stack
        for at in range(len(stack) - 1, -1, -1):
            if stack[at] is _Mark:
                items = stack[at + 1 :]
                del stack[at:]
                return items
        raise StateError("the state's pickle ends a batch that never began")

    def _protocol(self) -> None:
        if (protocol := self._byte()) not in (4, 5):
            raise StateError(f"the state is pickled with protocol {protocol}, not 4 or 5")

    def _frame(self) -> None:
        self._take(8)

    def _memoize(self) -> None:
        top = self._stack[-1]
        if isinstance(top, _Unbuilt):
            top.memo_at = len(self._memo)
        self._memo.append(top)

    def _binget(self) -> None:
        self._stack.append(self._memo[self._byte()])

    def _long_binget(self) -> None:
        self._stack.append(self._memo[self._number(_U32)])

    def _pop(self) -> None:
        self._stack.pop()

    def _mark(self) -> None:
        self._stack.append(_Mark)

    def _none(self) -> None:
        self._stack.append(None)

    def _true(self) -> None:
        self._stack.append(True)

    def _false(self) -> None:
        self._stack.append(False)

    def _int8(self) -> None:
        self._stack.append(self._byte())

    def _int16(self) -> None:
        self._stack.append(self._number(_U16))

    def _int32(self) -> None:
        self._stack.append(self._number(_I32))

    def _long(self) -> None:
        size = self._byte()
        if size > 8:
            raise StateError(f"a number of {size} bytes")
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def _float(self) -> None:
        self._stack.append(_F64.unpack(self._take(8))[0])

    def _short_text(self) -> None:
        self._stack.append(self._take(self._byte()).decode())

    def _text(self) -> None:
        self._stack.append(self._take(self._number(_U32)).decode())

    def _short_bytes(self) -> None:
        self._stack.append(self._take(self._byte()))

    def _name(self) -> None:
        stack = self._stack
        name, module = stack.pop(), stack.pop()
        if not (isinstance(module, str) and isinstance(name, str)):
            raise StateError("the state's pickle names something by no name")
        found = _NAMES.get((module, name))
        if found is None:
            raise StateError(f"the state's pickle names {f'{module}.{name}'[:120]!r}")
        stack.append(found)

    def _new(self) -> None:
        stack = self._stack
        arguments, name = stack.pop(), stack.pop()
        if not (isinstance(name, _Name) and name.make is None and arguments == ()):
            raise StateError("the state's pickle makes an object as torch never does")
        stack.append(_Unbuilt(name))

    def _reduce(self) -> None:
        stack = self._stack
        arguments, name = stack.pop(), stack.pop()
        if not (isinstance(name, _Name) and name.make and isinstance(arguments, tuple)):
            raise StateError("the state's pickle calls something that is no time")
        stack.append(name.make(arguments))

    def _build(self) -> None:
        stack = self._stack
        attributes, unbuilt = stack.pop(), stack.pop()
        if not (isinstance(unbuilt, _Unbuilt) and isinstance(attributes, dict)):
            raise StateError("the state's pickle gives attributes to what is no object")
        built = _Built(attributes) if unbuilt.name is _STATE_NAME else _node(attributes)
        stack.append(built)
        if unbuilt.memo_at is not None:
            self._memo[unbuilt.memo_at] = built

    def _empty_tuple(self) -> None:
        self._stack.append(())

    def _tuple(self, items: Sequence[object]) -> None:
        self._stack.append(tuple(_only(_ARGUMENT, items)))

    def _tuple_1(self) -> None:
        self._tuple([self._stack.pop()])

    def _tuple_2(self) -> None:
        self._tuple([self._stack.pop(), self._stack.pop()][::-1])

    def _tuple_3(self) -> None:
        self._tuple([self._stack.pop(), self._stack.pop(), self._stack.pop()][::-1])

    def _tuple_of_batch(self) -> None:
        self._tuple(self._items())

    def _empty_list(self) -> None:
        self._stack.append([])

    def _empty_dict(self) -> None:
        self._stack.append({})

    def _empty_set(self) -> None:
        self._stack.append(set())

    def _append(self) -> None:
        self._extend([self._stack.pop()])

    def _appends(self) -> None:
        self._extend(self._items())

    def _extend(self, items: list[object]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise StateError("the state's pickle appends to what is no list")
        target.extend(_only(PLAIN, items))

    def _add_items(self) -> None:
        items = self._items()
        target = self._stack[-1]
        if not isinstance(target, set):
            raise StateError("the state's pickle adds to what is no set")
        target.update(_only(PLAIN, items))

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def _set_items(self) -> None:
        self._update(self._items())

    def _update(self, items: list[object]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise StateError("the state's pickle sets items of what is no dictionary")
        # The values are looked at when the object that they belong to is complete.
        target.update(zip(_only(PLAIN, items[::2]), items[1::2], strict=True))


_STOP = ord(".")
_OPERATIONS: dict[int, Callable[[_Interpreter], None]] = {
    0x80: _Interpreter._protocol,
    0x95: _Interpreter._frame,
    0x94: _Interpreter._memoize,
    ord("h"): _Interpreter._binget,
    ord("j"): _Interpreter._long_binget,
    ord("0"): _Interpreter._pop,
    ord("("): _Interpreter._mark,
    ord("N"): _Interpreter._none,
    0x88: _Interpreter._true,
    0x89: _Interpreter._false,
    ord("K"): _Interpreter._int8,
    ord("M"): _Interpreter._int16,
    ord("J"): _Interpreter._int32,
    0x8A: _Interpreter._long,
    ord("G"): _Interpreter._float,
    0x8C: _Interpreter._short_text,
    ord("X"): _Interpreter._text,
    ord("C"): _Interpreter._short_bytes,
    0x93: _Interpreter._name,
    0x81: _Interpreter._new,
    ord("R"): _Interpreter._reduce,
    ord("b"): _Interpreter._build,
    ord(")"): _Interpreter._empty_tuple,
    0x85: _Interpreter._tuple_1,
    0x86: _Interpreter._tuple_2,
    0x87: _Interpreter._tuple_3,
    ord("t"): _Interpreter._tuple_of_batch,
    ord("]"): _Interpreter._empty_list,
    ord("a"): _Interpreter._append,
    ord("e"): _Interpreter._appends,
    ord("}"): _Interpreter._empty_dict,
    ord("s"): _Interpreter._set_item,
    ord("u"): _Interpreter._set_items,
    0x8F: _Interpreter._empty_set,
    0x90: _Interpreter._add_items,
}


def _only(kinds: Collection[type], items: Sequence[object]) -> Sequence[object]:
    for item in items:
        if type(item) not in kinds:
            raise StateError(
                f"the state's pickle holds a {type(item).__name__} where torch never does"
            )
    return items


def _node(attributes: dict[object, object]) -> NodeDesc:
    match attributes:
        case {"addr": str(addr), "pid": int(pid), "local_id": int(local_id)} if len(
            attributes
        ) == 3 and bool not in (type(pid), type(local_id)):
            return NodeDesc(addr, pid, local_id)
    raise StateError("a node in the state has other attributes than torch's")
