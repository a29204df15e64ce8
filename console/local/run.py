# SPDX-License-Identifier: Apache-2.0
"""A whole run: its nodes, their events, and its end."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent.verdict.view import JobView
from console.local.job_in_store import FollowedJob, Outages, RoundFollower, awaited
from console.local.node import LocalNode, StartGate, Ticket
from console.local.payload import (
    CentralLauncher,
    Ending,
    ExecHost,
    Payload,
    Torchrun,
    central_status,
    job_status,
)
from console.local.processes import free_ports
from console.local.script_progress import PrintedProgress, PrintedSteps, StepReader
from console.local.settings import LAUNCHER, Event, LocalSettings, Pod, by_world
from console.local.timeline import Progress, Timeline, newest_rank_0
from console.local.worker_watch import WorkerFailure, WorkerWatch
from launcher_shim.exit_status import EXIT_FAULT

SAMPLE_INTERVAL_S = 0.2
CLOSE_TIMEOUT_S = 20.0

STANDSTILL_S = 2.0
"""Time without enough nodes after which the run says what it waits for."""


class LocalRun:
    """One run of ``muster local``. ``nodes`` holds the newest life of each node by name."""

    def __init__(
        self,
        settings: LocalSettings,
        events: Sequence[Event],
        timeline: Timeline,
        rounds: RoundFollower,
        job: FollowedJob | None,
        *,
        run_root: Path,
        log_root: Path,
        randomness: random.Random,
    ) -> None:
        self.nodes: dict[str, LocalNode] = {}
        self.progress: Mapping[str, tuple[Progress, ...]] = {}
        self.leader: Progress | None = None
        self.last_leader: str | None = None
        self.endings: list[Ending] = []
        self.given_up_for: WorkerFailure | None = None
        self.awaited = ""
        """The reason why no world can form, with what the run waits for; empty if one can."""
        self._short_since_s: float | None = None
        self._job = job
        self._outages = Outages()
        self.rounds = rounds
        self._settings = settings
        self._pending = [event for event in events if event.world_size is None]
        self._awaiting_worlds = by_world(events)
        self._world_began = asyncio.Event()
        self._one_event_at_a_time = asyncio.Lock()
        self._timeline = timeline
        self._run_root = run_root
        self._log_root = log_root
        self._randomness = randomness
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._lives_begun = 0
        self._drains: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._native_port = 0
        self._ports: set[int] = set()
        self._interrupted = False
        self._given_up: str | None = None
        self._central = settings.line.launcher.is_central
        self._worker_watch = WorkerWatch(timeline, rounds, settings.line.max_restarts)
        # A worker of a central launcher goes on from world to world.
        steps = PrintedSteps(settings.step_pattern)
        printed = None if self._central else PrintedProgress(steps)
        self._steps = StepReader(printed, timeline)

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return self._timeline.now_s()

    @property
    def next_event(self) -> tuple[str, float] | None:
        """The next event by the clock, and its time; None if there is none."""
        timed = [event for event in self._pending if event.world_size is None]
        if not timed:
            return None
        event = min(timed, key=lambda event: event.at_s)
        return f"{event.action} {event.target or ''}".strip(), event.at_s

    @property
    def last_step_s(self) -> float:
        """The time of the last step that was seen, in seconds since the run began; 0.0 for none."""
        worlds = self._timeline.worlds.all
        return worlds[-1].ended_s if worlds else 0.0

    @property
    def view(self) -> JobView | None:
        """The job as its store has it; None without Muster."""
        return self._job.view if self._job is not None else None

    async def until_over(self) -> tuple[int, str]:
        """Run the job to its end; return its exit status and the reason.

        Frozen or hung processes may be left: the sweeper ends them.
        """
        async with asyncio.TaskGroup() as tasks:
            await self._train(self._job.endpoints if self._job is not None else "", tasks)
            self.abandon()
        if self._given_up is not None:
            return EXIT_FAULT, self._given_up
        if self._central:
            return central_status(self._launcher_ending())
        return job_status(self.endings)

    async def _train(self, endpoints: str, tasks: asyncio.TaskGroup) -> None:
        if self._settings.native:
            (self._native_port,) = await self._free_ports(1)
        names = [f"node-{index}" for index in range(self._settings.nodes)]
        if self._central:
            names.insert(0, LAUNCHER)
        gate = StartGate(len(names))
        for name in names:
            await self._begin(name, endpoints, gate.ticket(), tasks)
        background = [
            tasks.create_task(self._apply(self._pending, 0.0, endpoints, tasks), name="events"),
            tasks.create_task(self._apply_in_worlds(endpoints, tasks), name="events of worlds"),
            tasks.create_task(self._sample(), name="samples"),
        ]
        while not (self._is_over() or self._interrupted or self._given_up):
            self._changed.clear()
            await self._changed.wait()
        for task in background:
            task.cancel()
        for event in itertools.chain(*self._awaiting_worlds):
            never = f"no world of {event.world_size} ranks for it: nothing is done"
            self._timeline.record(
                "event", event.action, event.target or "", never, had_effect=False
            )
        if self._interrupted or self._given_up or self._central or self._has_failed():
            await self._close_gently()

    def interrupt(self) -> None:
        """End the run early: gently, with ``CLOSE_TIMEOUT_S`` for the launcher and for the rest."""
        self._interrupted = True
        self._changed.set()

    async def _close_gently(self) -> None:
        """End the launcher first: it would take its workers for lost if they ended before it."""
        names = set(self.nodes)
        for group in ({LAUNCHER} & names, names - {LAUNCHER}):
            for name in group:
                node = self.nodes[name]
                if node.launcher is None:
                    node.state = "killed"
                    self._lives[name].cancel()
                elif not self._lives[name].done():
                    await node.interrupt()
            if group:
                await asyncio.wait([self._lives[name] for name in group], timeout=CLOSE_TIMEOUT_S)

    def abandon(self) -> None:
        """Cancel every drain and every node's life; the sweeper ends the processes left."""
        for drain in self._drains:
            drain.cancel()
        for name, life in self._lives.items():
            if not life.done():
                self.nodes[name].state = "killed"
                life.cancel()

    async def _begin(
        self, name: str, endpoints: str, ticket: Ticket, tasks: asyncio.TaskGroup
    ) -> None:
        self._lives_begun += 1
        c10d_port, http_port, tunnel_port = await self._free_ports(3)
        payload = self._payload(name)
        pod = Pod(
            name,
            uid=f"{self._settings.run}-{self._lives_begun}",
            role=payload.role,
            run_dir=self._run_root / f"{self._lives_begun}",
            c10d_port=self._native_port or c10d_port,
            http_port=http_port,
            tunnel_port=tunnel_port if self._central else 0,
        )
        node = LocalNode(
            pod,
            payload,
            self._settings,
            self._timeline,
            log_dir=self._log_root / name,
            closing=lambda: self.rounds.closing,
        )
        await asyncio.to_thread(self._worker_watch.begin, node.launcher_log)
        await asyncio.to_thread(self._steps.begin, node.launcher_log)
        self.nodes[name] = node
        self._timeline.record("node", "start", name, "a new pod")
        self._lives[name] = tasks.create_task(self._live(node, endpoints, ticket), name=name)

    def _payload(self, name: str) -> Payload:
        if not self._central:
            return Torchrun(self._settings, lambda: self.rounds.closing)
        if name == LAUNCHER:
            return CentralLauncher(self._settings)
        return ExecHost(self._settings)

    def _launcher_ending(self) -> Ending | None:
        return next((ending for ending in self.endings if ending.node == LAUNCHER), None)

    async def _live(self, node: LocalNode, endpoints: str, ticket: Ticket) -> None:
        try:
            self.endings.append(await node.live(endpoints, ticket))
        finally:
            ticket.give_up()
            self._changed.set()

    def _is_over(self) -> bool:
        awaited = {event.target for event in self._pending if event.action == "cont"}
        if self._central:
            frozen = self.nodes[LAUNCHER].state == "stopped" and LAUNCHER not in awaited
            return frozen or self._launcher_ending() is not None
        if self._has_failed():
            return True
        for name, life in self._lives.items():
            if not life.done() and (self.nodes[name].state != "stopped" or name in awaited):
                return False
        if any(ending.how in ("done", "failed") for ending in self.endings):
            return True
        return not any(event.action == "add" for event in self._pending)

    def _has_failed(self) -> bool:
        """Return whether the run failed for good: the nodes left wait in vain for other ones."""
        closing = self.rounds.closing
        failed = closing is not None and not closing.succeeded
        return failed and any(ending.how == "failed" for ending in self.endings)

    async def _free_ports(self, count: int) -> list[int]:
        ports = await asyncio.to_thread(free_ports, count, self._randomness, self._ports)
        self._ports.update(ports)
        return ports

    async def _apply_in_worlds(self, endpoints: str, tasks: asyncio.TaskGroup) -> None:
        worlds, start = self._timeline.worlds, 0
        while self._awaiting_worlds:
            size = self._awaiting_worlds[0][0].world_size or 0
            while (index := worlds.first_of(size, start)) is None:
                self._world_began.clear()
                await self._world_began.wait()
            start = index + 1
            events = self._awaiting_worlds.pop(0)
            self._pending += events
            await self._apply(events, worlds.all[index].began_s, endpoints, tasks)

    async def _apply(
        self, events: Sequence[Event], since_s: float, endpoints: str, tasks: asyncio.TaskGroup
    ) -> None:
        for event in sorted(events, key=lambda event: event.at_s):
            await asyncio.sleep(max(0.0, since_s + event.at_s - self._timeline.now_s()))
            async with self._one_event_at_a_time:
                if event.action == "add":
                    await self._add(event, endpoints, tasks)
                else:
                    await self._disturb(event, tasks)
            self._pending.remove(event)
            self._changed.set()

    async def _add(self, event: Event, endpoints: str, tasks: asyncio.TaskGroup) -> None:
        name = event.target or self._next_name()
        life = self._lives.get(name)
        if life is not None and not life.done():
            there = "it is there already: nothing to add"
            self._timeline.record("event", "add", name, there, had_effect=False)
            return
        self._timeline.record("event", "add", name, "scheduled", asked=str(event))
        await self._begin(name, endpoints, StartGate(1).ticket(), tasks)

    def _next_name(self) -> str:
        """Return the lowest name that no live node has: a replacement gets a killed node's name."""
        taken = {name for name, life in self._lives.items() if not life.done()}
        return next(name for i in itertools.count() if (name := f"node-{i}") not in taken)

    async def _disturb(self, event: Event, tasks: asyncio.TaskGroup) -> None:
        node, why = self._find(event)
        life = self._lives.get(node.name) if node else None
        if node is None or life is None or life.done():
            nobody = "no such node is there: nothing is done"
            self._timeline.record(
                "event", event.action, event.target or "", nobody, had_effect=False
            )
            return
        self._timeline.record("event", event.action, node.name, why, asked=str(event))
        if event.action == "kill":
            node.state = "killed"
            life.cancel()
            await asyncio.wait((life,))
            self.endings.append(await node.kill())
        elif event.action == "drain":
            # Two nodes that are drained at once must not wait for each other.
            self._drains.append(tasks.create_task(node.delete(), name=f"drain {node.name}"))
        elif event.action == "kill-sidecar":
            node.kill_sidecar()
        elif event.action == "kill-container":
            await node.kill_container()
        elif event.action == "kill-launcher":
            await node.kill_launcher()
        elif event.action == "stop":
            await node.stop()
        else:
            await node.cont()

    def _find(self, event: Event) -> tuple[LocalNode | None, str]:
        rank = event.target_rank
        if rank is None:
            return self.nodes.get(event.target or ""), "scheduled"
        hosts = [
            (progress.at_unix_s, name)
            for name, ranks in self.progress.items()
            for progress in ranks
            if progress.rank == rank
        ]
        if hosts:
            return self.nodes.get(max(hosts)[1]), f"it hosts rank {rank}"
        frozen = self.rounds.nodes
        index = rank // self._settings.line.slots
        if index < len(frozen):
            return self.nodes.get(frozen[index]), f"it hosts rank {rank} of the round"
        return None, ""

    async def _sample(self) -> None:
        """Read the progress files and the launchers' logs repeatedly, until cancelled."""
        while True:
            self.progress = await self._steps.read(self.nodes)
            self.leader = newest_rank_0(
                progress for ranks in self.progress.values() for progress in ranks
            )
            if self.leader is not None:
                self._see_leader(self.leader)
            self._see_outage()
            self._see_standstill()
            self.rounds.note_loading(self.last_step_s)
            nodes = tuple(self.nodes.values())
            for node, failure in await asyncio.to_thread(self._worker_watch.look, nodes):
                reason = self._worker_watch.record(node, failure)
                if reason is not None and not self._settings.keep_going:
                    self._given_up, self.given_up_for = reason, failure
                    self._changed.set()
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    def _see_outage(self) -> None:
        """Report an outage of the user's store; an embedded one is in this process."""
        if self._job is None or self._settings.access is None:
            return
        news = self._outages.see(self.now_s, self._job.outage)
        if news is not None:
            self._timeline.record("membership", news[0], "", news[1])

    def _see_standstill(self) -> None:
        """Say once what the job waits for, if it has too few nodes for long."""
        event, now_s = self.next_event, self.now_s
        waits = ""
        trained = self.rounds.last_rank_0 or self._timeline.worlds.all
        if trained and not (self.rounds.closing or self._interrupted):
            waits = awaited(self.view, f"{event[0]} at {event[1]:.0f} s" if event else "")
        if not waits:
            self.awaited, self._short_since_s = "", None
            return
        if self._short_since_s is None:
            self._short_since_s = now_s
        if waits != self.awaited and now_s - self._short_since_s >= STANDSTILL_S:
            self.awaited = waits
            self._timeline.record("membership", "waiting", "", waits)

    def _see_leader(self, leader: Progress) -> None:
        host = next(name for name, ranks in self.progress.items() if leader in ranks)
        self.last_leader = host
        began = self._timeline.worlds.see(self._timeline.now_s(), leader)
        if began is not None:
            self._timeline.record("training", "training", host, began)
            self._world_began.set()
