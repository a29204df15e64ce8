# SPDX-License-Identifier: Apache-2.0
"""The requests of a TCPStore client: parsed from bytes, and kept until they are answered.

``launcher_shim.tcpstore.wire`` defines the requests, and their encoding. Behind a relay each gets a
number, unique for as long as the client is connected: the next sidecar is sent all unanswered
requests again, with the same numbers, so that each is applied once. No sockets, standard library
only.
"""

from __future__ import annotations

import re
from typing import Dict, List, NamedTuple, Optional, Tuple, Type, Union

import launcher_shim.tcpstore.wire as wire
from launcher_shim.tcpstore.wire import (
    HANDSHAKE,
    KEY_MAX,
    KEYS_MAX,
    OPCODES,
    RELAY_MAGIC,
    REQUEST_MAX,
    SHAPES,
    U32,
    U64,
    U64_PAIR,
    CancelWait,
    Check,
    FrameError,
    Get,
    ListKeys,
    MultiSet,
    NumKeys,
    Preface,
    Request,
    Shape,
    Validate,
    Wait,
)

_LAST_LEGACY_OPCODE = 11
_GET, _CHECK, _WAIT = OPCODES[Get], OPCODES[Check], OPCODES[Wait]
_WITHOUT_FIELDS: Dict[Type[Request], Request] = {
    NumKeys: NumKeys(),
    CancelWait: CancelWait(),
    ListKeys: ListKeys(),
}
_Fields = List[Union[bytes, int]]


