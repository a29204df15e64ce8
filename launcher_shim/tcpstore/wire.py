# SPDX-License-Identifier: Apache-2.0
"""The TCPStore protocol of torch 2.2 and later as frames: no sockets, standard library only.

Integers are little-endian. There is no framing, no request id and no length of the whole: a
request ends where its last field ends, and answers come strictly in the order of the requests.
``launcher_shim.tcpstore.parser`` turns bytes into requests, the functions at the end turn answers
into bytes. Requests and semantics as observed on torch's own client and libuv server.

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
CONTAINER_BYTES = 8
"""Of these, so many at its beginning are the same for all clients of a relay, and no other's."""
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

STAGE = b"/muster.stage/"
"""A COMPARE_SET on a key that begins so, and ends as torch's run id, says that a torchrun is about
to start, and tells a digest of its launch line."""
MAY_PASS = b"may pass"
"""What a relay expects there while no torchrun of its container has taken part."""
PASSED = b"passed"
"""The answer where the torchrun need not start: its stage has ended well already."""
AGAIN = b"ask again"
"""The answer where it need not start now: its pod drains, and the stage has not ended yet."""

U32 = Struct("<I")
U64 = Struct("<Q")
U64_PAIR = Struct("<QQ")
_I64 = Struct("<q")
_PREFACE = Struct(f"<{len(RELAY_MAGIC)}s{SESSION_BYTES}sQQQ")


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
        numbers = b"".join(map(U64.pack, self.again))
        return _PREFACE.pack(*fixed) + numbers + self.note

    @staticmethod
    def read(data: bytes) -> "Tuple[Optional[Preface], int]":
        """Read the one that ``data`` begins with: it, and how long it is.

        None, and how long it is at least, where that is more than ``data``. Raises FrameError.
        """
        if len(data) < _PREFACE.size:
            return None, _PREFACE.size
        magic, session, following, count, note_length = _PREFACE.unpack_from(data)
        if magic != RELAY_MAGIC:
            raise FrameError(f"a relay of another version: it begins with {magic!r}")
        if count > KEYS_MAX or note_length > NOTE_MAX or following >= REFUSAL:
            raise FrameError("the preface of a relay is beyond the limits")
        numbers_end = _PREFACE.size + U64.size * count
        end = numbers_end + note_length
        if len(data) < end:
            return None, end
        again = tuple(n for (n,) in U64.iter_unpack(data[_PREFACE.size : numbers_end]))
        if not all(NOTE < number < following for number in again):
            raise FrameError("the preface of a relay repeats a request of the future")
        return Preface(session, following, again, data[numbers_end:end]), end


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
PATIENT = (Wait, Barrier)
"""Requests whose answer may have to wait for others; the client may give them up."""
SILENT = (Set, Append, MultiSet, QueuePush)
"""Requests that change something and have no answer."""


class Shape(NamedTuple):
    """How a request looks after its opcode: a count if ``counted``, strings, then a number.

    ``limits`` bound the strings in turn; a counted request repeats them as often as it says.
    """

    kind: Type[Request]
    limits: Tuple[int, ...] = ()
    number: Optional[Struct] = None
    counted: bool = False


_KEY = (KEY_MAX,)
_KEY_VALUE = (KEY_MAX, VALUE_MAX)
SHAPES = (
    Shape(Validate, number=U32),
    Shape(Set, _KEY_VALUE),
    Shape(CompareSet, (KEY_MAX, VALUE_MAX, VALUE_MAX)),
    Shape(Get, _KEY),
    Shape(Add, _KEY, _I64),
    Shape(Check, _KEY, counted=True),
    Shape(Wait, _KEY, counted=True),
    Shape(NumKeys),
    Shape(DeleteKey, _KEY),
    Shape(Append, _KEY_VALUE),
    Shape(MultiGet, _KEY, counted=True),
    Shape(MultiSet, _KEY_VALUE, counted=True),
    Shape(CancelWait),
    Shape(Ping, number=U32),
    Shape(QueuePush, _KEY_VALUE),
    Shape(QueuePop, _KEY),
    Shape(QueueLen, _KEY),
    Shape(ListKeys),
    Shape(Barrier, _KEY, _I64),
)
"""By opcode."""
OPCODES: Dict[Type[Request], int] = {shape.kind: code for code, shape in enumerate(SHAPES)}


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
        while end - at >= U64_PAIR.size:
            number, length = U64_PAIR.unpack_from(buffer, at)
            if length > 2 * ANSWER_MAX:
                raise FrameError(f"an answer of {length} bytes")
            begin = at + U64_PAIR.size
            if end - begin < length:
                break
            at = begin + length
            answers.append((number, bytes(buffer[begin:at])))
        del buffer[:at]
        return answers


def encode(request: Request) -> bytes:
    """Turn a request into the bytes that a client sends."""
    code = OPCODES[type(request)]
    shape = SHAPES[code]
    parts = [bytes((code,))]
    if isinstance(request, Validate):
        return HANDSHAKE
    if isinstance(request, MultiSet):
        parts.append(U64.pack(len(request.items)))
        for key, value in request.items:
            parts += (vec(key), vec(value))
    elif isinstance(request, (Check, Wait, MultiGet)):
        parts.append(U64.pack(len(request.keys)))
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
    return U64.pack(len(value)) + value


def i64(number: int) -> bytes:
    """Answer with a signed 64-bit number: to Add, NumKeys, DeleteKey and QueueLen."""
    return _I64.pack(number)


def multi_get(values: Sequence[bytes]) -> bytes:
    """Answer to MultiGet: a value for each key, in the request's order.

    Raises FrameError if that is longer than ANSWER_MAX.
    """
    return _vecs(values)


def key_list(keys: Sequence[bytes]) -> bytes:
    """Answer to ListKeys: the keys as they were on the wire.

    Raises FrameError if that is longer than ANSWER_MAX.
    """
    return _I64.pack(len(keys)) + _vecs(keys)


def popped(length_before: int, value: bytes) -> bytes:
    """Answer to QueuePop: the queue's length before, and its first element if it had one."""
    return _I64.pack(length_before) + (vec(value) if length_before else b"")


def pong(nonce: int) -> bytes:
    """Answer to Ping."""
    return U32.pack(nonce)


def numbered(number: int, answer: bytes) -> bytes:
    """What a sidecar sends to a relay: an answer, empty for a request that has none."""
    return U64_PAIR.pack(number, len(answer)) + answer


def _vecs(values: Sequence[bytes]) -> bytes:
    if sum(map(len, values)) + U64.size * len(values) > ANSWER_MAX:
        raise FrameError(f"an answer of more than {ANSWER_MAX} bytes to one request")
    return b"".join(map(vec, values))
