# SPDX-License-Identifier: Apache-2.0
"""``muster logs`` before an API server: pods, containers and connections change, rights lack."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from console.logs import following, sources
from console.logs.following import JobLogs
from console.logs.lines import Line
from console.logs.printing import Pages, PrintedLine, Selection
from console.logs.sources import LoggedPod, Reader, logged_pod
from controller.cluster.api import ClusterApi
from controller.cluster.executed import Ran
from rdzv.errors import ClusterRefused, ClusterUnavailable, JobNotFound
from tests.support.cluster_api import FakeApi
from tests.support.containers import BEGAN, Asked
from tests.support.shown import Shown
from tests.support.waiting import DEADLINE_S

PODS = "/api/v1/namespaces/team/pods"
AT_S = BEGAN.timestamp()


def pod(
    name: str, state: str = "running", *, phase: str = "Running", restarts: int = 0
) -> dict[str, Any]:
    last = {"terminated": {"exitCode": 1, "reason": "Error"}} if restarts else {}
    trainer = {"name": "trainer", "state": {state: {}}, "restartCount": restarts, "lastState": last}
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "namespace": "team",
            "labels": {"muster.dev/job": "digits"},
        },
        "spec": {"initContainers": [{"name": "muster"}], "containers": [{"name": "trainer"}]},
        "status": {
            "phase": phase,
            "containerStatuses": [trainer],
            "initContainerStatuses": [{"name": "muster", "state": {"running": {}}}],
        },
    }


def world(revision: int, number: int, members: Sequence[str], at_s: float) -> dict[str, Any]:
    details = {"round": number, "nodes": len(members), "members": list(members)}
    return {
        "revision": revision,
        "at_unix_s": at_s,
        "what": "round",
        "member": members[0],
        "why": "",
        "details": details,
    }


class Sidecars:
    """What the sidecars answer. ``news``: entries that one who follows the history gets."""

    def __init__(self, *history: dict[str, Any]) -> None:
        self.history = list(history)
        self.news: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def answer(self, asked: Asked) -> Ran:
        words = asked.argv
        if "status" in words:
            return Ran(0, json.dumps({"members": [], "runs": []}), "")
        told = "".join(f"{json.dumps(one)}\n" for one in self.history)
        if "--watch" not in words:
            return Ran(0, told, "")
        await asked.write(False, told)
        while True:
            one = await self.news.get()
            self.history.append(one)
            await asked.write(False, f"{json.dumps(one)}\n")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PAUSE_S", 0.01)
    monkeypatch.setattr(following, "OVER_S", 0.5)


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeApi]:
    async with FakeApi(tmp_path) as api:
        for name in ("a", "b"):
            await api.put(f"{PODS}/{name}", pod(name))
        yield api


class Output:
    """What was printed and noted; ``until`` waits for a line."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.notes: list[str] = []
        self._more = asyncio.Event()

    def print(self, one: PrintedLine) -> None:
        self.lines.append(str(one))
        self._more.set()

    async def until(self, line: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while line not in self.lines:
                self._more.clear()
                await self._more.wait()


async def shown(
    fake: FakeApi, output: Output, *, follow: bool = False, wanted: Selection | None = None
) -> None:
    async with ClusterApi(fake.access, "team") as api:
        pages = Pages(wanted or Selection())
        await JobLogs(api, "digits", pages, output.print, output.notes.append).show(follow=follow)


async def test_lines_of_all_pods_are_in_order_with_their_ranks(fake: FakeApi) -> None:
    fake.containers.execute = Sidecars(world(5, 0, ["b", "a"], AT_S)).answer
    for name in ("a", "b"):
        await fake.containers.log("team", name, "trainer", *(f"{name}{at}" for at in range(3)))
    output = Output()
    await shown(fake, output)
    assert output.lines[0] == "── world of 2 nodes: b, a (round 0) ──"
    assert [sorted(output.lines[at : at + 2]) for at in (1, 3, 5)] == [
        [f"[0] b{at}", f"[1] a{at}"] for at in range(3)
    ]
    assert output.notes == []


async def test_a_rank_whose_pod_is_gone_is_said_to_be(fake: FakeApi) -> None:
    fake.containers.execute = Sidecars(world(5, 0, ["b", "c", "a"], AT_S)).answer
    for name in ("a", "b"):
        await fake.containers.log("team", name, "trainer", name)
    for wanted, notes in (
        (Selection(1, 0), ["the pod that was c, [1] in world 0, is gone, and its log with it"]),
        (Selection(1), ["the pod that was c, [1] in world 0, is gone, and its log with it"]),
        (Selection(2, 0), []),
        (Selection(), []),
    ):
        output = Output()
        await shown(fake, output, wanted=wanted)
        assert output.notes == notes


async def test_a_later_pod_of_a_name_has_not_the_earlier_ones_lines(fake: FakeApi) -> None:
    fake.containers.execute = Sidecars(world(5, 0, ["a", "b"], AT_S)).answer
    for created, notes in (
        (BEGAN - timedelta(seconds=3), 0),
        (BEGAN + timedelta(seconds=9), 0),  # by a clock that is ahead
        (BEGAN + timedelta(minutes=2), 1),
    ):
        later = pod("b")
        later["metadata"]["creationTimestamp"] = f"{created:%Y-%m-%dT%H:%M:%SZ}"
        await fake.put(f"{PODS}/b", later)
        output = Output()
        await shown(fake, output, wanted=Selection(1, 0))
        assert len(output.notes) == notes
        assert all("that was b, [1] in world 0" in one for one in output.notes)


async def test_a_job_without_pods_is_unknown(fake: FakeApi) -> None:
    async with ClusterApi(fake.access, "elsewhere") as api:
        logs = JobLogs(api, "digits", Pages(), lambda _: None, lambda _: None)
        with pytest.raises(JobNotFound, match="namespace elsewhere has no pod of a job digits"):
            await logs.show(follow=True)


async def test_who_may_read_logs_and_run_nothing_gets_lines_by_pod(fake: FakeApi) -> None:
    fake.refused |= {f"{PODS}/{name}/exec" for name in ("a", "b")}
    await fake.containers.log("team", "a", "trainer", "hello")
    output = Output()
    await shown(fake, output)
    assert output.lines == ["[a] hello"]
    (note,) = output.notes
    assert "ranks and worlds are not known, lines are by pod" in note
    assert "no rights" in note


async def test_who_may_not_read_logs_gets_the_api_servers_sentence(fake: FakeApi) -> None:
    fake.refused.add(f"{PODS}/b/log")
    with pytest.raises(ClusterRefused, match="no rights"):
        await shown(fake, Output(), follow=True)
    fake.refused.add(PODS)
    with pytest.raises(ClusterRefused, match="no rights"):
        await shown(fake, Output())


async def test_it_follows_over_a_pod_that_goes_and_one_that_comes(fake: FakeApi) -> None:
    sidecars = Sidecars(world(5, 0, ["a", "b"], AT_S))
    fake.containers.execute = sidecars.answer
    await fake.containers.log("team", "a", "trainer", "a0")
    output = Output()
    task = asyncio.create_task(shown(fake, output, follow=True))
    await output.until("[0] a0")
    await fake.containers.log("team", "b", "trainer", "b0", "b1")
    await output.until("[1] b1")
    await fake.containers.end_log("team", "b", "trainer")
    await fake.remove(f"{PODS}/b")
    await fake.put(f"{PODS}/c", pod("c", "waiting", phase="Pending"))
    await sidecars.news.put(world(9, 1, ["c", "a"], AT_S + 1.5))
    await output.until("── world 2 → 2: b left, c joined (round 1) ──")
    await fake.containers.log("team", "c", "trainer", "c0", "c1", "c2")
    await fake.put(f"{PODS}/c", pod("c"))
    await output.until("[0] c2")
    await fake.containers.log("team", "a", "trainer", "a1", "a2")
    await output.until("[1] a2")
    for name in ("a", "c"):
        await fake.containers.end_log("team", name, "trainer")
        await fake.put(f"{PODS}/{name}", pod(name, "terminated", phase="Succeeded"))
    async with asyncio.timeout(DEADLINE_S):
        await task
    assert len(output.lines) == len(set(output.lines))


class Logs:
    """Logs of a container, in the place of the API server: one list of lines for each request.

    An error in it is raised there.
    """

    def __init__(self, *answers: Sequence[str | Exception]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    async def log_lines(self, *_: str, **how: Any) -> AsyncIterator[str]:
        self.asked.append(how)
        if not self.answers:
            await asyncio.Event().wait()
        for one in self.answers.pop(0):
            if isinstance(one, Exception):
                raise one
            yield one


def at(second: int, text: str) -> str:
    return f"2026-01-01T00:00:{second:02}Z {text}"


async def read(logs: Logs, pods: Shown, lines: int, reader: Reader | None = None) -> list[str]:
    """The first lines that are followed, or all up to the container's end."""
    reader = reader or Reader(logs, "team", lambda _: None)  # type: ignore[arg-type]
    found: list[str] = []
    followed: AsyncIterator[Line] = reader.follow(pods, ("uid-a", "trainer"))  # type: ignore[arg-type]
    with suppress(TimeoutError):
        async with asyncio.timeout(DEADLINE_S), aclosing(followed):  # type: ignore[type-var]
            async for line in followed:
                found.append(line.text)
                if len(found) == lines:
                    break
    return found


def seen(**how: Any) -> LoggedPod:
    return logged_pod(pod("a", **how), with_sidecar=False)


async def test_no_line_comes_twice_after_a_connection_broke() -> None:
    broken = ClusterUnavailable("the log broke off")
    logs = Logs([at(1, "one"), at(2, "two"), broken], [at(1, "one"), at(2, "two"), at(3, "three")])
    assert await read(logs, Shown(a=seen()), 3) == ["one", "two", "three"]
    first, second = logs.asked
    assert first["since_s"] is None
    assert second["since_s"] >= sources.OVERLAP_S


async def test_pieces_of_a_long_line_are_all_there() -> None:
    logs = Logs([at(1, "x" * 10), "y" * 10, at(2, "z")])
    assert await read(logs, Shown(a=seen()), 3) == ["x" * 10, "y" * 10, "z"]


async def test_a_restarted_container_is_read_from_where_the_one_before_was() -> None:
    pods = Shown(a=seen())
    logs = Logs([at(1, "one")], [at(1, "one"), at(2, "last words")], [at(3, "again")])
    reader = Reader(logs, "team", lambda _: None)  # type: ignore[arg-type]
    assert await read(logs, pods, 1, reader) == ["one"]
    await pods.show(a=seen(restarts=1))
    assert await read(logs, pods, 2, reader) == ["last words", "again"]
    assert [bool(how["previous"]) for how in logs.asked] == [False, True, False]


async def test_the_past_has_the_container_before_too() -> None:
    logs = Logs([at(1, "before")], [at(2, "now")])
    reader = Reader(logs, "team", lambda _: None, tail=7)  # type: ignore[arg-type]
    (container,) = seen(restarts=1).containers
    assert [line.text async for line in reader.past(container)] == ["before", "now"]
    assert [how["tail"] for how in logs.asked] == [7, 7]


async def test_the_past_is_read_again_after_a_connection_broke() -> None:
    broken = ClusterUnavailable("the log broke off")
    logs = Logs([at(1, "one"), broken], [at(1, "one"), at(2, "two")])
    reader = Reader(logs, "team", lambda _: None)  # type: ignore[arg-type]
    (container,) = seen().containers
    assert [line.text async for line in reader.past(container)] == ["one", "two"]
    assert not reader.cut


async def test_lines_that_cannot_be_read_are_no_success(fake: FakeApi) -> None:
    fake.containers.execute = Sidecars(world(5, 0, ["a", "b"], AT_S)).answer
    await fake.containers.log("team", "a", "trainer", "a0")
    fake.busy.add(f"{PODS}/b/log")
    output = Output()
    with pytest.raises(ClusterUnavailable, match="lines of b are missing"):
        await shown(fake, output)
    assert "[0] a0" in output.lines
