# SPDX-License-Identifier: Apache-2.0
"""What is kept of a cluster's objects while a watch breaks off, and events that are owed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from controller.cluster import events as cluster_events
from controller.cluster.collection import AGAIN_FIRST_S, Collection
from controller.cluster.events import Events
from controller.metrics import Backups, newest_success
from rdzv.errors import ClusterRefused, ClusterUnavailable
from tests.support.clocks.virtual import now

pytestmark = pytest.mark.virtual


Reports = AsyncIterator[dict[str, Any]]


class Watched:
    """A list of one node of version 1; each watch yields what ``after`` does after a version."""

    def __init__(self, after: Callable[[int], Reports]) -> None:
        self._after = after
        self.asked: list[str] = []
        self.asked_s: list[float] = []

    async def get(self, path: str, *, accept: str) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": "1"}, "items": [node(1)["object"]]}

    async def watch(self, path: str, version: str, *, accept: str) -> Reports:
        self.asked.append(version)
        self.asked_s.append(now())
        async for report in self._after(int(version)):
            yield report


def node(version: int, *, cordoned: bool = False) -> dict[str, Any]:
    metadata = {"uid": "n", "resourceVersion": str(version)}
    return {"type": "MODIFIED", "object": {"metadata": metadata, "cordoned": cordoned}}


async def breaks_off(version: int) -> Reports:
    """It is cordoned after a report; the watch breaks off after all that there is."""
    for report in (node(2), node(3, cordoned=True), node(4, cordoned=True)):
        if int(report["object"]["metadata"]["resourceVersion"]) > version:
            yield report
            await asyncio.sleep(1)
    raise ClusterUnavailable("the watch broke off")


async def lives_for_100_s(version: int) -> Reports:
    yield node(version + 1)
    await asyncio.sleep(100)
    raise ClusterUnavailable("the watch broke off")


async def ends_at_once(version: int) -> Reports:
    """As while an API server rebuilds its cache."""
    nothing: list[dict[str, Any]] = []
    for report in nothing:
        yield report


async def test_an_object_that_brings_out_a_defect_is_left_out_and_told_once_while_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def reduced(one: dict[str, Any]) -> str:
        version = str(one["metadata"]["resourceVersion"])
        if version != "2":
            raise AttributeError("a defect")
        return version

    api: Any = Watched(breaks_off)
    nodes = Collection(api, "/api/v1/nodes", reduced)
    async with nodes.following():
        await nodes.changed_after(1)
        assert nodes.items == {"n": "2"}
        await asyncio.sleep(100)
        assert (nodes.items, nodes.sequence) == ({}, 3)
    told = [getattr(one, "event", "") for one in caplog.records]
    assert told.count("defect") == 2  # of the versions 1 and 3; 4 says no more


async def test_a_watch_that_breaks_off_shows_no_former_state_and_only_changes_are_news() -> None:
    api: Any = Watched(breaks_off)
    nodes = Collection(api, "/api/v1/nodes", lambda one: bool(one["cordoned"]))
    shown: list[bool] = []
    async with nodes.following():
        for sequence in range(2):
            await nodes.changed_after(sequence)
            shown.append(nodes.items["n"])
        await asyncio.sleep(100)
        assert shown == [False, True]
        assert nodes.sequence == 2
    assert api.asked[0] == "1"
    assert set(api.asked[1:]) == {"4"}


async def test_a_watch_that_has_worked_is_retried_soon_and_its_next_outage_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api: Any = Watched(lives_for_100_s)
    async with Collection(api, "/api/v1/nodes", lambda one: one).following():
        await asyncio.sleep(8 * (100 + AGAIN_FIRST_S) + 1)
    gaps_s = [later - before - 100 for before, later in pairwise(api.asked_s)]
    assert gaps_s == pytest.approx([AGAIN_FIRST_S] * 8)
    told = [getattr(one, "event", "") for one in caplog.records]
    assert told.count("cluster_unavailable") == 8


async def test_watches_that_end_at_once_are_asked_for_once_a_second() -> None:
    api: Any = Watched(ends_at_once)
    async with Collection(api, "/api/v1/nodes", lambda one: one).following():
        await asyncio.sleep(10)
    assert 5 <= len(api.asked) <= 11


class Creating:
    """The calls of an API server that Events need; to make one takes a second."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.paths: list[str] = []
        self.merged: list[str] = []

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(1)
        self.paths.append(path)
        self.made.append(body["involvedObject"]["name"])
        return body

    async def merge(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.paths.append(path)
        self.merged.append(body["message"])
        return body


def pod(name: str) -> dict[str, Any]:
    return {"kind": "Pod", "name": name, "namespace": "team", "uid": f"uid-{name}"}


def told(api: Creating) -> Events:
    given: Any = api
    return Events(given, asyncio.get_running_loop().time)


NO_UTF_8 = "\ud800"


@pytest.mark.parametrize(
    ("about", "message", "namespace", "name"),
    [
        ({}, f"because {NO_UTF_8} of it", "team", "a."),
        ({"namespace": NO_UTF_8}, "for a reason", "%3F", "a."),
        ({"name": NO_UTF_8}, "for a reason", "team", "%3F."),
        (
            {"namespace": "kube-system/secrets?x=", "name": "../../secrets/x?y="},
            "for a reason",
            "kube-system%2Fsecrets%3Fx%3D",
            "..%2F..%2Fsecrets%2Fx%3Fy%3D.",
        ),
    ],
    ids=["message", "namespace", "name", "other places"],
)
async def test_whatever_a_pod_names_as_its_maker_is_told_below_events(
    about: dict[str, Any], message: str, namespace: str, name: str
) -> None:
    """Anybody in the cluster may ask the webhook, and name any namespace and object."""
    api = Creating()
    events = told(api)
    for revision, said in enumerate((message, "again"), 1):
        events.say({**pod("a"), **about}, "NotInjected", said, revision=revision)
        await events.write()
        await asyncio.sleep(60)
    made, merged = api.paths
    assert made == f"/api/v1/namespaces/{namespace}/events"
    assert merged.startswith(f"{made}/{name}")
    assert not {"/", "?"} & {*merged.removeprefix(f"{made}/")}


async def test_an_event_that_is_forgotten_before_its_turn_leaves_the_others_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_events, "KEPT", 3)
    api = Creating()
    events = told(api)
    for name in "abc":
        events.say(pod(name), "Joined", "it is a member")
    writing = asyncio.create_task(events.write())
    await asyncio.sleep(0.5)
    for name in "de":
        events.say(pod(name), "Joined", "it is a member")
    await writing
    await events.write()
    assert api.made == ["a", "c", "d", "e"]


