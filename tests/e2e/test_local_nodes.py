# SPDX-License-Identifier: Apache-2.0
"""A run's nodes, restarts and end, with a make-believe torchrun that takes no time to start.

Each rank is a world of 1 to itself: times after ``world1`` count from the first step of node-0,
which comes once the others have made theirs. A make-believe torchrun ends when it is told to, so
that no event comes too late for it on a busy machine.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import sys
import threading
import uuid
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import console
import console.local.nodes.node
import console.local.nodes.run
from console.local.launch.launch_line import LaunchLine
from console.local.launch.settings import LocalSettings
from console.local.nodes.events import read_event
from console.local.processes.marked import marked, send_to_all
from console.local.session import Directories, run_session

ROOT = Path(console.__file__).parent.parent
PATIENCE_S = 150.0

pytestmark = pytest.mark.timeout(400)

TORCHRUN = """
import itertools, os, pathlib, subprocess, sys, time
import muster
node, status = os.environ["MUSTER_MEMBER"], int(sys.argv[1])
signs = pathlib.Path(__file__).with_name("signs")
lives = pathlib.Path(os.environ["CHECKPOINT_DIR"], node)
with lives.open("a") as file:
    file.write("x")
if len(sys.argv) > 2 and len(lives.read_text()) > int(sys.argv[2]):
    status = 0
os.environ["RANK"] = node.removeprefix("node-")
worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
while node == "node-0" and any(signs.glob("awaited.*")):
    time.sleep(0.01)
for step in itertools.count(1):
    muster.report_step(step)
    (signs / f"awaited.{node}").unlink(missing_ok=True)
    if (signs / f"end.{node}").exists():
        break
    time.sleep(0.02)
print("the end of", node)
sys.exit(status)
"""


class Drill:
    """Runs make-believe jobs and keeps what they said."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = f"run-{uuid.uuid4().hex}"
        self.screen = io.StringIO()
        self.timeline: dict[str, Any] = {}
        self.lives: dict[str, int] = {}
        self.script = directory / "torchrun.py"
        self.script.write_text(TORCHRUN)
        self.signs = directory / "signs"
        (directory / "report").mkdir()
        (directory / "checkpoints").mkdir()

    async def begin(
        self,
        *arguments: str,
        nodes: int = 2,
        awaited: tuple[str, ...] = ("node-1",),
        events: tuple[str, ...] = (),
        native: bool = True,
        lease_ttl_s: float = 5,
    ) -> asyncio.Task[int]:
        """Begin a job, without sidecars unless asked; its end is its status.

        The first step of node-0 waits for each that is ``awaited``: other nodes, or the test.
        """
        settings = LocalSettings(
            run=self.mark,
            namespace="local",
            job="job",
            line=LaunchLine((sys.executable, str(self.script), *arguments), 1),
            nodes=nodes,
            min_nodes=1,
            max_nodes=4,
            restarts=2,
            lease_ttl_s=lease_ttl_s,
            checkpoints=self.directory / "checkpoints",
            access=None,
            native=native,
        )
        self.screen, self.timeline, self.lives = io.StringIO(), {}, {}
        await asyncio.to_thread(self._await, awaited if nodes > 1 else ())
        self.job = asyncio.create_task(self._run(settings, events), name="the job")
        return self.job

    def _await(self, names: tuple[str, ...]) -> None:
        shutil.rmtree(self.signs, ignore_errors=True)
        self.signs.mkdir()
        for name in names:
            (self.signs / f"awaited.{name}").touch()

    async def _run(self, settings: LocalSettings, events: tuple[str, ...]) -> int:
        places = Directories(self.directory / "logs", self.directory / "report")
        screen = Console(file=self.screen, width=200)
        status = await run_session(
            settings, [read_event(event) for event in events], places, screen
        )
        await asyncio.to_thread(self._read)
        return status

    async def end(self, node: str) -> None:
        """Let the make-believe torchrun of ``node`` end, and any that is started there later."""
        await asyncio.to_thread((self.signs / f"end.{node}").touch)

    async def shown(self, what: str, who: str = "", times: int = 1) -> None:
        """Wait until the screen has shown so many such moments."""

        def seen() -> bool:
            return self.screen.getvalue().count(f" s  {what:<10} {who}") >= times

        await until(lambda: seen() or self.job.done())
        assert seen(), f"the run ended without {what} {who}:\n{self.screen.getvalue()}"

    def _read(self) -> None:
        self.timeline = json.loads((self.directory / "report" / "timeline.json").read_text())
        for path in (self.directory / "checkpoints").iterdir():
            self.lives[path.name] = len(path.read_text())
            path.unlink()

    async def processes(self) -> set[int]:
        """Whatever lives of the present run."""
        return await asyncio.to_thread(marked, self.mark)

    async def until_processes(self, count: int) -> set[int]:
        """Wait until so many live."""
        async with asyncio.timeout(PATIENCE_S):
            while len(found := await self.processes()) != count:  # noqa: ASYNC110 - as in until
                await asyncio.sleep(0.01)
        return found

    def happened(self, *what: str) -> list[tuple[str, str]]:
        moments = self.timeline["moments"]
        return [(m["what"], m["who"]) for m in moments if m["what"] in what]


