# SPDX-License-Identifier: Apache-2.0
"""Pods without a sidecar are evicted one at a time; one that is gone decides nothing for others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from controller.admission.decision import Verdict
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
from controller.admission.uninjected import (
    AGAIN,
    FRESH_S,
    NAMESPACES_AT_ONCE,
    UninjectedPod,
    UninjectedPods,
)
from controller.cluster import paths
from rdzv.errors import ClusterUnavailable
from tests.support.clocks.virtual import now
from tests.support.tasks import beside

pytestmark = pytest.mark.virtual

INJECTED: tuple[Any, ...] = ({"op": "add", "path": "/spec/x", "value": 1},)
ALL = "/api/v1/pods"
WEBHOOK = paths.webhook_configuration("muster")


def pod(name: str, maker: str = "trainer", namespace: str = "team") -> dict[str, Any]:
    made_by = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": maker, "uid": maker}
    owners = [{**made_by, "controller": True}]
    about = {"name": name, "uid": name, "namespace": namespace, "ownerReferences": owners}
    return {"metadata": about}


class Cluster:
    """Lists of pods by path, and pods by name; it is also the webhook's verdict and its Events.

    ``away``: names of pods that cannot be read, ``slow_s``: how long that takes to be known.
    """

    def __init__(self, *listed: dict[str, Any]) -> None:
        self.lists: dict[str, list[dict[str, Any]]] = {ALL: [*listed]}
        self.readable = {one["metadata"]["name"]: one for one in listed}
        self.away: set[str] = set()
        self.slow_s = 0.0
        self.faulty: set[str] = set()
        self.refusing: set[str] = set()
        self.events: list[str] = []
        self.news: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self.namespaces: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()

    async def get(self, path: str, *rest: Any, accept: str = "") -> dict[str, Any]:
        bare, _, query = path.partition("?")
        if "fieldSelector" in query:
            name = query.rpartition("%3D")[2]
            if name in self.away:
                await asyncio.sleep(self.slow_s)
                raise ClusterUnavailable("no answer")
            return {"items": [self.readable[name]] if name in self.readable else []}
        if "limit" in query:
            return {"items": [*self.lists.get(bare, [])], "metadata": {"resourceVersion": "1"}}
        return {"webhooks": [{}], "metadata": {}} if path == WEBHOOK else {"metadata": {}}

    async def watch(self, path: str, version: str, *, accept: str) -> AsyncIterator[dict[str, Any]]:
        quiet: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        bare = path.partition("?")[0]
        news = {ALL: self.news, "/api/v1/namespaces": self.namespaces}.get(bare, quiet)
        while True:
            happened, held = await news.get()
            yield {"type": happened, "object": held}

    async def verdict(self, found: Any, *_: Any) -> tuple[Verdict, float]:
        name = found["metadata"]["name"]
        if name in self.faulty:
            raise RuntimeError("a defect")
        if name in self.refusing:
            return Verdict((), ("too slow",), "too slow"), 0.0
        return Verdict(INJECTED, (), ""), 0.0

    def say(self, about: Any, *_: Any, **__: Any) -> None:
        self.events.append(about["name"])

    async def run(self) -> None:
        await asyncio.Event().wait()


@asynccontextmanager
async def publishing(cluster: Cluster) -> AsyncIterator[SimpleNamespace]:
    given: tuple[Any, ...] = (cluster, cluster, "muster", cluster, now)
    pods = UninjectedPods(*given)

    def names(*, injectable: bool = False) -> list[str]:
        return sorted(one.name for one in pods.pods(injectable=injectable))

    async with beside(pods.run()) as (task,):
        await asyncio.sleep(1.0)
        yield SimpleNamespace(names=names, task=task)


async def test_a_pod_that_is_gone_is_no_verdict_on_its_siblings() -> None:
    cluster = Cluster(pod("a"), pod("b"))
    del cluster.readable["b"]
    async with publishing(cluster) as shown:
        assert cluster.events == ["trainer"]
        assert shown.names(injectable=True) == ["a", "b"]


async def test_if_all_read_pods_are_gone_later_ones_are_judged() -> None:
    cluster = Cluster(pod("a"))
    cluster.readable.clear()
    async with publishing(cluster) as shown:
        assert shown.names() == []
        cluster.readable["b"] = pod("b")
        cluster.news.put_nowait(("ADDED", pod("b")))
        cluster.news.put_nowait(("DELETED", pod("a")))
        await asyncio.sleep(AGAIN.first_s)
        assert shown.names(injectable=True) == ["b"]


async def test_a_verdict_lasts_no_longer_than_its_pod() -> None:
    cluster = Cluster(pod("a"), pod("b"))
    cluster.refusing = {"b"}
    async with publishing(cluster) as shown:
        assert (shown.names(), shown.names(injectable=True)) == (["a", "b"], [])
        cluster.news.put_nowait(("DELETED", pod("b")))
        await asyncio.sleep(AGAIN.first_s)
        assert shown.names(injectable=True) == ["a"]


async def test_the_verdict_of_a_bad_moment_does_not_last() -> None:
    cluster = Cluster(pod("a"))
    cluster.refusing = {"a"}
    async with publishing(cluster) as shown:
        cluster.refusing.clear()
        await asyncio.sleep(FRESH_S - 2.0)
        assert shown.names(injectable=True) == []
        await asyncio.sleep(2.0)
        assert shown.names(injectable=True) == ["a"]


async def test_an_outage_keeps_the_last_verdict() -> None:
    cluster = Cluster(pod("a"))
    async with publishing(cluster) as shown:
        cluster.away = {"a"}
        await asyncio.sleep(FRESH_S + 60.0)
        assert shown.names(injectable=True) == ["a"]


@pytest.mark.parametrize("fault", ["away", "faulty"])
async def test_one_pod_holds_up_no_other(fault: str) -> None:
    cluster = Cluster(pod("a", "one"), pod("b", "two"))
    setattr(cluster, fault, {"a"})
    cluster.slow_s = 10.0
    async with publishing(cluster) as shown:
        await asyncio.sleep(cluster.slow_s)
        assert shown.names() == ["b"]
        cluster.readable["c"] = pod("c", "three")
        cluster.news.put_nowait(("ADDED", pod("c", "three")))
        await asyncio.sleep(2 * cluster.slow_s)
        assert shown.names() == ["b", "c"]
        getattr(cluster, fault).clear()
        await asyncio.sleep(2 * FRESH_S)
        assert shown.names() == ["a", "b", "c"]
        assert not shown.task.done()


async def test_a_new_maker_does_not_wait_for_all_slow_ones() -> None:
    slow = [f"slow-{number}" for number in range(20)]
    cluster = Cluster(*(pod(name, name) for name in slow))
    cluster.away, cluster.slow_s = {*slow}, 10.0
    async with publishing(cluster) as shown:
        cluster.readable["new"] = pod("new", "new")
        cluster.news.put_nowait(("ADDED", pod("new", "new")))
        await asyncio.sleep(2 * cluster.slow_s)
        assert shown.names() == ["new"]


async def test_slow_makers_of_a_namespace_delay_no_other() -> None:
    slow = [f"slow-{number}" for number in range(20)]
    cluster = Cluster(pod("a"), *(pod(name, name, "other") for name in slow))
    cluster.away, cluster.slow_s = {*slow}, 10.0
    async with publishing(cluster) as shown:
        assert shown.names() == ["a"]


async def test_looks_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 3 * NAMESPACES_AT_ONCE
    names = [f"p-{number}" for number in range(count)]
    cluster = Cluster(*(pod(name, name, f"n-{int(name[2:]) // 2}") for name in names))
    verdict, under_way = Cluster.verdict, 0
    most: list[int] = []

    async def slow(self: Cluster, *given: Any) -> tuple[Verdict, float]:
        nonlocal under_way
        under_way += 1
        most.append(under_way)
        await asyncio.sleep(10.0)
        under_way -= 1
        return await verdict(self, *given)

    monkeypatch.setattr(Cluster, "verdict", slow)
    async with publishing(cluster) as shown:
        assert shown.names() == []
        await asyncio.sleep(10.0 * count)
        assert shown.names() == sorted(names)
        assert max(most) == NAMESPACES_AT_ONCE


async def test_a_namespace_that_asks_again_is_followed_again() -> None:
    cluster = Cluster()
    asks = {"metadata": {"name": "team", "uid": "team"}}
    held = pod("a")
    cluster.readable["a"] = held
    cluster.lists[paths.core("team", "pods")] = [held]
    async with publishing(cluster) as shown:
        for kind, expected in (("ADDED", ["a"]), ("DELETED", []), ("ADDED", ["a"])):
            cluster.namespaces.put_nowait((kind, asks))
            await asyncio.sleep(1.0)
            assert shown.names() == expected
        assert not shown.task.done()


async def test_a_defect_in_one_namespace_ends_no_other_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(pod("a"))
    of_namespace = paths.core("team", "pods")
    get = Cluster.get

    async def defective(self: Cluster, path: str, *rest: Any, accept: str = "") -> dict[str, Any]:
        if path.startswith(of_namespace) and "limit" in path:
            return {"items": [{}]}
        return await get(self, path, *rest)

    monkeypatch.setattr(Cluster, "get", defective)
    async with publishing(cluster) as shown:
        cluster.namespaces.put_nowait(("ADDED", {"metadata": {"name": "team", "uid": "team"}}))
        await asyncio.sleep(1.0)
        assert shown.names() == ["a"]
        assert not shown.task.done()


def evictor_pod(name: str, maker: str = "trainer", kind: str = "ReplicaSet") -> UninjectedPod:
    about = {"apiVersion": "apps/v1", "kind": kind, "name": maker, "uid": maker}
    return UninjectedPod(name, "team", name, about, over=False)


def test_only_makers_that_replace_a_pod_without_counting_a_failure_lose_one() -> None:
    others = [evictor_pod("of-job", "j", "Job"), evictor_pod("bare", "bare", "Pod")]
    foreign = UninjectedPod(
        "x", "team", "x", {"apiVersion": "x/v1", "kind": "StatefulSet", "uid": "x"}, False
    )
    assert next_eviction(0.0, [*others, foreign], {}, {}) is None
    assert next_eviction(0.0, [*others, evictor_pod("b"), evictor_pod("a")], {}, {}) == evictor_pod(
        "a"
    )
    assert next_eviction(0.0, [evictor_pod("s", "set", "StatefulSet")], {}, {}) == evictor_pod(
        "s", "set", "StatefulSet"
    )


def test_a_maker_whose_successor_has_no_sidecar_either_loses_no_other_pod() -> None:
    both = [evictor_pod("a"), evictor_pod("b")]
    before = {evictor_pod("a").key: Evicted(100.0, frozenset({"a", "b"}))}
    assert next_eviction(100.0 + PROBE_S - 1, both[1:], before, {}) is None
    assert next_eviction(100.0 + PROBE_S, both[1:], before, {}) == both[1]
    assert next_eviction(1000.0, [both[1], evictor_pod("a-2")], before, {}) is None
    # Another maker does not wait for this one.
    assert next_eviction(101.0, [evictor_pod("x", "other")], before, {}) == evictor_pod(
        "x", "other"
    )


class Api:
    """It takes evictions, but for so many first ones of a pod."""

    def __init__(self, **refusals: float) -> None:
        self.evicted: list[tuple[str, str]] = []
        self.refusals = refusals
        self.refused_s: list[float] = []

    async def create(self, path: str, body: Any) -> Any:
        name = body["metadata"]["name"]
        if self.refusals.get(name, 0) > 0:
            self.refusals[name] -= 1
            self.refused_s.append(now())
            raise ClusterUnavailable("a budget forbids it")
        self.evicted.append((path, body["deleteOptions"]["preconditions"]["uid"]))
        return {}


class Uninjected:
    def __init__(self, *found: UninjectedPod) -> None:
        self.found = [*found]

    def pods(self, *, injectable: bool) -> list[UninjectedPod]:
        assert injectable
        return self.found


async def test_an_eviction_names_the_uid_and_is_tried_again_after_a_budget_forbade_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "controller")
    api, uninjected = Api(a=1), Uninjected(evictor_pod("a"), evictor_pod("b"), evictor_pod("c"))
    given: tuple[Any, ...] = (api, uninjected, now)
    async with beside(Evictor(*given).run()):
        await asyncio.sleep(REFUSED.first_s + EVICT_S / 2)
        assert api.evicted == [("/api/v1/namespaces/team/pods/a/eviction", "a")]
        uninjected.found.remove(evictor_pod("a"))
        await asyncio.sleep(PROBE_S + 1)
        assert [uid for _, uid in api.evicted] == ["a", "b"]
        # The successor of b is made without a sidecar: nothing of this maker is evicted any more.
        uninjected.found[:] = [evictor_pod("c"), evictor_pod("d")]
        await asyncio.sleep(10 * PROBE_S)
    assert [uid for _, uid in api.evicted] == ["a", "b"]
    told = [one.event for one in caplog.records]  # type: ignore[attr-defined]
    assert told == ["pod_not_evicted", "pod_evicted", "pod_evicted"]


def test_makers_that_were_refused_are_passed_over_and_come_last() -> None:
    blocked, other = evictor_pod("a", "blocked"), evictor_pod("z", "other")
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


async def test_a_blocked_budget_stops_no_other_eviction() -> None:
    api = Api(a=math.inf)
    uninjected = Uninjected(evictor_pod("a", "blocked"), evictor_pod("z", "other"))
    given: tuple[Any, ...] = (api, uninjected, now)
    async with beside(Evictor(*given).run()):
        await asyncio.sleep(EVICT_S + 1)
        assert [uid for _, uid in api.evicted] == ["z"]
        uninjected.found.remove(evictor_pod("z", "other"))
        await asyncio.sleep(3000.0)
    assert api.refused_s == [0.0, 60.0, 180.0, 420.0, 900.0, 1860.0]