class There(Creating):
    """Every Event is there already, by a leader that wrote it and could not say that it had."""

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        raise ClusterRefused("it is there", 409)


@pytest.mark.parametrize(("said", "written"), [(["one"], []), (["one", "two"], ["two"])])
async def test_what_is_said_with_an_event_that_is_there_already_is_added_to_it(
    said: list[str], written: list[str]
) -> None:
    api = There()
    events = told(api)
    for revision, message in enumerate(said, 1):
        events.say(pod("a"), "Reformed", message, revision=revision)
    await events.write()
    assert api.merged == written
    assert not any(one.owes for one in events.series)


METRIC = "muster_controller_backup_timestamp_seconds"


def cron_job(last: str = "") -> dict[str, Any]:
    return {"status": {"lastSuccessfulTime": last} if last else {}}


class Api:
    """An API server with CronJobs by name."""

    def __init__(self, **jobs: dict[str, Any]) -> None:
        self.jobs = jobs
        self.away = False

    async def get(self, path: str) -> dict[str, Any]:
        assert path.startswith("/apis/batch/v1/namespaces/muster-system/cronjobs/")
        if self.away:
            raise ClusterUnavailable("it is away")
        return self.jobs[path.rpartition("/")[2]]


def test_the_newest_backup_counts() -> None:
    jobs = [cron_job(), cron_job("1970-01-02T00:00:00Z"), cron_job("1970-01-03T00:00:00Z")]
    assert newest_success(jobs) == 2 * 86_400
    assert newest_success([cron_job(), {}]) == 0


async def test_the_last_look_counts_while_the_api_server_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = CollectorRegistry()
    api: Any = Api(a=cron_job("1970-01-02T00:00:00Z"), b=cron_job())
    backups = Backups(api, "muster-system", ["a", "b"], registry)
    await backups.step()
    api.away = True
    with caplog.at_level(logging.WARNING):
        await backups.step()
        await backups.step()
    assert f"{METRIC} 86400.0" in generate_latest(registry).decode()
    assert [one.message for one in caplog.records] == [
        "the age of the backups of etcd is not known: it is away"
    ]