@pytest.fixture
def drill(tmp_path: Path) -> Drill:
    return Drill(tmp_path)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - another process has no event to give
            await asyncio.sleep(0.01)


async def test_a_job_ends_with_0_when_every_node_does(drill: Drill) -> None:
    running = await drill.begin("0")
    await drill.shown("training")
    await drill.end("node-0")
    await drill.end("node-1")
    assert await running == 0
    assert drill.timeline["status"] == 0
    assert [world["size"] for world in drill.timeline["worlds"]] == [1]
    assert "the end of node-0" in drill.screen.getvalue()
    assert await drill.processes() == set()


async def test_a_failed_launcher_is_started_again_and_the_job_survives_it(drill: Drill) -> None:
    running = await drill.begin("3", "2", nodes=1)
    await drill.end("node-0")
    assert await running == 0
    assert drill.lives["node-0"] == 3
    assert drill.happened("restart", "done") == [
        ("restart", "node-0"),
        ("restart", "node-0"),
        ("done", "node-0"),
    ]


async def test_a_launcher_that_keeps_failing_gives_the_job_its_status(drill: Drill) -> None:
    running = await drill.begin("3", nodes=1)
    await drill.end("node-0")
    assert await running == 3
    assert drill.lives["node-0"] == 3
    assert "the end of node-0" in drill.screen.getvalue()


async def test_a_killed_node_is_replaced_under_its_name(drill: Drill) -> None:
    running = await drill.begin("0", events=("kill:rank1@world1+2s", "add@world1+2.2s"))
    await drill.shown("add", "node-1")
    await drill.end("node-0")
    await drill.shown("done", "node-0")
    await drill.end("node-1")
    assert await running == 0
    assert drill.happened("kill", "add", "done") == [
        ("kill", "node-1"),
        ("add", "node-1"),
        ("done", "node-0"),
        ("done", "node-1"),
    ]
    assert drill.lives["node-1"] == 2


async def test_the_last_node_killed_is_the_end_unless_another_is_to_come(drill: Drill) -> None:
    running = await drill.begin("0", nodes=1, events=("kill:node-0@0.3s",))
    assert await running == 137
    running = await drill.begin("0", nodes=1, events=("kill:node-0@0.3s", "add@0.9s"))
    await drill.shown("add", "node-0")
    await drill.end("node-0")
    assert await running == 0


async def test_what_a_killed_launcher_leaves_behind_ends_and_it_is_restarted(drill: Drill) -> None:
    events = ("kill-launcher:node-1@world1+1s", "kill-container:node-0@world1+1.1s")
    running = await drill.begin("0", awaited=("node-1", "the-test"), events=events)
    before = await drill.until_processes(4)
    await asyncio.to_thread((drill.signs / "awaited.the-test").unlink)
    await drill.shown("restart", times=2)
    assert not before & await drill.processes()
    await drill.end("node-0")
    await drill.end("node-1")
    assert await running == 0
    assert (drill.lives["node-0"], drill.lives["node-1"]) == (2, 2)


async def test_a_stopped_node_is_awaited_only_if_it_is_to_go_on(drill: Drill) -> None:
    running = await drill.begin("0", events=("stop:node-1@world1+1s",))
    await drill.shown("stop", "node-1")
    await drill.end("node-0")
    assert await running == 0
    assert drill.happened("done") == [("done", "node-0")]
    assert await drill.processes() == set()
    events = (
        *("cont:node-1@world1+0.5s", "stop:node-1@world1+1s", "stop:node-1@world1+1.1s"),
        "cont:node-1@world1+6s",
    )
    running = await drill.begin("0", events=events)
    await drill.shown("stop", "node-1", times=2)
    await drill.end("node-0")
    await drill.shown("done", "node-0")
    await drill.end("node-1")
    assert await running == 0
    assert drill.happened("done") == [("done", "node-0"), ("done", "node-1")]


async def test_an_event_that_finds_no_node_does_nothing(drill: Drill) -> None:
    events = ("kill:node-7@0.1s", "kill:rank9@0.2s", "add:node-0@0.3s")
    running = await drill.begin("0", nodes=1, events=events)
    await drill.shown("add", "node-0")
    await drill.end("node-0")
    assert await running == 0
    assert drill.happened("kill", "add") == [
        ("kill", "node-7"),
        ("kill", "rank9"),
        ("add", "node-0"),
    ]
    assert drill.lives["node-0"] == 1


