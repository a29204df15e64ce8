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
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import console
import console.local.node
import console.local.run
from console.local.launch_line import LaunchLine
from console.local.processes import marked, send_to_all
from console.local.session import Directories, run_session
from console.local.settings import LocalSettings, read_event
from launcher_shim.exit_status import EXIT_UNAVAILABLE
from rdzv.records.policy import JobPolicy

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
        min_nodes: int = 1,
        awaited: tuple[str, ...] = ("node-1",),
        events: tuple[str, ...] = (),
        native: bool = True,
        lease_ttl_s: float = 5,
        compares: bool = False,
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
            policy=JobPolicy(min_nodes, 4, gather_s=2.0),
            restarts=2,
            lease_ttl_s=lease_ttl_s,
            checkpoints=self.directory / "checkpoints",
            access=None,
            native=native,
        )
        self.screen, self.timeline, self.lives = io.StringIO(), {}, {}
        await asyncio.to_thread(self._await, awaited if nodes > 1 else ())
        self.job = asyncio.create_task(self._run(settings, events, compares), name="the job")
        return self.job

    def _await(self, names: tuple[str, ...]) -> None:
        shutil.rmtree(self.signs, ignore_errors=True)
        self.signs.mkdir()
        for name in names:
            (self.signs / f"awaited.{name}").touch()

    async def _run(self, settings: LocalSettings, events: tuple[str, ...], compares: bool) -> int:
        places = Directories(self.directory / "logs", self.directory / "report")
        screen = Console(file=self.screen, width=200)
        status = await run_session(
            settings, [read_event(event) for event in events], places, screen, compares=compares
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

    def write_sidecar_log(self, node: str, line: str) -> None:
        """What a sidecar of ``node`` has said."""
        log = self.directory / "logs" / node / "sidecar.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"{line}\n")

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

    def happened(self, *kinds: str) -> dict[str, str]:
        """The moments of these kinds of each node, in order."""
        found: dict[str, list[str]] = defaultdict(list)
        for moment in self.timeline["moments"]:
            if moment["what"] in kinds:
                found[moment["who"]].append(moment["what"])
        return {who: " ".join(moments) for who, moments in found.items()}


@pytest.fixture
def drill(tmp_path: Path) -> Drill:
    return Drill(tmp_path)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - another process has no event to give
            await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Story:
    """A run, what is waited for and done while it lasts, and what becomes of it.

    ``steps`` are "shown WHAT [NODE]" and "end NODE". ``happened`` has for each node, in order, the
    moments of the kinds that are named for any. ``lives``: how often a node's command was started.
    """

    steps: tuple[str, ...]
    arguments: tuple[str, ...] = ("0",)
    status: int = 0
    happened: dict[str, str] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)
    says: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


