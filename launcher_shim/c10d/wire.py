# SPDX-License-Identifier: Apache-2.0
"""The TCPStore protocol of torch 2.2 and later as frames: no sockets, standard library only.

Integers are little-endian. There is no framing, no request id and no length of the whole: a
request ends where its last field ends, and answers come strictly in the order of the requests.
``RequestParser`` turns bytes into requests, the functions at the end turn answers into bytes.
Requests and semantics as observed on torch's own client and libuv server.

Between the relay of ``muster-run`` and the sidecar the same requests travel behind a ``Preface``,
and every answer behind its request's number, so that both know what is settled and what is not.
"""

from __future__ import annotations

from struct import Struct
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Type, Union

KEY_MAX = 8 * 1024
"""Longest key in bytes, as in torch's own server."""
VALUE_MAX = 8 * 1024 * 1024
"""Longest value of one request in bytes, as in torch's own server."""
KEYS_MAX = 128 * 1024
"""Most keys in one request, as in torch's own server."""
REQUEST_MAX = 32 * 1024 * 1024
"""Longest request in bytes. torch's own server has no such limit: it would hold 1 TiB."""
ANSWER_MAX = 64 * 1024 * 1024
"""Longest answer in bytes: one MultiGet can name a large value very often."""

HANDSHAKE = b"\x00\xce\xf7\x85\x3c"
"""What a client of torch 2.2 or later sends first: VALIDATE and the protocol's magic number."""

RELAY_MAGIC = b"MUSTER-1"
"""What a relay sends first; no client of torch begins so."""
SESSION_BYTES = 16
"""Length of the name that a relay gives to one client's connection."""
NOTE_MAX = 8 * 1024
"""Longest note in bytes that a relay keeps for the sidecar."""
NOTE = 0
"""In the place of a number: what follows is to be kept, and shown in the next preface."""
REFUSAL = 2**64 - 1
"""In the place of a number: the client's connection is to be closed."""

READY = b"\x00"
NOT_READY = b"\x01"
STOP_WAITING = b"\x00"
WAIT_CANCELED = b"\x01"

_U32 = Struct("<I")
_U64 = Struct("<Q")
_I64 = Struct("<q")
_COUNT_LENGTH = Struct("<QQ")
_PREFACE = Struct(f"<{len(RELAY_MAGIC)}s{SESSION_BYTES}sQQQ")
_LAST_LEGACY_OPCODE = 11


class FrameError(ValueError):
    """Bytes that are no request, or one or its answer beyond the limits: one sentence why.

    ``before`` holds the requests that were complete before the faulty one.
    """

    before: "Tuple[Request, ...]" = ()


class Preface(NamedTuple):
    """What a relay says first on each of its connections to the sidecar.

    ``session`` names the client's connection, for as long as that lives. The requests that follow
    begin with those of the numbers in ``again``, which may have been carried out before; the
    others are numbered from ``following`` on. ``note`` is what the sidecar gave to keep.
    """

    session: bytes
    following: int = 1
    again: Tuple[int, ...] = ()
    note: bytes = b""

    def encode(self) -> bytes:
        """Turn it into bytes; the handshake follows them."""
        fixed = (RELAY_MAGIC, self.session, self.following, len(self.again), len(self.note))
        numbers = b"".join(map(_U64.pack, self.again))
        return _PREFACE.pack(*fixed) + numbers + self.note


class Validate(NamedTuple):
    """The handshake; no answer."""


class Set(NamedTuple):
    """Store a value; no answer."""

    key: bytes
    value: bytes


class CompareSet(NamedTuple):
    """Replace a value if it is the expected one; the answer is a ``vec``."""

    key: bytes
    expected: bytes
    desired: bytes


class Get(NamedTuple):
    """Read a value; the answer is a ``vec``, empty if there is none."""

    key: bytes


class Add(NamedTuple):
    """Add to a decimal counter; the answer is its new value, an ``i64``."""

    key: bytes
    delta: int


class Check(NamedTuple):
    """Ask whether all keys exist; the answer is READY or NOT_READY."""

    keys: Tuple[bytes, ...]


class Wait(NamedTuple):
    """Wait until all keys exist; the answer is STOP_WAITING, now or later."""

    keys: Tuple[bytes, ...]


class NumKeys(NamedTuple):
    """Count the keys; the answer is an ``i64``."""


