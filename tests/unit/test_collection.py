# SPDX-License-Identifier: Apache-2.0
"""What is kept of a kind of objects while its watch breaks off and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from controller.cluster.collection import Collection
from rdzv.errors import ClusterUnavailable

pytestmark = pytest.mark.virtual


class Breaking:
    """One node that is cordoned after a report; each watch breaks off after all that there is."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def get(self, path: str) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": "1"}, "items": [node("1", cordoned=False)]}

    async def watch(self, path: str, version: str) -> AsyncIterator[dict[str, Any]]:
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