class RequestParser:
    """A parser of one client's requests that reads each byte once.

    It holds no more than one string that is still incomplete, and the strings of one request.
    After a FrameError it takes nothing more.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.need = len(HANDSHAKE)
        """Bytes without which nothing more can be read; 1 at the start of a request."""
        self._greeted = False
        self._preface: Optional[Preface] = None
        self._shape: Optional[Shape] = None
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
        """The preface that a relay has sent before the handshake; None for any other client."""
        return self._preface

    def feed(self, data: bytes) -> List[Request]:
        """Take the next bytes and return the requests that they complete.

        Raises FrameError if the bytes are no request within the protocol's limits.
        """
        if self.need == 1 and (alone := _read_alone(data)) is not None:
            return [alone]
        if self._buffer or len(data) < self.need:
            self._buffer += data
            if len(self._buffer) < self.need:
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
        """Append the complete requests, and keep the rest of the bytes."""
        at, end = 0, len(data)
        if not self._greeted:
            at = self._greet(data)
            if at > end:
                self._buffer += data
                self.need = at
                return
            requests.append(Validate())
        self.need = 1
        while at < end or self._shape is not None:
            shape = self._shape
            if shape is None:
                at = self._begin(data, at)
                shape = self._shape
                if shape is None:
                    break
            kind, limits, number, counted = shape
            if self._strings_left:
                at = self._take_strings(limits, data, at)
                if self._strings_left:
                    break
            if number is not None:
                if end - at < number.size:
                    self.need = number.size
                    break
                self._fields += number.unpack_from(data, at)
                at += number.size
            requests.append(_build(kind, counted, self._fields))
            self._shape = None
            self._size = 0
        if at < end:
            self._buffer += data[at:]

    def _greet(self, data: bytes) -> int:
        """Read everything before the first request; return its length, at least."""
        at = 0
        if data.startswith(RELAY_MAGIC[: len(HANDSHAKE)]):
            preface, at = Preface.read(data)
            if preface is None:
                return at
            if len(data) < at + len(HANDSHAKE):
                return at + len(HANDSHAKE)
            self._preface = preface
        _expect_handshake(data[at:])
        self._greeted = True
        return at + len(HANDSHAKE)

    def _begin(self, data: bytes, at: int) -> int:
        """Read the opcode, and the count if there is one; return where the strings begin.

        The shape stays unknown while the count is incomplete.
        """
        code = data[at]
        if code >= len(SHAPES):
            raise FrameError(f"there is no TCPStore operation {code}")
        shape = SHAPES[code]
        strings = len(shape.limits)
        at += 1
        if shape.counted:
            if len(data) - at < 8:
                self.need = 9
                return at - 1
            (count,) = U64.unpack_from(data, at)
            if count > KEYS_MAX:
                raise FrameError(f"{count} keys in one request; at most {KEYS_MAX}")
            strings *= count
            at += 8
        self._shape = shape
        self._fields = []
        self._strings_left = strings
        return at

    def _take_strings(self, limits: Tuple[int, ...], data: bytes, at: int) -> int:
        """Read as many of the strings as are complete; return where they end."""
        end, fields = len(data), self._fields
        left, size = self._strings_left, self._size
        while left:
            if end - at < 8:
                self.need = 8
                break
            (length,) = U64.unpack_from(data, at)
            limit = limits[-left % len(limits)]
            if length > limit:
                part = "key" if limit == KEY_MAX else "value"
                raise FrameError(f"a {part} of {length} bytes; at most {limit}")
            stop = at + 8 + length
            if size + stop - at > REQUEST_MAX:
                raise FrameError(f"a request of more than {REQUEST_MAX} bytes")
            if stop > end:
                self.need = stop - at
                break
            fields.append(data[at + 8 : stop])
            size += stop - at
            at = stop
            left -= 1
        self._strings_left, self._size = left, size
        return at


def _read_alone(data: bytes) -> Optional[Request]:
    """Read the most common requests, a whole Get, Check or Wait of one key; else return None."""
    size = len(data)
    if size > 16:
        code = data[0]
        if code == _GET:
            if size - 9 == U64.unpack_from(data, 1)[0] <= KEY_MAX:
                return tuple.__new__(Get, (data[9:],))
        elif code in (_CHECK, _WAIT):
            count, length = U64_PAIR.unpack_from(data, 1)
            if count == 1 and size - 17 == length <= KEY_MAX:
                kind: Type[Request] = Check if code == _CHECK else Wait
                return tuple.__new__(kind, ((data[17:],),))
    return None


def _expect_handshake(data: bytes) -> None:
    if data[:5] == HANDSHAKE:
        return
    if data[0] <= _LAST_LEGACY_OPCODE and U32.unpack_from(data, 1)[0] <= KEYS_MAX:
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


ROUND_KEY = re.compile(
    rb"/?torch\.rendezvous\.(?P<run>.+)\.(?P<round>\d{1,18})/(?P<name>.+)", re.DOTALL
)
_MEETING = re.compile(
    rb"MASTER_ADDR|MASTER_PORT|torchelastic/(role_info|assigned_ranks)/.+", re.DOTALL
)


def round_met_by(key: bytes) -> Optional[int]:
    """Return the round whose nodes meet by the value of ``key``; None for any other key.

    They meet once the round is complete, and start its workers after that.
    """
    match = ROUND_KEY.fullmatch(key)
    return None if match is None or not _MEETING.fullmatch(match["name"]) else int(match["round"])


def round_begun_by(request: wire.Request) -> Optional[int]:
    """Return the round whose workers a torchrun is about to start, by one of its requests."""
    if isinstance(request, (wire.Get, wire.Set)):
        return round_met_by(request.key)
    if isinstance(request, (wire.Wait, wire.MultiGet)):
        return round_met_by(request.keys[0]) if request.keys else None
    return None


class _Unsettled(NamedTuple):
    request: wire.Request
    frame: bytes


class RelayLedger:
    """The requests of one client; ``session`` names its connection.

    The next sidecar is sent all unanswered requests again, with the same numbers, so that each
    is applied once.
    """

    def __init__(self, session: bytes) -> None:
        self.held = 0
        """Bytes of the requests that are not settled."""
        self.note = b""
        """The note that the sidecar keeps here."""
        self._session = session
        self._unsettled: Dict[int, _Unsettled] = {}
        self._following = 1
        self._sent = 0

    def __len__(self) -> int:
        return len(self._unsettled)

    @property
    def was_sent(self) -> bool:
        """Whether any sidecar may have got a request of this client."""
        return self._sent > 0

    @property
    def busy(self) -> bool:
        """Whether a request is unanswered that does not wait for other clients."""
        unsettled = self._unsettled.values()
        return any(not isinstance(entry.request, wire.PATIENT) for entry in unsettled)

    @property
    def owes(self) -> bool:
        """Whether a write is unanswered: it counts even if its client is gone."""
        return any(isinstance(entry.request, wire.SILENT) for entry in self._unsettled.values())

    @property
    def awaited(self) -> bool:
        """Whether its client waits for an answer."""
        unsettled = self._unsettled.values()
        return any(not isinstance(entry.request, wire.SILENT) for entry in unsettled)

    def add(self, request: wire.Request, *, connected: bool) -> bytes:
        """Add a request under the next number; return its bytes, for a sidecar if there is one."""
        frame = wire.encode(request)
        number = self._following
        self._following += 1
        self._unsettled[number] = _Unsettled(request, frame)
        self.held += len(frame)
        if connected:
            self._sent = number
        return frame

    def begin(self) -> bytes:
        """Return the first bytes for a sidecar: the preface, and all unanswered requests."""
        again = tuple(number for number in self._unsettled if number <= self._sent)
        preface = wire.Preface(self._session, self._sent + 1, again, self.note)
        self._sent = self._following - 1
        frames = [entry.frame for entry in self._unsettled.values()]
        return b"".join([preface.encode(), wire.HANDSHAKE, *frames])

    def settle(self, number: int, answer: bytes) -> bytes:
        """Record an answer; return the bytes for the client."""
        entry = self._unsettled.get(number)
        if entry is None:
            return b""  # a wait that was given up
        self._drop(number)
        if isinstance(entry.request, wire.CancelWait):
            for earlier, other in tuple(self._unsettled.items()):
                if earlier < number and isinstance(other.request, wire.PATIENT):
                    self._drop(earlier)
        return answer

    def _drop(self, number: int) -> None:
        self.held -= len(self._unsettled.pop(number).frame)
