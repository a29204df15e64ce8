# SPDX-License-Identifier: Apache-2.0
"""Pods without a sidecar are evicted one at a time, and only where that helps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controller.admission.evictor import (
    EVICT_S,
    NEVER_REFUSED,
    PROBE_S,
    REFUSED,
    Evicted,
    Evictor,
    after_refusal,
    next_eviction,
)
from controller.admission.uninjected import UninjectedPod
from rdzv.errors import ClusterUnavailable
from tests.support.clocks.virtual import now
from tests.support.tasks import beside


def pod(name: str, maker: str = "trainer", kind: str = "ReplicaSet") -> UninjectedPod:
    about = {"apiVersion": "apps/v1", "kind": kind, "name": maker, "uid": maker}
    return UninjectedPod(name, "team", name, about, over=False)


def test_only_makers_that_replace_a_pod_without_counting_a_failure_lose_one() -> None:
    others = [pod("of-job", "j", "Job"), pod("bare", "bare", "Pod")]
    foreign = UninjectedPod(
        "x", "team", "x", {"apiVersion": "x/v1", "kind": "StatefulSet", "uid": "x"}, False
    )
    assert next_eviction(0.0, [*others, foreign], {}, {}) is None
    assert next_eviction(0.0, [*others, pod("b"), pod("a")], {}, {}) == pod("a")
    assert next_eviction(0.0, [pod("s", "set", "StatefulSet")], {}, {}) == pod(
        "s", "set", "StatefulSet"
    )


def test_a_maker_whose_successor_has_no_sidecar_either_loses_no_other_pod() -> None:
    both = [pod("a"), pod("b")]
    before = {pod("a").key: Evicted(100.0, frozenset({"a", "b"}))}
    assert next_eviction(100.0 + PROBE_S - 1, both[1:], before, {}) is None
    assert next_eviction(100.0 + PROBE_S, both[1:], before, {}) == both[1]
    assert next_eviction(1000.0, [both[1], pod("a-2")], before, {}) is None
    # Another maker does not wait for this one.
    assert next_eviction(101.0, [pod("x", "other")], before, {}) == pod("x", "other")


class Api:
    """It takes evictions, but for the first one of each pod with a budget, and any of a blocked."""

    def __init__(self, *budget: str, blocked: str = "") -> None:
        self.evicted: list[tuple[str, str]] = []
        self.budget = {*budget}
        self.blocked = blocked
        self.refused_s: list[float] = []

    async def create(self, path: str, body: Any) -> Any:
        name = body["metadata"]["name"]
        if name == self.blocked:
            self.refused_s.append(now())
            raise ClusterUnavailable("a budget forbids it")
        if name in self.budget:
            self.budget.discard(name)
            raise ClusterUnavailable("a budget forbids it")
        self.evicted.append((path, body["deleteOptions"]["preconditions"]["uid"]))
        return {}


class Uninjected:
    def __init__(self, *found: UninjectedPod) -> None:
        self.found = [*found]

    def pods(self, *, injectable: bool) -> list[UninjectedPod]:
        assert injectable
        return self.found


@pytest.mark.virtual
async def test_an_eviction_names_the_uid_and_is_tried_again_after_a_budget_forbade_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "controller")
    api, uninjected = Api("a"), Uninjected(pod("a"), pod("b"), pod("c"))
    given: tuple[Any, ...] = (api, uninjected, now)
    async with beside(Evictor(*given).run()):
        await asyncio.sleep(REFUSED.first_s + EVICT_S / 2)
        assert api.evicted == [("/api/v1/namespaces/team/pods/a/eviction", "a")]
        uninjected.found.remove(pod("a"))
        await asyncio.sleep(PROBE_S + 1)
        assert [uid for _, uid in api.evicted] == ["a", "b"]
        # The successor of b is made without a sidecar: nothing of this maker is evicted any more.
        uninjected.found[:] = [pod("c"), pod("d")]
        await asyncio.sleep(10 * PROBE_S)
    assert [uid for _, uid in api.evicted] == ["a", "b"]
    told = [one.event for one in caplog.records]  # type: ignore[attr-defined]
    assert told == ["pod_not_evicted", "pod_evicted", "pod_evicted"]


def test_makers_that_were_refused_are_passed_over_and_come_last() -> None:
    blocked, other = pod("a", "blocked"), pod("z", "other")
    once = after_refusal(100.0, NEVER_REFUSED)
    refused = {blocked.key: once}
    assert next_eviction(159.0, [blocked], {}, refused) is None
    assert next_eviction(160.0, [blocked], {}, refused) == blocked
    assert next_eviction(160.0, [blocked, other], {}, refused) == other
    waits_s = []
    for _ in range(7):
        waits_s.append(once.not_before_s - 100.0)
        once = after_refusal(100.0, once)
    assert waits_s == [60.0, 120.0, 240.0, 480.0, 960.0, 1800.0, 1800.0]


@pytest.mark.virtual
async def test_a_blocked_budget_stops_no_other_eviction() -> None:
    api, uninjected = Api(blocked="a"), Uninjected(pod("a", "blocked"), pod("z", "other"))
    given: tuple[Any, ...] = (api, uninjected, now)
    async with beside(Evictor(*given).run()):
        await asyncio.sleep(EVICT_S + 1)
        assert [uid for _, uid in api.evicted] == ["z"]
        uninjected.found.remove(pod("z", "other"))
        await asyncio.sleep(3000.0)
    assert api.refused_s == [0.0, 60.0, 180.0, 420.0, 900.0, 1860.0]
