# SPDX-License-Identifier: Apache-2.0
"""The TCPStore protocol of torch 2.2 and later as frames: no sockets, standard library only.

Integers are little-endian. There is no framing, no request id and no length of the whole: a
request ends where its last field ends, and answers come strictly in the order of the requests.
``launcher_shim.tcpstore.requests`` turns bytes into requests, the functions at the end turn answers
into bytes. Requests and semantics as observed on torch's own client and libuv server.

Between the relay of ``muster-run`` and the sidecar the same requests travel behind a ``Preface``,
and every answer behind its request's number, so that both know which requests are settled.
"""

from __future__ import annotations

from struct import Struct
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Type, Union

KEY_MAX = 8 * 1024
"""Maximum length of a key in bytes, as in torch's own server."""
VALUE_MAX = 8 * 1024 * 1024
"""Maximum length of one value of a request in bytes, as in torch's own server."""
KEYS_MAX = 128 * 1024
"""Maximum number of keys in one request, as in torch's own server."""
REQUEST_MAX = 32 * 1024 * 1024
"""Maximum length of a request in bytes. torch's own server has no such limit: it would hold 1
TiB."""
ANSWER_MAX = 64 * 1024 * 1024
"""Maximum length of an answer in bytes: one MultiGet can name a large value very often."""

HANDSHAKE = b"\x00\xce\xf7\x85\x3c"
"""The first bytes of a client of torch 2.2 or later: VALIDATE and the protocol's magic number."""

RELAY_MAGIC = b"MUSTER-1"
"""The first bytes of a relay; no client of torch begins so."""
SESSION_BYTES = 16
"""Length of the name that a relay gives to one client's connection."""
CONTAINER_BYTES = 8
"""Length of its first part, which all clients of one relay have in common, and no others."""
NOTE_MAX = 8 * 1024
"""Maximum length in bytes of the note that a relay keeps for the sidecar."""
NOTE = 0
"""In the place of an answer's number: the rest is a note to keep, and to show in the next
preface."""
REFUSAL = 2**64 - 1
"""In the place of an answer's number: the client's connection has to be closed."""

READY = b"\x00"
NOT_READY = b"\x01"
STOP_WAITING = b"\x00"
WAIT_CANCELED = b"\x01"

