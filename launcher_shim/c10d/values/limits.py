# SPDX-License-Identifier: Apache-2.0
"""The limits of one transaction for the launchers' values, by etcd's default settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from rdzv.errors import WireError

T = TypeVar("T")

MAX_VALUE_BYTES = 1 << 20
"""etcd takes requests up to 1.5 MiB by default; torch's own limit of 8 MiB does not fit."""

BATCH_MAX = 63
"""Maximum number of items set by one transaction: each takes two operations of the 128 that etcd
allows, and one records them."""

READS_MAX = 42
"""Maximum number of keys read by one transaction: each takes three of the 128 operations."""

DELETES_MAX = 100
"""Maximum number of keys dropped by one transaction."""


def check_size(key: bytes, value: bytes) -> None:
    """Raise ``WireError`` if the value is too long for the store."""
    if len(value) > MAX_VALUE_BYTES:
        raise WireError(
            f"{key[:64]!r} has {len(value)} bytes: the store takes at most {MAX_VALUE_BYTES}"
        )


def batches(items: Sequence[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    """Split items that are too many, or too long, for one transaction."""
    batch: list[tuple[bytes, bytes]] = []
    size = 0
    for key, value in items:
        # Each byte of a key may take three, and the key is spelt three times.
        cost = 9 * len(key) + len(value)
        if batch and (len(batch) == BATCH_MAX or size + cost > MAX_VALUE_BYTES):
            yield batch
            batch, size = [], 0
        batch.append((key, value))
        size += cost
    if batch:
        yield batch


def grouped(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Split into groups of at most ``size``."""
    return (items[first : first + size] for first in range(0, len(items), size))