class DeleteKey(NamedTuple):
    """Delete a key; the answer is the ``i64`` 1 if there was one, else 0."""

    key: bytes


class Append(NamedTuple):
    """Append to a value; no answer."""

    key: bytes
    value: bytes


class MultiGet(NamedTuple):
    """Read many values; the answer is a ``vec`` for each key."""

    keys: Tuple[bytes, ...]


class MultiSet(NamedTuple):
    """Store many values; no answer."""

    items: Tuple[Tuple[bytes, bytes], ...]


class CancelWait(NamedTuple):
    """Give up the pending Wait or Barrier; the answer is WAIT_CANCELED."""


class Ping(NamedTuple):
    """Ask for an echo; the answer is the nonce."""

    nonce: int


class QueuePush(NamedTuple):
    """Append an element to a queue; no answer."""

    key: bytes
    value: bytes


class QueuePop(NamedTuple):
    """Take the first element of a queue; the answer is ``popped``."""

    key: bytes


class QueueLen(NamedTuple):
    """Count the elements of a queue; the answer is an ``i64``."""

    key: bytes


class ListKeys(NamedTuple):
    """List the keys; the answer is ``key_list``."""


class Barrier(NamedTuple):
    """Wait until as many have come as ``world_size`` says; the answer is STOP_WAITING."""

    key: bytes
    world_size: int


Request = Union[
    Validate,
    Set,
    CompareSet,
    Get,
    Add,
    Check,
    Wait,
    NumKeys,
    DeleteKey,
    Append,
    MultiGet,
    MultiSet,
    CancelWait,
    Ping,
    QueuePush,
    QueuePop,
    QueueLen,
    ListKeys,
    Barrier,
]


class _Shape(NamedTuple):
    """How a request looks after its opcode: a count if ``counted``, strings, then a number.

    ``limits`` bound the strings in turn; a counted request repeats them as often as it says.
    """

    kind: Type[Request]
    limits: Tuple[int, ...] = ()
    number: Optional[Struct] = None
    counted: bool = False


_KEY = (KEY_MAX,)
_KEY_VALUE = (KEY_MAX, VALUE_MAX)
_SHAPES = (
    _Shape(Validate, number=_U32),
    _Shape(Set, _KEY_VALUE),
    _Shape(CompareSet, (KEY_MAX, VALUE_MAX, VALUE_MAX)),
    _Shape(Get, _KEY),
    _Shape(Add, _KEY, _I64),
    _Shape(Check, _KEY, counted=True),
    _Shape(Wait, _KEY, counted=True),
    _Shape(NumKeys),
    _Shape(DeleteKey, _KEY),
    _Shape(Append, _KEY_VALUE),
    _Shape(MultiGet, _KEY, counted=True),
    _Shape(MultiSet, _KEY_VALUE, counted=True),
    _Shape(CancelWait),
    _Shape(Ping, number=_U32),
    _Shape(QueuePush, _KEY_VALUE),
    _Shape(QueuePop, _KEY),
    _Shape(QueueLen, _KEY),
    _Shape(ListKeys),
    _Shape(Barrier, _KEY, _I64),
)
_OPCODES: Dict[Type[Request], int] = {shape.kind: code for code, shape in enumerate(_SHAPES)}
_GET, _CHECK, _WAIT = _OPCODES[Get], _OPCODES[Check], _OPCODES[Wait]
_WITHOUT_FIELDS: Dict[Type[Request], Request] = {
    NumKeys: NumKeys(),
    CancelWait: CancelWait(),
    ListKeys: ListKeys(),
}
_Fields = List[Union[bytes, int]]


