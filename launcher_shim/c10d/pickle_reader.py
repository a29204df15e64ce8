# SPDX-License-Identifier: Apache-2.0
"""A reader of torch's pickled rendezvous state that unpickles nothing.

The bytes come from a client, so they are untrusted. This is an interpreter of its own for the
operations that torch's pickles (protocols 4 and 5) consist of. It knows five names and what each
makes; nothing in it calls, imports or looks up a name from the bytes. Containers hold plain values
only: no value is deeper than the state's attributes, and no operation costs more than its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from struct import Struct, error
from typing import NamedTuple

from rdzv.errors import StateError

MODULE = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_STACK_MAX = 4096
"""Maximum depth of the stack: twice the need of a batch of 1000 pairs, the largest that a pickler
writes."""


class NodeDesc(NamedTuple):
    """One node as torch describes it; ordered as torch orders ranks."""

    addr: str
    pid: int
    local_id: int


PLAIN = frozenset({type(None), bool, int, float, str, bytes, datetime, NodeDesc})
"""The types that a container in a state may hold."""
_ARGUMENT = PLAIN | {timedelta, timezone}


def read(pickle: bytes) -> dict[object, object]:
    """Return the attributes of the pickled rendezvous state.

    Raises StateError if the pickle is not one that torch makes of its state. The values are plain,
    or containers of anything that the pickle could hold: the caller checks them.
    """
    return _Interpreter(pickle).run()


class _Name:
    """One of the five names that a state refers to."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[tuple[object, ...]], object] | None) -> None:
        self.make = make


class _Unbuilt:
    """An object of which only the class is known yet. ``memo_at``: its place in the memo."""

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
    """The start of a batch of items on the stack."""


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
    packed, zone = arguments if len(arguments) == 2 else (*arguments, None)
    if not (isinstance(packed, bytes) and isinstance(zone, timezone | None)):
        raise StateError("a time is neither naive nor in a fixed time zone")
    if len(packed) != 10:
        raise StateError(f"a time of {len(packed)} bytes")
    # CPython's own constructor from bytes would check nothing but the month.
    year, month, day, hour, minute, second = _DATE.unpack_from(packed)
    microsecond = int.from_bytes(packed[7:], "big")
    fold, month = month >> 7, month & 0x7F
    return datetime(year, month, day, hour, minute, second, microsecond, zone, fold=fold)


