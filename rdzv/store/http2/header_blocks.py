# SPDX-License-Identifier: Apache-2.0
"""Header blocks (RFC 7541): out as literals that no table knows, in by the package hpack."""

from __future__ import annotations

from collections.abc import Iterable

from hpack import Decoder, HPACKError

from rdzv.store.http2.frames import (
    CONTINUATION,
    END_HEADERS,
    ConnectionFaultError,
    ErrorCode,
    IncomingFrame,
)

Fields = tuple[tuple[bytes, bytes], ...]

MAX_LIST_BYTES = 65536
"""Bound on a header list, as HTTP/2 counts it: 32 bytes a field besides name and value."""

MOST_CONTINUATIONS = 32
"""Bound on the frames of one block, as they may be empty."""

KEPT_BLOCKS = 64
"""Bound on the blocks whose meaning is kept."""

NO_TABLE = b"\x20"
"""The first byte of each block out: its sender keeps no table, whatever size the peer allows."""


def literal(name: bytes, value: bytes, *, secret: bool = False) -> bytes:
    """Return a field that is put into no table; a ``secret`` one by no proxy on the way either."""
    return b"".join(
        (
            b"\x10" if secret else b"\x00",
            _length(len(name)),
            name,
            _length(len(value)),
            value,
        )
    )


def _length(size: int) -> bytes:
    """Return a length as an integer with a prefix of seven bits, without Huffman coding."""
    if size < 0x7F:
        return bytes((size,))
    out, size = bytearray((0x7F,)), size - 0x7F
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)


class BlockReader:
    """Puts a block together from HEADERS and CONTINUATION, which nothing may interrupt."""

    def __init__(self) -> None:
        self._begun: IncomingFrame | None = None
        self._parts: list[bytes] = []

    @property
    def partial(self) -> bool:
        """Whether a block has begun and not ended."""
        return self._begun is not None

    def take(self, one: IncomingFrame) -> tuple[IncomingFrame, bytes] | None:
        """Take a frame; return the HEADERS and the whole block if it ends with this frame.

        Raises ``ConnectionFaultError``.
        """
        if self._begun is None:
            if one.kind == CONTINUATION:
                raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "a continuation of nothing")
            if one.flags & END_HEADERS:
                return one, one.payload
            self._begun, self._parts = one, [one.payload]
            return None
        if one.kind != CONTINUATION or one.stream_id != self._begun.stream_id:
            raise ConnectionFaultError(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
        self._parts.append(one.payload)
        if len(self._parts) > MOST_CONTINUATIONS or sum(map(len, self._parts)) > MAX_LIST_BYTES:
            raise ConnectionFaultError(ErrorCode.ENHANCE_YOUR_CALM, "a header block without end")
        if not one.flags & END_HEADERS:
            return None
        begun, self._begun = self._begun, None
        return begun, b"".join(self._parts)


class HeaderDecoder:
    """The meaning of the blocks that come in, all of which it must see, in order."""

    def __init__(self) -> None:
        self._decoder = Decoder(MAX_LIST_BYTES)
        self._kept: dict[bytes, Fields] = {}

    def decode(self, block: bytes) -> Fields:
        """Return the fields of a block; raise ``ConnectionFaultError``."""
        fields = self._kept.get(block)
        if fields is not None:
            return fields
        try:
            found: Iterable[tuple[bytes | str, bytes | str]] = self._decoder.decode(block, raw=True)
        except (HPACKError, IndexError, ValueError) as error:
            raise ConnectionFaultError(ErrorCode.COMPRESSION_ERROR, str(error)) from None
        fields = tuple((_bytes(name), _bytes(value)) for name, value in found)
        # A block of indices of one byte each changes no table: it means the same until another
        # block comes.
        if block and min(block) > 0x80 and max(block) < 0xFF:
            if len(self._kept) < KEPT_BLOCKS:
                self._kept[block] = fields
        else:
            self._kept.clear()
        return fields


def _bytes(text: bytes | str) -> bytes:
    return text if isinstance(text, bytes) else text.encode()
