# SPDX-License-Identifier: Apache-2.0
"""Commands that go on in a sidecar: what it writes without end, and its silence, are said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from console.job.rows import JobLine
from console.job.top import TopScene
from console.logs.sources import follow_history
from console.remote import get, passing, sidecar, top
from console.remote.get import Scope
from console.remote.passing import Passed
from console.remote.pods import pods_of
from console.whereabouts import ClusterOptions
from controller.cluster.api import ClusterApi
from controller.cluster.executed import Ran
from rdzv.errors import ClusterUnavailable
from tests.support.cluster_api import FakeApi
from tests.support.containers import Answer, Asked
from tests.support.waiting import DEADLINE_S

HERE = ClusterOptions(namespace="team")
STATUS = {"job": "digits", "verdict": {"state": "training", "why": ""}, "members": []}
TOO_LONG = "of pod digits-0 gave no answer: it wrote a line of more than 1 MiB"


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApi]:
    async with FakeApi(tmp_path) as api:

        @asynccontextmanager
        async def opened(options: ClusterOptions) -> AsyncIterator[ClusterApi]:
            async with ClusterApi(api.access, options.namespace) as one:
                yield one

        monkeypatch.setattr(top, "cluster", opened)
        monkeypatch.setattr(passing, "cluster", opened)
        monkeypatch.setattr(sidecar, "AGAIN_S", 0.01)
        await api.put("/api/v1/namespaces/team/pods/digits-0", pod())
        yield api


def pod() -> dict[str, Any]:
    return {
        "metadata": {"namespace": "team", "labels": {"muster.dev/job": "digits"}},
        "spec": {"initContainers": [{"name": "muster"}], "containers": []},
        "status": {
            "phase": "Running",
            "initContainerStatuses": [{"name": "muster", "state": {"running": {}}}],
        },
    }


async def endless(asked: Asked) -> Answer:
    """A sidecar whose line never ends; it stops once that is more than anybody would keep."""
    for _ in range(40):
        await asked.write(False, "x" * 2**16)
    await asyncio.Event().wait()
    return None


async def silent(asked: Asked) -> Answer:
    await asyncio.Event().wait()
    return None


async def garbage(asked: Asked) -> Answer:
    await asked.write(False, "[" * 100_000 + "\n")
    return await silent(asked)


def once(then: Answer) -> Callable[[Asked], Awaitable[Answer]]:
    """A sidecar that says its state to the first command, and answers the others by ``then``."""
    said: list[Asked] = []

    async def execute(asked: Asked) -> Answer:
        said.append(asked)
        if len(said) > 1:
            return then
        await asked.write(False, json.dumps(STATUS) + "\n")
        return Ran(143, "", "")

    return execute


async def row_of_get(fake: FakeApi, holds: Callable[[JobLine], bool]) -> JobLine:
    async with ClusterApi(fake.access, "team") as api:
        rows = get._states(api, Scope("team", "digits"), 0.05)
        async with asyncio.timeout(DEADLINE_S), aclosing(rows):  # type: ignore[type-var]
            async for (row,) in rows:
                if holds(row):
                    return row
    raise AssertionError


async def row_of_top(_fake: FakeApi, holds: Callable[[JobLine], bool]) -> JobLine:
    def row(scene: TopScene) -> JobLine:
        return scene.line(0.0)

    scenes = top.scenes(HERE, "digits")
    async with asyncio.timeout(DEADLINE_S), aclosing(scenes):  # type: ignore[type-var]
        async for scene in scenes:
            if holds(row(scene)):
                return row(scene)
    raise AssertionError


VIEWS = pytest.mark.parametrize("row_of", [row_of_get, row_of_top])
RowOf = Callable[[FakeApi, Callable[[JobLine], bool]], Awaitable[JobLine]]


@VIEWS
async def test_a_line_without_an_end_is_said_in_the_row(fake: FakeApi, row_of: RowOf) -> None:
    fake.containers.execute = endless
    row = await row_of(fake, lambda row: "MiB" in row.why)
    assert row.why.endswith(TOO_LONG)


@VIEWS
async def test_a_silent_sidecar_is_said_in_the_row(
    fake: FakeApi, row_of: RowOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar, "SILENCE_S", 0.2)
    fake.containers.execute = silent
    row = await row_of(fake, lambda row: "said nothing" in row.why)
    assert row.why == "its sidecars have said nothing for 0.2 s"


@VIEWS
async def test_a_source_that_ends_leaves_its_last_words_and_says_so(
    fake: FakeApi, row_of: RowOf
) -> None:
    fake.containers.execute = once(Ran(69, "", "muster: cannot reach the store\nmore\n"))
    row = await row_of(fake, lambda row: "store" in row.why)
    assert row.phase == "training"
    assert row.why == "not up to date: cannot reach the store"


@VIEWS
async def test_what_cannot_be_read_is_said_in_the_row(fake: FakeApi, row_of: RowOf) -> None:
    fake.containers.execute = garbage
    await row_of(fake, lambda row: "what its sidecar says cannot be read" in row.why)


async def test_a_sidecar_that_falls_silent_is_asked_again_without_a_word(
    fake: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def execute(asked: Asked) -> Answer:
        state = "training" if len(fake.containers.asked) < 3 else "saving"
        await asked.write(False, json.dumps({**STATUS, "verdict": {"state": state}}) + "\n")
        return await silent(asked)

    fake.containers.execute = execute
    monkeypatch.setattr(sidecar, "SILENCE_S", 0.2)
    whys = set()

    def is_saving(row: JobLine) -> bool:
        whys.add(row.why)
        return row.phase == "saving"

    await row_of_get(fake, is_saving)
    assert whys <= {"", "no sidecar has answered yet"}


async def test_an_api_server_that_goes_is_said_in_the_row(fake: FakeApi) -> None:
    async def execute(asked: Asked) -> Answer:
        await asked.write(False, json.dumps(STATUS) + "\n")
        fake.busy.add("/api/v1/namespaces/team/pods")
        return await silent(asked)

    fake.containers.execute = execute
    row = await row_of_get(fake, lambda row: "busy" in row.why)
    assert row.why.startswith("not up to date: the API server cannot do GET")


@pytest.mark.parametrize(
    ("execute", "why"),
    [(endless, TOO_LONG), (lambda asked: Ran(69, "", "muster: no store\n"), "no store")],
)
async def test_who_follows_the_history_hears_why_none_comes(
    fake: FakeApi, execute: Callable[[Asked], Any], why: str
) -> None:
    fake.containers.execute = execute
    failed: asyncio.Queue[str] = asyncio.Queue()
    async with ClusterApi(fake.access, "team") as api, asyncio.timeout(DEADLINE_S):
        pods = await pods_of(api, "team", "digits")
        following = asyncio.create_task(
            follow_history(api, lambda: pods, lambda entries: None, failed.put_nowait)
        )
        try:
            assert (await failed.get()).endswith(why)
        finally:
            following.cancel()


@pytest.mark.parametrize(
    ("passed", "why"),
    [
        (Passed("history", ("history", "--watch"), follows=True), "a line of more than 1 MiB"),
        (Passed("status", ("status", "--json"), as_json=True), "more than 2 MiB"),
    ],
)
async def test_what_is_kept_of_a_command_has_a_bound(
    fake: FakeApi, passed: Passed, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passing, "GIVE_UP_S", 0.0)
    monkeypatch.setattr(sidecar, "KEPT_MOST", 2 * 2**20)
    fake.containers.execute = endless
    with pytest.raises(ClusterUnavailable, match=why):
        async with asyncio.timeout(DEADLINE_S):
            await passing._pass_on(HERE, "digits", passed)
