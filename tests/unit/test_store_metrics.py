# SPDX-License-Identifier: Apache-2.0
"""What a sidecar tells of its calls to the store."""

from __future__ import annotations

import pytest

from agent.telemetry.metrics import UNSEEN_MAX, CountedStore, StoreMetrics
from rdzv.errors import StoreUnavailable
from rdzv.store import Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.clocks.hand import HandClock
from tests.support.store.cut import Cut


def test_the_watch_is_behind_for_as_long_as_an_answer_is_ahead_of_it(clock: HandClock) -> None:
    metrics = StoreMetrics(clock)
    assert metrics.unseen_for_s(0) == 0.0
    metrics.answered(5)
    clock.now_s += 3
    metrics.answered(7)
    clock.now_s += 2
    assert metrics.unseen_for_s(4) == 5.0
    assert metrics.unseen_for_s(5) == 2.0
    assert metrics.unseen_for_s(7) == 0.0
    metrics.answered(6)  # an answer that was overtaken
    assert metrics.unseen_for_s(7) == 0.0


def test_a_store_that_was_restored_is_not_behind_for_ever(clock: HandClock) -> None:
    metrics = StoreMetrics(clock)
    metrics.unseen_for_s(900)
    metrics.answered(1000)
    assert metrics.unseen_for_s(12) == 0.0


def test_what_nobody_asks_for_stays_bounded(clock: HandClock) -> None:
    metrics = StoreMetrics(clock)
    for revision in range(1, 10 * UNSEEN_MAX):
        metrics.answered(revision)
    assert metrics.unseen_for_s(UNSEEN_MAX) == 0.0


async def test_calls_are_timed_and_failures_counted_by_kind(clock: HandClock) -> None:
    cut = Cut()
    metrics = StoreMetrics(clock)
    store = CountedStore(MemoryStore(MemoryEngine(), faults=cut), metrics)
    await store.txn([], [Put("/a", b"1")])
    await store.range("/a")
    cut.cut()
    with pytest.raises(StoreUnavailable):
        await store.range("/a", timeout_s=0.05)
    text = metrics.text()
    assert 'muster_store_call_seconds_count{call="range"} 2.0' in text
    assert 'muster_store_call_seconds_count{call="txn"} 1.0' in text
    assert 'muster_store_errors_total{kind="StoreUnavailable"} 1.0' in text
    assert metrics.unseen_for_s(1) >= 0.0
    await store.close()