class RequestParser:
    """Turns the bytes of one client into requests; each byte is looked at once.

    It holds no more than one string that is still incomplete, and the strings of one request.
    After a FrameError it takes nothing more.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._need = len(HANDSHAKE)
        self._greeted = False
        self._preface: Optional[Preface] = None
        self._shape: Optional[_Shape] = None
        self._fields: _Fields = []
        self._strings_left = 0
        self._size = 0

    @property
    def held(self) -> int:
        """Bytes of requests that are not complete yet."""
        return self._size + len(self._buffer)

    @property
    def greeted(self) -> bool:
        """Whether the client has sent the handshake."""
        return self._greeted

    @property
    def preface(self) -> Optional[Preface]:
        """What a relay has said before the handshake; None for any other client."""
        return self._preface

    def feed(self, data: bytes) -> List[Request]:
        """Take the next bytes and return the requests that they complete.

        Raises FrameError if the bytes are no request within the protocol's limits.
        """
        if self._need == 1 and (alone := _read_alone(data)) is not None:
            return [alone]
        if self._buffer or len(data) < self._need:
            self._buffer += data
            if len(self._buffer) < self._need:
                return []
            data = bytes(self._buffer)
            self._buffer.clear()
        requests: List[Request] = []
        try:
            self._parse(data, requests)
        except FrameError as error:
            error.before = tuple(requests)
            raise
        return requests

    def _parse(self, data: bytes, requests: List[Request]) -> None:
        """Append the complete requests, and keep what is left of the bytes."""
        at, end, need = 0, len(data), 1
        if not self._greeted:
            at = self._greet(data)
            if at > end:
                self._buffer += data
                self._need = at
                return
            requests.append(Validate())
        shape, fields = self._shape, self._fields
        left, size = self._strings_left, self._size
        while True:
            if shape is None:
                if at >= end:
                    break
                code = data[at]
                if code >= len(_SHAPES):
                    raise FrameError(f"there is no TCPStore operation {code}")
                fields, size = [], 0
                kind, limits, number, counted = shape = _SHAPES[code]
                if not counted:
                    left = len(limits)
                    at += 1
                else:
                    if end - at < 9:
                        shape, need = None, 9
                        break
                    (count,) = _U64.unpack_from(data, at + 1)
                    if count > KEYS_MAX:
                        raise FrameError(f"{count} keys in one request; at most {KEYS_MAX}")
                    left = count * len(limits)
                    at += 9
            else:
                kind, limits, number, counted = shape
            while left:
                if end - at < 8:
                    need = 8
                    break
                (length,) = _U64.unpack_from(data, at)
                limit = limits[-left % len(limits)]
                if length > limit:
                    what = "key" if limit == KEY_MAX else "value"
                    raise FrameError(f"a {what} of {length} bytes; at most {limit}")
                stop = at + 8 + length
                size += stop - at
                if size > REQUEST_MAX:
                    raise FrameError(f"a request of more than {REQUEST_MAX} bytes")
                if stop > end:
                    size -= stop - at
                    need = stop - at
                    break
                fields.append(data[at + 8 : stop])
                at = stop
                left -= 1
            if left:
                break
            if number is not None:
                if end - at < number.size:
                    need = number.size
                    break
                fields += number.unpack_from(data, at)
                at += number.size
            requests.append(_build(kind, counted, fields))
            shape = None
        if at < end:
            self._buffer += data[at:]
        self._shape, self._need = shape, need
        if shape is None:
            self._size = 0
        else:
            self._fields, self._strings_left, self._size = fields, left, size

    def _greet(self, data: bytes) -> int:
        """Read all that comes before the first request; return how long it is at least."""
        at: int = 0
        if data.startswith(RELAY_MAGIC[: len(HANDSHAKE)]):
            if len(data) < _PREFACE.size:
                return _PREFACE.size
            magic, session, following, count, note_length = _PREFACE.unpack_from(data)
            if magic != RELAY_MAGIC:
                raise FrameError(f"a relay of another version: it begins with {magic!r}")
            if count > KEYS_MAX or note_length > NOTE_MAX or following >= REFUSAL:
                raise FrameError("the preface of a relay is beyond the limits")
            numbers_end = _PREFACE.size + _U64.size * count
            at = numbers_end + note_length
            if len(data) < at + len(HANDSHAKE):
                return at + len(HANDSHAKE)
            again = tuple(n for (n,) in _U64.iter_unpack(data[_PREFACE.size : numbers_end]))
            if not all(NOTE < number < following for number in again):
                raise FrameError("the preface of a relay repeats a request of the future")
            self._preface = Preface(session, following, again, data[numbers_end:at])
        _expect_handshake(data[at:])
        self._greeted = True
        return at + len(HANDSHAKE)


def _read_alone(data: bytes) -> Optional[Request]:
    """Read what torch's client sends most, one whole Get, Check or Wait of one key; else None."""
    size = len(data)
    if size > 16:
        code = data[0]
        if code == _GET:
            if size - 9 == _U64.unpack_from(data, 1)[0] <= KEY_MAX:
                return tuple.__new__(Get, (data[9:],))
        elif code in (_CHECK, _WAIT):
            count, length = _COUNT_LENGTH.unpack_from(data, 1)
            if count == 1 and size - 17 == length <= KEY_MAX:
                kind: Type[Request] = Check if code == _CHECK else Wait
                return tuple.__new__(kind, ((data[17:],),))
    return None


