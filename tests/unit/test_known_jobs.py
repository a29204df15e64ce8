# SPDX-License-Identifier: Apache-2.0
"""How the jobs of a store are found: in a bounded number of reads."""

from __future__ import annotations

import pytest

from console.job import reading
from console.job.reading import jobs_in
from rdzv.keys import ROOT, JobKeys
from rdzv.store import Put
from rdzv.store.memory.client import MemoryStore


async def names(store: MemoryStore, namespace: str | None = None) -> list[str]:
    found = await jobs_in(store, namespace=namespace, timeout_s=5)
    return [f"{keys.namespace}/{keys.job_name}" for keys in found]


async def filled(*keys: str) -> MemoryStore:
    store = MemoryStore()
    await store.txn([], [Put(key, b"") for key in keys])
    return store


async def test_a_namespace_is_read_alone() -> None:
    jobs = (("a", "x"), ("a", "y"), ("a b", "x"), ("ab", "x"))
    store = await filled(*(JobKeys(*job).job for job in jobs))
    assert await names(store) == ["a/x", "a/y", "a b/x", "ab/x"]
    assert await names(store, "a") == ["a/x", "a/y"]
    assert await names(store, "a b") == ["a b/x"]
    assert await names(store, "none") == []


async def test_many_jobs_of_others_hide_none_of_a_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "JOBS_MAX", 2)
    store = await filled(*(JobKeys("a", name).job for name in "xyz"), JobKeys("b", "x").job)
    assert await names(store) == ["a/x", "a/y"]
    assert await names(store, "b") == ["b/x"]


async def test_keys_that_are_of_no_job_cost_a_bounded_number_of_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "JOBS_MAX", 3)
    store = await filled(*(f"{ROOT}{number}" for number in range(9)), JobKeys("a", "x").job)
    assert await names(store) == []