_DATE = Struct(">HBBBBB")
_U8 = Struct("B")
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
    """An interpreter of one pickle. Every operation makes a value of ours or raises StateError.

    An operation gets the position of its argument, and returns that of the next operation.
    """

    def __init__(self, program: bytes) -> None:
        self._program = program
        self._stack: list[object] = []
        self._memo: list[object] = []

    def run(self) -> dict[object, object]:
        """Return the attributes of the state that the pickle describes."""
        try:
            self._run()
        except KeyError as code:
            raise StateError(f"pickle operation {code} occurs in no state of torch") from None
        except (IndexError, error):
            raise StateError(
                "the state's pickle is cut short or asks for what is not there"
            ) from None
        except (ValueError, OverflowError) as problem:
            raise StateError(
                f"the state's pickle holds an impossible value: {problem}"
            ) from problem
        match self._stack:
            case [_Built(attributes=attributes)]:
                return attributes
        raise StateError("the pickle is not one rendezvous state")

    def _run(self) -> None:
        program, stack, memo = self._program, self._stack, self._memo
        at = 0
        while (code := program[at]) != _STOP:
            # Half of all operations are these two.
            if code == _MEMOIZE:
                top = stack[-1]
                if type(top) is _Unbuilt:
                    top.memo_at = len(memo)
                memo.append(top)
                at += 1
                continue
            if code == _BINGET:
                stack.append(memo[program[at + 1]])
                at += 2
            else:
                at = _OPERATIONS[code](self, at + 1)
            if len(stack) > _STACK_MAX:
                raise StateError("the state's pickle piles up more than torch ever does")

    def _take(self, at: int, size: int) -> bytes:
        taken = self._program[at : at + size]
        if len(taken) < size:
            raise StateError("the state's pickle is cut short")
        return taken

    def _items(self) -> list[object]:
        """Take everything since the last mark off the stack."""
        stack = self._stack
        for at in range(len(stack) - 1, -1, -1):
            if stack[at] is _Mark:
                items = stack[at + 1 :]
                del stack[at:]
                return items
        raise StateError("the state's pickle ends a batch that never began")

    def _protocol(self, at: int) -> int:
        if (protocol := self._program[at]) not in (4, 5):
            raise StateError(f"the state is pickled with protocol {protocol}, not 4 or 5")
        return at + 1

    def _frame(self, at: int) -> int:
        return at + 8

    def _long_binget(self, at: int) -> int:
        self._stack.append(self._memo[_U32.unpack_from(self._program, at)[0]])
        return at + 4

    def _pop(self, at: int) -> int:
        self._stack.pop()
        return at

    def _short_text(self, at: int) -> int:
        end = at + 1 + self._program[at]
        self._stack.append(self._take(at + 1, end - at - 1).decode())
        return end

    def _long(self, at: int) -> int:
        size = self._program[at]
        if size > 8:
            raise StateError(f"a number of {size} bytes")
        number = int.from_bytes(self._take(at + 1, size), "little", signed=True)
        self._stack.append(number)
        return at + 1 + size

    def _name(self, at: int) -> int:
        stack = self._stack
        name, module = stack.pop(), stack.pop()
        if not (isinstance(module, str) and isinstance(name, str)):
            raise StateError("the state's pickle names something by no name")
        named = _NAMES.get((module, name))
        if named is None:
            raise StateError(f"the state's pickle names {f'{module}.{name}'[:120]!r}")
        stack.append(named)
        return at

    def _new(self, at: int) -> int:
        stack = self._stack
        arguments, name = stack.pop(), stack.pop()
        if not (isinstance(name, _Name) and name.make is None and arguments == ()):
            raise StateError("the state's pickle makes an object as torch never does")
        stack.append(_Unbuilt(name))
        return at

    def _reduce(self, at: int) -> int:
        stack = self._stack
        arguments, name = stack.pop(), stack.pop()
        if not (isinstance(name, _Name) and name.make and isinstance(arguments, tuple)):
            raise StateError("the state's pickle calls something that is no time")
        stack.append(name.make(arguments))
        return at

    def _build(self, at: int) -> int:
        stack = self._stack
        attributes, unbuilt = stack.pop(), stack.pop()
        if not (isinstance(unbuilt, _Unbuilt) and isinstance(attributes, dict)):
            raise StateError("the state's pickle gives attributes to what is no object")
        built = _Built(attributes) if unbuilt.name is _STATE_NAME else _node(attributes)
        stack.append(built)
        if unbuilt.memo_at is not None:
            self._memo[unbuilt.memo_at] = built
        return at

    def _tuple(self, items: Sequence[object]) -> None:
        self._stack.append(tuple(_only(_ARGUMENT, items)))

    def _tuple_of_batch(self, at: int) -> int:
        self._tuple(self._items())
        return at

    def _append(self, at: int) -> int:
        self._extend([self._stack.pop()])
        return at

    def _appends(self, at: int) -> int:
        self._extend(self._items())
        return at

    def _extend(self, items: list[object]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise StateError("the state's pickle appends to what is no list")
        target.extend(_only(PLAIN, items))

    def _add_items(self, at: int) -> int:
        items = self._items()
        target = self._stack[-1]
        if not isinstance(target, set):
            raise StateError("the state's pickle adds to what is no set")
        target.update(_only(PLAIN, items))
        return at

    def _set_item(self, at: int) -> int:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])
        return at

    def _set_items(self, at: int) -> int:
        self._update(self._items())
        return at

    def _update(self, items: list[object]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise StateError("the state's pickle sets items of what is no dictionary")
        # The values are checked once the object that they belong to is complete.
        target.update(zip(_only(PLAIN, items[::2]), items[1::2], strict=True))


_Operation = Callable[[_Interpreter, int], int]


def _push(value: object) -> _Operation:
    def operation(of: _Interpreter, at: int) -> int:
        of._stack.append(value)
        return at

    return operation


def _push_new(kind: type) -> _Operation:
    def operation(of: _Interpreter, at: int) -> int:
        of._stack.append(kind())
        return at

    return operation


def _push_number(form: Struct) -> _Operation:
    def operation(of: _Interpreter, at: int) -> int:
        of._stack += form.unpack_from(of._program, at)
        return at + form.size

    return operation


def _push_sized(size_form: Struct, value: Callable[[bytes], object]) -> _Operation:
    def operation(of: _Interpreter, at: int) -> int:
        size, start = size_form.unpack_from(of._program, at)[0], at + size_form.size
        of._stack.append(value(of._take(start, size)))
        return int(start + size)

    return operation


def _push_tuple(size: int) -> _Operation:
    def operation(of: _Interpreter, at: int) -> int:
        items = [of._stack.pop() for _ in range(size)]
        of._tuple(items[::-1])
        return at

    return operation


_STOP = ord(".")
_MEMOIZE = 0x94
_BINGET = ord("h")
_OPERATIONS: dict[int, _Operation] = {
    0x80: _Interpreter._protocol,
    0x95: _Interpreter._frame,
    ord("j"): _Interpreter._long_binget,
    ord("0"): _Interpreter._pop,
    ord("("): _push(_Mark),
    ord("N"): _push(None),
    0x88: _push(True),
    0x89: _push(False),
    ord("K"): _push_number(_U8),
    ord("M"): _push_number(_U16),
    ord("J"): _push_number(_I32),
    0x8A: _Interpreter._long,
    ord("G"): _push_number(_F64),
    0x8C: _Interpreter._short_text,
    ord("X"): _push_sized(_U32, bytes.decode),
    ord("C"): _push_sized(_U8, bytes),
    0x93: _Interpreter._name,
    0x81: _Interpreter._new,
    ord("R"): _Interpreter._reduce,
    ord("b"): _Interpreter._build,
    ord(")"): _push(()),
    0x85: _push_tuple(1),
    0x86: _push_tuple(2),
    0x87: _push_tuple(3),
    ord("t"): _Interpreter._tuple_of_batch,
    ord("]"): _push_new(list),
    ord("a"): _Interpreter._append,
    ord("e"): _Interpreter._appends,
    ord("}"): _push_new(dict),
    ord("s"): _Interpreter._set_item,
    ord("u"): _Interpreter._set_items,
    0x8F: _push_new(set),
    0x90: _Interpreter._add_items,
}


def _only(kinds: frozenset[type], items: Sequence[object]) -> Sequence[object]:
    if not kinds.issuperset(map(type, items)):
        names = sorted({type(item).__name__ for item in items} - {kind.__name__ for kind in kinds})
        raise StateError(f"the state's pickle holds {', '.join(names)} where torch never does")
    return items


def _node(attributes: dict[object, object]) -> NodeDesc:
    addr, pid, local_id = map(attributes.get, ("addr", "pid", "local_id"))
    if type(addr) is str and type(pid) is int and type(local_id) is int and len(attributes) == 3:
        return NodeDesc(addr, pid, local_id)
    raise StateError("a node in the state has other attributes than torch's")