async def test_each_node_has_a_sidecar_and_the_store_tells_who_came_and_went(drill: Drill) -> None:
    events = ("kill:node-1@world1+2s", "add:node-1@world1+3s")
    running = await drill.begin("0", native=False, events=events, lease_ttl_s=30)
    await drill.shown("join", "node-1", times=2)
    await drill.end("node-0")
    await drill.shown("done", "node-0")
    await drill.end("node-1")
    assert await running == 0
    assert sorted(drill.happened("join")) == [
        ("join", "node-0"),
        ("join", "node-1"),
        ("join", "node-1"),
    ]
    assert sorted(drill.happened("leave")) == [("leave", "node-0"), ("leave", "node-1")]
    assert drill.happened("done") == [("done", "node-0"), ("done", "node-1")]


async def test_a_drained_node_is_told_in_time_and_not_replaced(drill: Drill) -> None:
    events = (
        *("kill-sidecar:node-0@world1+2s", "drain:node-1@world1+5s"),
        "kill-launcher:node-0@world1+7s",
    )
    running = await drill.begin("0", native=False, events=events, lease_ttl_s=30)
    await drill.shown("drained", "node-1")
    await drill.shown("restart", "node-0")
    await drill.end("node-0")
    assert await running == 0
    # Which of the two nodes comes first is nobody's promise.
    assert sorted(drill.happened("sidecar", "drained", "restart", "done"), key=itemgetter(1)) == [
        ("sidecar", "node-0"),
        ("restart", "node-0"),
        ("done", "node-0"),
        ("drained", "node-1"),
    ]
    assert drill.lives == {"node-0": 2, "node-1": 1}
    asked, drained = (m for m in drill.timeline["moments"] if m["what"] in ("drain", "drained"))
    assert drained["detail"] == "its container ended with 143"
    # Released, or at the latest with the reserve left.
    assert drained["at_s"] - asked["at_s"] < 25
    assert await drill.processes() == set()


async def test_without_muster_a_drained_node_gets_its_sigterm_and_nothing_else(
    drill: Drill,
) -> None:
    running = await drill.begin("0", events=("drain:node-1@world1+1s",))
    await drill.shown("drained", "node-1")
    await drill.end("node-0")
    assert await running == 0
    assert drill.happened("drained", "done") == [("drained", "node-1"), ("done", "node-0")]


async def test_a_sidecar_that_cannot_start_says_why(drill: Drill) -> None:
    running = await drill.begin("0", nodes=1, native=False, lease_ttl_s=0.001)
    assert await running == 2
    assert "MUSTER_LEASE_TTL" in drill.screen.getvalue()
    assert drill.lives == {}


async def ends_without_waiting_for_stragglers(
    running: asyncio.Task[int], monkeypatch: pytest.MonkeyPatch
) -> int:
    """The status of a run that was told to end, and must not need the time-out for that."""
    monkeypatch.setattr(console.local.nodes.run, "CLOSE_TIMEOUT_S", 4 * PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        return await running


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_ends_the_run_and_leaves_nothing(
    drill: Drill,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    status: int,
    *,
    native: bool,
) -> None:
    event = "stop:node-1@0.3s" if native else "stop:node-1@world1+1s"
    # One that is frozen so soon may make no step that node-0 could wait for.
    awaited = () if native else ("node-1",)
    running = await drill.begin("0", awaited=awaited, events=(event,), native=native)
    await drill.shown("stop", "node-1")
    await drill.shown("training")
    os.kill(os.getpid(), number)
    assert await ends_without_waiting_for_stragglers(running, monkeypatch) == status
    assert await drill.processes() == set()


async def test_a_node_that_is_being_frozen_while_the_run_ends_does_not_stay_frozen(
    drill: Drill, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, frozen, let_go = threading.Event(), threading.Event(), threading.Event()
    interrupt = console.local.nodes.node.LocalNode.interrupt

    async def noted(node: console.local.nodes.node.LocalNode) -> None:
        asked.set()
        await interrupt(node)

    def send_slowly(find: Callable[[], set[int]], number: signal.Signals) -> None:
        """As on a machine with many processes: whoever does not wait for the other is overtaken."""
        if number == signal.SIGSTOP:
            asked.wait(PATIENCE_S)
            let_go.wait(5)
        send_to_all(find, number)
        if number == signal.SIGSTOP:
            frozen.set()
        else:
            let_go.set()
            frozen.wait(5)

    monkeypatch.setattr(console.local.nodes.node.LocalNode, "interrupt", noted)
    monkeypatch.setattr(console.local.nodes.node, "send_to_all", send_slowly)
    running = await drill.begin("0", nodes=1, events=("stop:node-0@world1+1s",))
    await drill.shown("stop", "node-0")
    assert not frozen.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await ends_without_waiting_for_stragglers(running, monkeypatch) == 143
    assert frozen.is_set()
    assert await drill.processes() == set()
