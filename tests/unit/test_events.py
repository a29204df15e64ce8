# SPDX-License-Identifier: Apache-2.0
"""Events that are owed: whatever pods have written into them, and however many there are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controller.cluster import events as cluster_events
from controller.cluster.events import Events
from rdzv.errors import ClusterRefused

pytestmark = pytest.mark.virtual


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


async def test_what_no_utf_8_can_say_is_told_as_well() -> None:
    api = Creating()
    events = told(api)
    events.say(pod("a"), "Draining", "because \ud800 of it")
    await events.write()
    assert api.made == ["a"]


async def test_a_place_that_no_utf_8_can_say_ends_nothing() -> None:
    """The webhook is told of it by whoever reaches its port."""
    api = Creating()
    events = told(api)
    events.say({**pod("a"), "namespace": "\ud800"}, "NotInjected", "for a reason")
    events.say({**pod("\ud800"), "uid": "other"}, "NotInjected", "for a reason")
    await events.write()
    assert api.paths == ["/api/v1/namespaces/%3F/events", "/api/v1/namespaces/team/events"]


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


async def test_whatever_a_pod_names_as_its_maker_is_told_below_events() -> None:
    """Anybody in the cluster may ask the webhook, and name any namespace and object."""
    api = Creating()
    events = told(api)
    about = {**pod("../../secrets/x?y="), "namespace": "kube-system/secrets?x="}
    for message in ("first", "second"):
        events.say(about, "NotInjected", message, revision=len(message))
        await events.write()
        await asyncio.sleep(60)
    assert [path.count("/") for path in api.paths] == [5, 6]
    assert not any("?" in path for path in api.paths)


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
