# SPDX-License-Identifier: Apache-2.0
"""Key intervals, as etcd spells them on the wire, and the bytes of a key."""

from __future__ import annotations

from rdzv.dataclass import dataclass


def key_bytes(key: str) -> bytes:
    """Encode a key; the reverse of ``key_text`` for every key, also one that is no UTF-8."""
    return key.encode("utf-8", "surrogateescape")


def key_text(key: bytes) -> str:
    """Decode a key; never raise, as a foreign key that is no UTF-8 must not end a watch."""
    return key.decode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True)
class Interval:
    """Keys from ``start`` up to, not including, ``end``.

    An empty ``end`` means the one key ``start``; ``b"\\0"`` means no upper bound.
    """

    start: bytes
    end: bytes = b""

    @classmethod
    def of(cls, key: str, *, prefix: bool) -> Interval:
        """Return the interval of one key, or of all that start with it; empty: the whole store."""
        start = key_bytes(key)
        if not prefix:
            return cls(start)
        if not start:
            return cls(b"\0", b"\0")
        stem = start.rstrip(b"\xff")
        return cls(start, stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0")

    @classmethod
    def after(cls, key: str, prefix: str) -> Interval:
        """Return the interval of keys under ``prefix`` after ``key``; of all if that is empty."""
        whole = cls.of(prefix, prefix=True)
        return cls(key_bytes(key) + b"\0", whole.end) if key else whole

    @property
    def single(self) -> bool:
        """Whether this is one key."""
        return not self.end

    def holds(self, key: bytes) -> bool:
        """Return whether ``key`` is within."""
        end = self.end
        if not end:
            return key == self.start
        return key >= self.start and (end == b"\0" or key < end)