def _expect_handshake(data: bytes) -> None:
    if data[:5] == HANDSHAKE:
        return
    if data[0] <= _LAST_LEGACY_OPCODE and _U32.unpack_from(data, 1)[0] <= KEYS_MAX:
        raise FrameError(
            "the client sends no handshake, as torch before 2.2; use torch 2.2 or later"
        )
    raise FrameError(f"the client is no torch TCPStore: it begins with {data[:8]!r}")


def _build(kind: Type[Request], counted: bool, fields: _Fields) -> Request:
    if kind is Validate:
        raise FrameError("the client sends its handshake again")
    if not fields and not counted:
        return _WITHOUT_FIELDS[kind]
    if kind is MultiSet:
        pairs = zip(fields[::2], fields[1::2])  # noqa: B905 (strict is younger than Python 3.8)
        return MultiSet(tuple(pairs))  # type: ignore[arg-type]
    # The fields fit the kind, as its shape says: skip the checks of its constructor.
    return tuple.__new__(kind, (tuple(fields),) if counted else fields)


class AnswerParser:
    """Turns what a sidecar sends to a relay into ``(number, answer)``."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> List[Tuple[int, bytes]]:
        """Take the next bytes and return the answers that they complete.

        Raises FrameError for an answer that no sidecar gives.
        """
        buffer = self._buffer
        buffer += data
        answers, at, end = [], 0, len(buffer)
        while end - at >= _COUNT_LENGTH.size:
            number, length = _COUNT_LENGTH.unpack_from(buffer, at)
            if length > 2 * ANSWER_MAX:
                raise FrameError(f"an answer of {length} bytes")
            begin = at + _COUNT_LENGTH.size
            if end - begin < length:
                break
            at = begin + length
            answers.append((number, bytes(buffer[begin:at])))
        del buffer[:at]
        return answers


def encode(request: Request) -> bytes:
    """Turn a request into the bytes that a client sends."""
    code = _OPCODES[type(request)]
    shape = _SHAPES[code]
    parts = [bytes((code,))]
    if isinstance(request, Validate):
        return HANDSHAKE
    if isinstance(request, MultiSet):
        parts.append(_U64.pack(len(request.items)))
        for key, value in request.items:
            parts += (vec(key), vec(value))
    elif isinstance(request, (Check, Wait, MultiGet)):
        parts.append(_U64.pack(len(request.keys)))
        parts += map(vec, request.keys)
    else:
        for part in request:
            if isinstance(part, bytes):
                parts.append(vec(part))
            elif isinstance(part, int) and shape.number is not None:
                parts.append(shape.number.pack(part))
    return b"".join(parts)


def vec(value: bytes) -> bytes:
    """Answer with one value: to Get and CompareSet."""
    return _U64.pack(len(value)) + value


def i64(number: int) -> bytes:
    """Answer with a signed 64-bit number: to Add, NumKeys, DeleteKey and QueueLen."""
    return _I64.pack(number)


def multi_get(values: Sequence[bytes]) -> bytes:
    """Answer to MultiGet: a value for each key, in the request's order.

    Raises FrameError if that is longer than ANSWER_MAX.
    """
    if sum(map(len, values)) > ANSWER_MAX:
        raise FrameError(f"an answer of more than {ANSWER_MAX} bytes to one request")
    return b"".join(map(vec, values))


def key_list(keys: Sequence[bytes]) -> bytes:
    """Answer to ListKeys: the keys as they were on the wire."""
    return _I64.pack(len(keys)) + b"".join(map(vec, keys))


def popped(length_before: int, value: bytes) -> bytes:
    """Answer to QueuePop: the queue's length before, and its first element if it had one."""
    return _I64.pack(length_before) + (vec(value) if length_before else b"")


def pong(nonce: int) -> bytes:
    """Answer to Ping."""
    return _U32.pack(nonce)


def numbered(number: int, answer: bytes) -> bytes:
    """What a sidecar sends to a relay: an answer, empty for a request that has none."""
    return _COUNT_LENGTH.pack(number, len(answer)) + answer
