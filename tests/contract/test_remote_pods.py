# SPDX-License-Identifier: Apache-2.0
"""Pods of a job, commands in their sidecars and their logs, before an API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from console.remote.pods import JobPod, jobs_in, pods_of
from console.remote.sidecar import ask
from controller.cluster.api import LOG_LINE_MAX, ClusterApi
from controller.cluster.executed import Ran
from rdzv.errors import ClusterRefused, ClusterUnavailable
from tests.support.cluster_api import FakeApi
from tests.support.containers import Answer, Asked
from tests.support.waiting import DEADLINE_S

LONG_S = 120.0


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeApi]:
    async with FakeApi(tmp_path) as api:
        for job, names in {"digits": ("digits-0", "digits-1"), "other": ("other-0",)}.items():
            for name in names:
                await api.put(f"/api/v1/namespaces/team/pods/{name}", pod(job))
        yield api


@pytest.fixture
async def api(fake: FakeApi) -> AsyncIterator[ClusterApi]:
    async with ClusterApi(fake.access) as opened:
        yield opened


def pod(job: str) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "team", "labels": {"muster.dev/job": job}},
        "spec": {"initContainers": [{"name": "muster", "env": []}], "containers": []},
        "status": {
            "phase": "Running",
            "initContainerStatuses": [{"name": "muster", "state": {"running": {}}}],
        },
    }


def names(pods: list[JobPod]) -> list[str]:
    return [one.name for one in pods]


async def test_pods_are_those_of_the_job(api: ClusterApi) -> None:
    assert names(await pods_of(api, "team", "digits")) == ["digits-0", "digits-1"]
    assert await pods_of(api, "elsewhere", "digits") == []
    jobs = {key: names(pods) for key, pods in (await jobs_in(api, None)).items()}
    assert jobs == {("team", "digits"): ["digits-0", "digits-1"], ("team", "other"): ["other-0"]}


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


async def test_output_that_was_shown_is_not_begun_again_elsewhere(
    fake: FakeApi, api: ClusterApi
) -> None:
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


async def test_a_refused_command_has_the_api_servers_own_words(
    fake: FakeApi, api: ClusterApi
) -> None:
    fake.refused.add("/api/v1/namespaces/team/pods/digits-0/exec")
    with pytest.raises(ClusterRefused, match="403: no rights") as refused:
        await api.run_in("team", "digits-0", "muster", ["true"], timeout_s=LONG_S)
    assert refused.value.status == 403
    with pytest.raises(ClusterRefused, match="404") as gone:
        await api.run_in("team", "digits-9", "muster", ["true"], timeout_s=LONG_S)
    assert gone.value.status == 404
    assert fake.containers.asked == []


async def test_a_command_that_takes_too_long_is_unavailable(fake: FakeApi, api: ClusterApi) -> None:
    async def execute(asked: Asked) -> Answer:
        await asyncio.Event().wait()
        return None

    fake.containers.execute = execute
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


async def test_a_followed_log_ends_with_its_container(fake: FakeApi, api: ClusterApi) -> None:
    await fake.containers.log("team", "digits-0", "trainer", "first")
    seen = []
    async with asyncio.timeout(DEADLINE_S):
        async for line in api.log_lines("team", "digits-0", "trainer", follow=True):
            seen.append(line)
            if line == "first":
                await fake.containers.log("team", "digits-0", "trainer", "second")
                await fake.containers.end_log("team", "digits-0", "trainer")
    assert seen == ["first", "second"]


async def test_a_line_that_never_ends_comes_in_pieces(fake: FakeApi, api: ClusterApi) -> None:
    await fake.containers.log("team", "digits-0", "trainer", "x" * (2 * LOG_LINE_MAX + 7), "next")
    lines = [line async for line in api.log_lines("team", "digits-0", "trainer")]
    assert [len(line) for line in lines[:-1]] == [LOG_LINE_MAX, LOG_LINE_MAX, 7]
    assert lines[-1] == "next"
