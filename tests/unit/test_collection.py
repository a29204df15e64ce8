# SPDX-License-Identifier: Apache-2.0
"""What is kept of a kind of objects while its watch breaks off and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from controller.access.secret import JobsWithPods
from controller.cluster.collection import AGAIN_FIRST_S, Collection
from rdzv.errors import ClusterUnavailable
from tests.support.clocks.virtual import now

pytestmark = pytest.mark.virtual


class Breaking:
    """One node that is cordoned after a report; each watch breaks off after all that there is."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def get(self, path: str, *, accept: str) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": "1"}, "items": [node("1", cordoned=False)]}

    async def watch(self, path: str, version: str, *, accept: str) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(version)
        for number, cordoned in ((2, False), (3, True), (4, True)):
            if number > int(version):
                yield {"type": "MODIFIED", "object": node(str(number), cordoned=cordoned)}
                await asyncio.sleep(1)
        raise ClusterUnavailable("the watch broke off")


def node(version: str, *, cordoned: bool) -> dict[str, Any]:
    return {"metadata": {"uid": "n", "resourceVersion": version}, "cordoned": cordoned}


async def test_an_object_that_brings_out_a_defect_is_left_out_and_told_once_while_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def reduced(one: dict[str, Any]) -> str:
        version = str(one["metadata"]["resourceVersion"])
        if version != "2":
            raise AttributeError("a defect")
        return version

    api: Any = Breaking()
    nodes = Collection(api, "/api/v1/nodes", reduced)
    async with nodes.following():
        await nodes.changed_after(1)
        assert nodes.items == {"n": "2"}
        await asyncio.sleep(100)
        assert (nodes.items, nodes.sequence) == ({}, 3)
    told = [getattr(one, "event", "") for one in caplog.records]
    assert told.count("defect") == 2  # of the versions 1 and 3; 4 says no more


async def test_a_watch_that_breaks_off_shows_no_former_state_and_only_changes_are_news() -> None:
    api: Any = Breaking()
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


class Outages:
    """One node; each watch yields an event, lives for 100 s, and breaks off."""

    def __init__(self) -> None:
        self.watched_s: list[float] = []

    async def get(self, path: str, *, accept: str) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": "1"}, "items": [node("1", cordoned=False)]}

    async def watch(self, path: str, version: str, *, accept: str) -> AsyncIterator[dict[str, Any]]:
        self.watched_s.append(now())
        yield {"type": "MODIFIED", "object": node(str(int(version) + 1), cordoned=False)}
        await asyncio.sleep(100)
        raise ClusterUnavailable("the watch broke off")


async def test_a_watch_that_has_worked_is_retried_soon_and_its_next_outage_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api: Any = Outages()
    async with Collection(api, "/api/v1/nodes", lambda one: one).following():
        await asyncio.sleep(8 * (100 + AGAIN_FIRST_S) + 1)
    gaps_s = [later - before - 100 for before, later in pairwise(api.watched_s)]
    assert gaps_s == pytest.approx([AGAIN_FIRST_S] * 8)
    told = [getattr(one, "event", "") for one in caplog.records]
    assert told.count("cluster_unavailable") == 8


class Ending:
    """A pod; the API server ends every watch at once, as while it makes its cache anew."""

    def __init__(self) -> None:
        self.watches = 0

    async def get(self, path: str, *, accept: str = "") -> dict[str, Any]:
        return {"metadata": {"resourceVersion": "1"}, "items": []}

    async def watch(
        self, path: str, version: str, *, accept: str = ""
    ) -> AsyncIterator[dict[str, Any]]:
        self.watches += 1
        nothing: list[dict[str, Any]] = []
        for event in nothing:
            yield event


@pytest.mark.parametrize(
    "follow",
    [
        lambda api: Collection(api, "/api/v1/nodes", lambda one: one)._follow(),
        lambda api: JobsWithPods(api).run(),
    ],
    ids=["collection", "pods of jobs"],
)
async def test_watches_that_end_at_once_are_asked_for_once_a_second(
    follow: Callable[[Any], Coroutine[None, None, None]],
) -> None:
    api = Ending()
    following = asyncio.create_task(follow(api))
    await asyncio.sleep(10)
    following.cancel()
    await asyncio.wait((following,))
    assert 5 <= api.watches <= 11
