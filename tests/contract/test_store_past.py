# SPDX-License-Identifier: Apache-2.0
"""Reads of what the store held at an earlier revision."""

from __future__ import annotations

import pytest

from rdzv.errors import Compacted, StoreRefused
from rdzv.store import Delete, KeyValue, Operation, Put, Range, Store
from tests.support.store.backend import Backend


def held(response: object) -> list[tuple[str, bytes]]:
    assert isinstance(response, tuple)
    kvs: tuple[KeyValue, ...] = response
    return [(kv.key[-1], kv.value) for kv in kvs]


async def test_a_past_revision_shows_what_was_there_then(backend: Backend, store: Store) -> None:
    p = backend.prefix
    steps: list[list[Operation]] = [
        [Put(f"{p}a", b"1")],
        [Put(f"{p}b", b"1"), Put(f"{p}a", b"2")],
        [Delete(p, prefix=True)],
        [Put(f"{p}b", b"2")],
    ]
    revisions = [(await store.txn([], step)).revision for step in steps]
    contents = [
        [("a", b"1")],
        [("a", b"2"), ("b", b"1")],
        [],
        [("b", b"2")],
    ]
    for revision, content in zip(revisions, contents, strict=True):
        read = await store.txn([], [Range(p, prefix=True, revision=revision)])
        assert held(read.responses[0]) == content
    both: list[Operation] = [
        Range(p, prefix=True, revision=revisions[0]),
        Put(f"{p}c", b"3"),
        Range(f"{p}c"),
    ]
    first, _, own = (await store.txn([], both)).responses
    assert held(first) == [("a", b"1")]
    assert held(own) == [("c", b"3")]


async def test_a_revision_that_is_gone_or_to_come_cannot_be_read(
    backend: Backend, store: Store
) -> None:
    p = backend.prefix
    first = await store.txn([], [Put(f"{p}a", b"1")])
    last = await store.txn([], [Put(f"{p}a", b"2")])
    await store.compact(last.revision)
    with pytest.raises(Compacted):
        await store.txn([], [Range(p, prefix=True, revision=first.revision)])
    oldest = await store.txn([], [Range(p, prefix=True, revision=last.revision)])
    assert held(oldest.responses[0]) == [("a", b"2")]
    with pytest.raises(StoreRefused):
        await store.txn([], [Range(p, prefix=True, revision=last.revision + 1000)])