STAGE = b"/muster.stage/"
"""Prefix of a key, before torch's run id: a COMPARE_SET on it announces that a torchrun is about to
start, with a digest of its launch line."""
MAY_PASS = b"may pass"
"""The expected value there while no torchrun of the relay's container has taken part."""
PASSED = b"passed"
"""The answer if the torchrun need not start: its stage has ended well already."""
AGAIN = b"ask again"
"""The answer if it need not start now: its pod drains, and the stage has not ended yet."""

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
    """The first message of a relay on each of its connections to the sidecar.

    ``session`` names the client's connection, for as long as that lives. The requests that follow
    begin with those of the numbers in ``again``, which may have been carried out before; the others
    are numbered from ``following`` on. ``note`` is the one that a sidecar gave it to keep.
    """

    session: bytes
    following: int = 1
    again: Tuple[int, ...] = ()
    note: bytes = b""

    def encode(self) -> bytes:
        """Encode it; the handshake follows it."""
        fixed = (RELAY_MAGIC, self.session, self.following, len(self.again), len(self.note))
        numbers = b"".join(map(U64.pack, self.again))
        return _PREFACE.pack(*fixed) + numbers + self.note

    @staticmethod
    def read(data: bytes) -> "Tuple[Optional[Preface], int]":
        """Decode the preface that ``data`` begins with; return it and its length.

        Returns None and the least length if ``data`` is too short. Raises FrameError.
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
    """A request to store a value; no answer."""

    key: bytes
    value: bytes


class CompareSet(NamedTuple):
    """A request to replace a value if it is the expected one; the answer is a ``vec``."""

    key: bytes
    expected: bytes
    desired: bytes


class Get(NamedTuple):
    """A request to read a value; the answer is a ``vec``, empty if there is none."""

    key: bytes


class Add(NamedTuple):
    """A request to add to a decimal counter; the answer is its new value, an ``i64``."""

    key: bytes
    delta: int


class Check(NamedTuple):
    """A request to check whether all keys exist; the answer is READY or NOT_READY."""

    keys: Tuple[bytes, ...]


class Wait(NamedTuple):
    """A request to wait until all keys exist; the answer is STOP_WAITING, now or later."""

    keys: Tuple[bytes, ...]


class NumKeys(NamedTuple):
    """A request to count the keys; the answer is an ``i64``."""


class DeleteKey(NamedTuple):
    """A request to delete a key; the answer is the ``i64`` 1 if there was one, else 0."""

    key: bytes


class Append(NamedTuple):
    """A request to append to a value; no answer."""

    key: bytes
    value: bytes


class MultiGet(NamedTuple):
    """A request to read many values; the answer is a ``vec`` for each key."""

    keys: Tuple[bytes, ...]


class MultiSet(NamedTuple):
    """A request to store many values; no answer."""

    items: Tuple[Tuple[bytes, bytes], ...]


class CancelWait(NamedTuple):
    """A request to give up the pending Wait or Barrier; the answer is WAIT_CANCELED."""


class Ping(NamedTuple):
    """A request for an echo; the answer is the nonce."""

    nonce: int


class QueuePush(NamedTuple):
    """A request to append an element to a queue; no answer."""

    key: bytes
    value: bytes


class QueuePop(NamedTuple):
    """A request to take the first element of a queue; the answer is ``popped``."""

    key: bytes


class QueueLen(NamedTuple):
    """A request to count the elements of a queue; the answer is an ``i64``."""

    key: bytes


class ListKeys(NamedTuple):
    """A request to list the keys; the answer is ``key_list``."""


class Barrier(NamedTuple):
    """A request to wait until ``world_size`` clients have come; the answer is STOP_WAITING."""

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
    """The shape of a request after its opcode: a count if ``counted``, strings, then a number.

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
"""Shapes by opcode."""
OPCODES: Dict[Type[Request], int] = {shape.kind: code for code, shape in enumerate(SHAPES)}


class AnswerParser:
    """A parser of the answers that a sidecar sends to a relay, as ``(number, answer)``."""

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
    """Encode a request as the bytes that a client sends."""
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
    """Encode the answer to Get and CompareSet: one value."""
    return U64.pack(len(value)) + value


def i64(number: int) -> bytes:
    """Encode the answer to Add, NumKeys, DeleteKey and QueueLen: a signed 64-bit number."""
    return _I64.pack(number)


def multi_get(values: Sequence[bytes]) -> bytes:
    """Encode the answer to MultiGet: a value for each key, in the request's order.

    Raises FrameError if that is longer than ANSWER_MAX.
    """
    return _vecs(values)


def key_list(keys: Sequence[bytes]) -> bytes:
    """Encode the answer to ListKeys: the keys as they were on the wire.

    Raises FrameError if that is longer than ANSWER_MAX.
    """
    return _I64.pack(len(keys)) + _vecs(keys)


def popped(length_before: int, value: bytes) -> bytes:
    """Encode the answer to QueuePop: the length before, and the first element if there was one."""
    return _I64.pack(length_before) + (vec(value) if length_before else b"")


def pong(nonce: int) -> bytes:
    """Encode the answer to Ping."""
    return U32.pack(nonce)


def numbered(number: int, answer: bytes) -> bytes:
    """Encode an answer for a relay, with its request's number; empty if the request has none."""
    return U64_PAIR.pack(number, len(answer)) + answer


def _vecs(values: Sequence[bytes]) -> bytes:
    if sum(map(len, values)) + U64.size * len(values) > ANSWER_MAX:
        raise FrameError(f"an answer of more than {ANSWER_MAX} bytes to one request")
    return b"".join(map(vec, values))