SIDECARS = {"native": False, "lease_ttl_s": 30}
STORIES = {
    "every node ends": Story(
        steps=("shown training", "end node-0", "end node-1"),
        happened={"node-0": "done", "node-1": "done"},
        says="the end of node-0",
    ),
    "a launcher fails twice and is started again": Story(
        arguments=("3", "2"),
        settings={"nodes": 1},
        steps=("end node-0",),
        happened={"node-0": "restart restart done"},
        lives={"node-0": 3},
    ),
    "a launcher that keeps failing gives the job its status": Story(
        arguments=("3",),
        settings={"nodes": 1},
        steps=("end node-0",),
        status=3,
        lives={"node-0": 3},
        says="the end of node-0",
    ),
    "a killed node is replaced under its name": Story(
        settings={"events": ("kill:rank1@world1+1s", "add@world1+1.2s")},
        steps=("shown add node-1", "end node-0", "shown done node-0", "end node-1"),
        happened={"node-0": "done", "node-1": "kill add done"},
        lives={"node-1": 2},
    ),
    "the last node killed is the end": Story(
        settings={"nodes": 1, "events": ("kill:node-0@0.3s",)}, steps=(), status=137
    ),
    "the last node killed is not the end where another is to come": Story(
        settings={"nodes": 1, "events": ("kill:node-0@0.3s", "add@0.9s")},
        steps=("shown add node-0", "end node-0"),
        happened={"node-0": "kill add done"},
    ),
    "a stopped node is not awaited": Story(
        settings={"events": ("stop:node-1@world1+1s",)},
        steps=("shown stop node-1", "end node-0"),
        happened={"node-0": "done"},
    ),
    "a stopped node is awaited where it is to go on": Story(
        settings={
            "events": (
                *("cont:node-1@world1+0.5s", "stop:node-1@world1+1s"),
                *("stop:node-1@world1+1.1s", "cont:node-1@world1+4s"),
            )
        },
        steps=("shown stop node-1 2", "end node-0", "shown done node-0", "end node-1"),
        happened={"node-0": "done", "node-1": "done"},
    ),
    "an event that finds no node does nothing": Story(
        settings={"nodes": 1, "events": ("kill:node-7@0.1s", "kill:rank9@0.2s", "add:node-0@0.3s")},
        steps=("shown add node-0", "end node-0"),
        happened={"node-7": "kill", "rank9": "kill", "node-0": "add"},
        lives={"node-0": 1},
    ),
    "the store tells who came and went": Story(
        settings={**SIDECARS, "events": ("kill:node-1@world1+1s", "add:node-1@world1+2s")},
        steps=("shown join node-1 2", "end node-0", "shown done node-0", "end node-1"),
        happened={"node-0": "join done leave", "node-1": "join join done leave"},
    ),
    "a drained node is told in time and not replaced": Story(
        settings={
            **SIDECARS,
            "events": (
                *("kill-sidecar:node-0@world1+1s", "drain:node-1@world1+4s"),
                "kill-launcher:node-0@world1+5s",
            ),
        },
        steps=("shown drained node-1", "shown restart node-0", "end node-0"),
        happened={"node-0": "sidecar restart done", "node-1": "drained"},
        lives={"node-0": 2, "node-1": 1},
        says="its container ended with 143",
    ),
    "a job with too few nodes says what it waits for": Story(
        settings={**SIDECARS, "min_nodes": 2, "events": ("drain:node-1@world1+1s",)},
        steps=("shown waiting", "end node-0"),
        happened={"node-1": "drained", "node-0": "done"},
        says="nothing can train: 1 node left (min 2)",
    ),
    "without Muster a drained node gets its SIGTERM and nothing else": Story(
        settings={"events": ("drain:node-1@world1+1s",)},
        steps=("shown drained node-1", "end node-0"),
        happened={"node-0": "done", "node-1": "drained"},
    ),
    "a sidecar that cannot start says why": Story(
        settings={"nodes": 1, "native": False, "lease_ttl_s": 0.001},
        steps=(),
        status=2,
        says="MUSTER_LEASE_TTL",
    ),
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
async def test_what_becomes_of_a_run(
    drill: Drill, monkeypatch: pytest.MonkeyPatch, story: Story
) -> None:
    for limit in ("LEAVE_TIMEOUT_S", "NOTICE_TIMEOUT_S"):
        monkeypatch.setattr(console.local.node, limit, PATIENCE_S)
    running = await drill.begin(*story.arguments, **story.settings)
    for step in story.steps:
        do, *words = step.split()
        if do == "end":
            await drill.end(words[0])
        else:
            times = int(words.pop()) if len(words) == 3 else 1
            await drill.shown(words[0], words[1] if words[1:] else "", times)
    assert await running == story.status
    assert drill.timeline["status"] == story.status
    kinds = set(" ".join(story.happened.values()).split())
    assert drill.happened(*kinds) == story.happened
    assert drill.lives.items() >= story.lives.items()
    assert story.says in drill.screen.getvalue()
    assert await drill.processes() == set()


async def test_the_same_drill_runs_on_torchrun_alone(drill: Drill) -> None:
    events = ("kill-launcher:node-1@world1+1s",)
    running = await drill.begin("0", events=events, native=False, lease_ttl_s=30, compares=True)
    await drill.shown("restart", "node-1")
    await drill.end("node-0")
    await drill.end("node-1")
    assert await running == 0
    native = drill.timeline["native"]
    assert native["status"] == 0
    assert {moment["who"] for moment in native["moments"] if moment["what"] == "done"} == {
        "node-0",
        "node-1",
    }
    assert [one["what"] for one in drill.timeline["costs"]] == ["kill-launcher node-1"]
    said = drill.screen.getvalue()
    assert said.index("the same drill on torchrun alone") < said.index("torchrun alone: ")
    log = drill.directory / "logs" / "native" / "node-0" / "torchrun.log"
    assert await asyncio.to_thread(log.exists)
    assert await drill.processes() == set()


async def test_a_sidecar_that_is_not_ready_in_time_ends_its_node_and_says_why(
    drill: Drill, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.to_thread(drill.write_sidecar_log, "node-0", '{"message": "no lease yet"}')
    monkeypatch.setattr(console.local.node, "sidecar_command", lambda: ("sleep", "600"))
    monkeypatch.setattr(console.local.node, "READY_TIMEOUT_S", 1.0)
    assert await (await drill.begin("0", nodes=1, native=False)) == EXIT_UNAVAILABLE
    assert drill.happened("failed", "ready") == {"node-0": "failed"}
    assert "its sidecar is not ready after 1 s: no lease yet" in drill.screen.getvalue()
    assert await drill.processes() == set()


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


async def ends_without_waiting_for_stragglers(
    running: asyncio.Task[int], monkeypatch: pytest.MonkeyPatch
) -> int:
    """The status of a run that was told to end, and must not need the time-out for that."""
    monkeypatch.setattr(console.local.run, "CLOSE_TIMEOUT_S", 4 * PATIENCE_S)
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
    interrupt = console.local.node.LocalNode.interrupt

    async def noted(node: console.local.node.LocalNode) -> None:
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

    monkeypatch.setattr(console.local.node.LocalNode, "interrupt", noted)
    monkeypatch.setattr(console.local.node, "send_to_all", send_slowly)
    running = await drill.begin("0", nodes=1, events=("stop:node-0@world1+1s",))
    await drill.shown("stop", "node-0")
    assert not frozen.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await ends_without_waiting_for_stragglers(running, monkeypatch) == 143
    assert frozen.is_set()
    assert await drill.processes() == set()
