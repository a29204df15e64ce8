# SPDX-License-Identifier: Apache-2.0
"""Commands in sidecars before an API server: asked once, followed, and the logs of pods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from console.job.rows import JobLine
from console.job.top import TopScene
from console.logs.sources import follow_history
from console.remote import get, passing, sidecar
from console.remote.get import Scope
from console.remote.passing import Passed
from console.remote.pods import JobPod, pods_of
from console.remote.sidecar import FollowedCommand, ask
from console.whereabouts import ClusterOptions
from controller.cluster.api import LOG_LINE_MAX, ClusterApi
from controller.cluster.executed import Ran, Wrote
from rdzv.errors import ClusterRefused, ClusterUnavailable
from tests.support.cluster_api import FakeApi
from tests.support.containers import Answer, Asked
from tests.support.tasks import beside
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

        monkeypatch.setattr(get, "cluster", opened)
        monkeypatch.setattr(passing, "cluster", opened)
        monkeypatch.setattr(sidecar, "AGAIN_S", 0.01)
        await api.put("/api/v1/namespaces/team/pods/digits-0", pod())
        yield api


@pytest.fixture
async def api(fake: FakeApi) -> AsyncIterator[ClusterApi]:
    """A client of the API server, which has a second pod of the job."""
    await fake.put("/api/v1/namespaces/team/pods/digits-1", pod())
    async with ClusterApi(fake.access) as opened:
        yield opened


def pod() -> dict[str, Any]:
    return {
        "metadata": {"namespace": "team", "labels": {"muster.dev/job": "digits"}},
        "spec": {"initContainers": [{"name": "muster", "env": []}], "containers": []},
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

    scenes = get.scenes(HERE, "digits")
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
async def test_a_source_that_ends_leaves_its_last_words(fake: FakeApi, row_of: RowOf) -> None:
    fake.containers.execute = once(Ran(69, "", "muster: cannot reach the store\nmore\n"))
    row = await row_of(fake, lambda row: "store" in row.why)
    assert row.phase == "training"
    assert row.why == "not up to date: cannot reach the store"


@VIEWS
async def test_what_cannot_be_read_is_said_in_the_row(fake: FakeApi, row_of: RowOf) -> None:
    fake.containers.execute = garbage
    await row_of(fake, lambda row: "what its sidecar says cannot be read" in row.why)


@pytest.mark.virtual
async def test_a_sidecar_that_falls_silent_is_asked_again_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: asyncio.Queue[str] = asyncio.Queue()
    whys: list[str] = []

    async def answer(*_: object, wrote: Wrote, **__: object) -> None:
        wrote(False, f"at {asyncio.get_running_loop().time():g}\n")
        await asyncio.Event().wait()

    monkeypatch.setattr(sidecar, "ask", answer)
    command = FollowedCommand("muster get", ("status",), tuple, said.put_nowait, whys.append)
    began_s = asyncio.get_running_loop().time()
    async with beside(command.run(cast(ClusterApi, None))):
        again_s = began_s + sidecar.SILENCE_S + sidecar.AGAIN_S
        assert [await said.get() for _ in range(2)] == [f"at {began_s:g}", f"at {again_s:g}"]
    assert whys == []


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


LONG_S = 120.0


async def test_a_sidecar_answers_with_its_status_and_both_streams(
    fake: FakeApi, api: ClusterApi
) -> None:
    fake.containers.execute = lambda asked: Ran(66, "→ out", "no job")
    pods = await pods_of(api, "team", "digits")
    assert await ask(api, pods, ["get", "a b&c"], timeout_s=LONG_S) == Ran(66, "→ out", "no job")
    (asked,) = fake.containers.asked
    assert (asked.pod, asked.container, asked.argv[-2:]) == ("digits-0", "muster", ["get", "a b&c"])


async def test_the_next_pod_is_asked_if_one_does_not_answer(fake: FakeApi, api: ClusterApi) -> None:
    def execute(asked: Asked) -> Answer:
        return Ran(0, "here", "") if asked.pod == "digits-1" else None

    fake.containers.execute = execute
    pods = await pods_of(api, "team", "digits")
    assert await ask(api, pods, ["get"], timeout_s=LONG_S) == Ran(0, "here", "")


async def test_shown_output_is_not_begun_again_elsewhere(fake: FakeApi, api: ClusterApi) -> None:
    heard = []

    async def execute(asked: Asked) -> Answer:
        await asked.write(False, "half")
        await asked.write(True, "")
        return "the container was lost"

    fake.containers.execute = execute
    pods = await pods_of(api, "team", "digits")
    with pytest.raises(ClusterUnavailable, match="the container was lost"):
        await ask(api, pods, ["get"], timeout_s=LONG_S, wrote=lambda _, text: heard.append(text))
    assert heard == ["half"]


async def test_without_a_running_sidecar_the_sentence_says_why(api: ClusterApi) -> None:
    waits = JobPod("team", "digits-0", "u", phase="Pending", why_pending="no GPU is free")
    with pytest.raises(ClusterUnavailable, match="digits-0: no GPU is free"):
        await ask(api, [waits], ["get"], timeout_s=LONG_S)
    with pytest.raises(ClusterUnavailable, match="the job has no pods"):
        await ask(api, [], ["get"], timeout_s=LONG_S)


async def test_a_refusal_has_the_api_servers_own_words(fake: FakeApi, api: ClusterApi) -> None:
    fake.refused.add("/api/v1/namespaces/team/pods/digits-0/exec")
    with pytest.raises(ClusterRefused, match="403: no rights") as refused:
        await api.run_in("team", "digits-0", "muster", ["true"], timeout_s=LONG_S)
    assert refused.value.status == 403
    with pytest.raises(ClusterRefused, match="404") as gone:
        await api.run_in("team", "digits-9", "muster", ["true"], timeout_s=LONG_S)
    assert gone.value.status == 404
    assert fake.containers.asked == []


async def test_a_command_that_takes_too_long_is_unavailable(fake: FakeApi, api: ClusterApi) -> None:
    fake.containers.execute = silent
    with pytest.raises(ClusterUnavailable, match=r"longer than 0\.5 s"):
        await api.run_in("team", "digits-0", "muster", ["true"], timeout_s=0.5)


async def test_log_lines(fake: FakeApi, api: ClusterApi) -> None:
    await fake.containers.log("team", "digits-0", "trainer", "a", "b", "c")
    await fake.containers.log("team", "digits-0", "trainer", "before", previous=True)

    async def read(**how: Any) -> list[str]:
        return [line async for line in api.log_lines("team", "digits-0", "trainer", **how)]

    assert await read() == ["a", "b", "c"]
    assert await read(tail=1) == ["c"]
    assert await read(previous=True) == ["before"]
    assert await read(tail=1, timestamps=True) == ["2026-01-01T00:00:02.000000000Z c"]
    with pytest.raises(ClusterRefused, match="is waiting to start"):
        [line async for line in api.log_lines("team", "digits-1", "trainer")]


async def test_a_line_that_never_ends_comes_in_pieces(fake: FakeApi, api: ClusterApi) -> None:
    await fake.containers.log("team", "digits-0", "trainer", "x" * (2 * LOG_LINE_MAX + 7), "next")
    lines = [line async for line in api.log_lines("team", "digits-0", "trainer")]
    assert [len(line) for line in lines[:-1]] == [LOG_LINE_MAX, LOG_LINE_MAX, 7]
    assert lines[-1] == "next"
