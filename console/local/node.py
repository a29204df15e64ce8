# SPDX-License-Identifier: Apache-2.0
"""A simulated node: a pod with a sidecar and a launcher, as processes of this machine.

The first launchers start together, once every first node is ready or has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from console.local import processes
from console.local.payload import (
    RESTART_PAUSE_S,
    Closing,
    Ending,
    Payload,
    after_exit,
    read_last_words,
    shell_status,
)
from console.local.processes import children, end_all, marked, send, send_to_all, until_ready
from console.local.settings import LocalSettings, Pod, sidecar_command, sidecar_environment
from console.local.timeline import Timeline
from launcher_shim.exit_status import EXIT_KILLED, EXIT_TERMINATED, EXIT_UNAVAILABLE
from launcher_shim.pod.ranks import RESTART_STEPS
from launcher_shim.rundir import layout
from rdzv.reconcile import first_of

READY_TIMEOUT_S = 180.0
"""Ends the wait for a sidecar that hangs: with a cold disk cache, starting has taken a minute."""
KILL_TIMEOUT_S = 5.0
LEAVE_TIMEOUT_S = 10.0
INSIST_INTERVAL_S = 1.0
NOTICE_TIMEOUT_S = 10.0
MAX_SIDECAR_PAUSE_S = 10.0


class StartGate:
    """A gate that opens once every ticket has been used or given up."""

    def __init__(self, tickets: int) -> None:
        self._missing = tickets
        self._opened = asyncio.Event()

    def ticket(self) -> Ticket:
        """Return one of the tickets that the gate waits for."""
        return Ticket(self)

    def count_one(self) -> None:
        """Count one ticket; the last one opens the gate."""
        self._missing -= 1
        if self._missing <= 0:
            self._opened.set()

    async def opened(self) -> None:
        """Wait until the gate is open."""
        await self._opened.wait()


class Ticket:
    """One ticket of a gate; it counts once, however often it is used or given up."""

    def __init__(self, gate: StartGate) -> None:
        self._gate = gate
        self._counted = False

    async def pass_through(self) -> None:
        """Use the ticket, and wait for the others."""
        self.give_up()
        await self._gate.opened()

    def give_up(self) -> None:
        """Count the ticket, so that nobody waits for it any longer."""
        if not self._counted:
            self._counted = True
            self._gate.count_one()


State = Literal[
    "starting",
    "ready",
    "running",
    "stopped",
    "restarting",
    "closing",
    "draining",
    "drained",
    "done",
    "spare",
    "failed",
    "killed",
]


class LocalNode:
    """One life of a node.

    ``restarts`` counts those after failures, not those after an event. ``closing`` returns how the
    launchers closed the run, once they have.
    """

    def __init__(
        self,
        pod: Pod,
        payload: Payload,
        settings: LocalSettings,
        timeline: Timeline,
        *,
        log_dir: Path,
        closing: Callable[[], Closing | None],
    ) -> None:
        self.name = pod.name
        self.run_dir = pod.run_dir
        self.launcher_log = log_dir / f"{payload.name}.log"
        self.sidecar_log = log_dir / "sidecar.log"
        self.state: State = "starting"
        self.restarts = 0
        self.sidecar: Process | None = None
        self.launcher: Process | None = None
        self._pod = pod
        self._payload = payload
        self._settings = settings
        self._timeline = timeline
        self._closing = closing
        self._state_before_stop: State = "starting"
        self._freezing: asyncio.Task[None] | None = None
        self._interrupted = asyncio.Event()
        self._killed_by_event = False
        self._deleted = False

    async def live(self, endpoints: str, ticket: Ticket) -> Ending:
        """Run the node from its start to its end, and return that."""
        await asyncio.to_thread(self._make_directories)
        if self._settings.native:
            await ticket.pass_through()
            return await self._keep_launcher()
        sidecar = asyncio.create_task(self._keep_sidecar(endpoints), name=f"sidecar {self.name}")
        try:
            if (ending := await self._until_ready(sidecar)) is not None:
                return ending
            self.state = "ready"
            self._timeline.record("node", "ready", self.name, "its sidecar is ready")
            await ticket.pass_through()
            return await self._keep_launcher()
        finally:
            sidecar.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sidecar

    def _make_directories(self) -> None:
        self.run_dir.mkdir(parents=True)
        self.launcher_log.parent.mkdir(parents=True, exist_ok=True)

    async def _until_ready(self, sidecar: asyncio.Task[int]) -> Ending | None:
        """Wait for the sidecar; return the node's end if the sidecar ends or takes too long."""
        ready = asyncio.create_task(until_ready(self._pod.http_port), name=f"readiness {self.name}")
        await first_of(ready, asyncio.shield(sidecar), timeout_s=READY_TIMEOUT_S)
        if sidecar.done():
            status, what = sidecar.result(), f"ended with {sidecar.result()}"
            next_, reason = after_exit(self.name, status, 0, self._closing())
            if next_ == "spare":
                return self._end("spare", status, reason)
        elif not ready.cancelled():
            return None
        else:
            status, what = EXIT_UNAVAILABLE, f"is not ready after {READY_TIMEOUT_S:g} s"
        message = await asyncio.to_thread(_last_message, self.sidecar_log)
        return self._end("failed", status, f"its sidecar {what}: {message}")

    async def _keep_sidecar(self, endpoints: str) -> int:
        """Run the sidecar and restart it, as the kubelet does; return its status if never ready.

        The end of the launcher cancels this: the sidecar is then ended gently.
        """
        environment = sidecar_environment(self._settings, self._pod, endpoints)
        pause_s = RESTART_PAUSE_S
        while True:
            self.sidecar = await processes.start_child(
                sidecar_command(), environment, self.sidecar_log
            )
            try:
                status = shell_status(await self.sidecar.wait())
            except asyncio.CancelledError:
                if self.state != "killed":
                    await processes.end_child(self.sidecar, LEAVE_TIMEOUT_S)
                raise
            if self.state == "starting":
                return status
            self._timeline.record(
                "node", "sidecar", self.name, f"its sidecar ended with {status}; starting it again"
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_SIDECAR_PAUSE_S)

    async def _keep_launcher(self) -> Ending:
        """Run the launcher, and restart it as the restart policy says; return the node's end."""
        payload = self._payload
        while True:
            if self._deleted:
                return self._end("drained", EXIT_TERMINATED, "deleted between two containers")
            process = await asyncio.to_thread(
                payload.prepare, self.name, self._pod.uid, self.run_dir, self._pod.c10d_port
            )
            self._killed_by_event = False
            self.launcher = await processes.start_child(
                process.command, process.environment, self.launcher_log
            )
            self.state = "running"
            started = f"{payload.name} is {self.launcher.pid}"
            self._timeline.record("node", "launched", self.name, started)
            status = shell_status(await self._until_ended(self.launcher))
            # A container ends with its first process: end what that has left behind.
            await self._end_container()
            if self._interrupted.is_set():
                return Ending(self.name, "killed", status)
            if self._deleted:
                return self._end("drained", status, f"its container ended with {status}")
            if self._killed_by_event and status != 0 and payload.restarts != 0:
                reason = "its container was killed"
            else:
                next_, reason = payload.after(self.name, status, self.restarts)
                if next_ != "restart":
                    return self._end(next_, status, reason)
                self.restarts += 1
                last_lines = await asyncio.to_thread(read_last_words, self.launcher_log, 1)
                reason = ": ".join([reason, *last_lines])
            self.state = "restarting"
            self._timeline.record("node", "restart", self.name, reason)
            await asyncio.sleep(RESTART_PAUSE_S)
            if self._interrupted.is_set():
                return Ending(self.name, "killed", status)

    async def _until_ended(self, launcher: Process) -> int:
        """Wait for the launcher; once it is asked to end, repeat SIGTERM if one may be lost."""
        if self._payload.insistent:
            ended = asyncio.create_task(launcher.wait(), name=f"end of {self.name}")
            try:
                await first_of(asyncio.shield(ended), self._interrupted.wait())
                while not ended.done():
                    send({launcher.pid}, signal.SIGTERM)
                    await asyncio.wait((ended,), timeout=INSIST_INTERVAL_S)
            finally:
                ended.cancel()
        return await launcher.wait()

    def _end(
        self, how: Literal["done", "spare", "failed", "drained"], status: int, reason: str
    ) -> Ending:
        self.state = how
        self._timeline.record("node", how, self.name, reason)
        return Ending(self.name, how, status)

    async def interrupt(self) -> None:
        """Ask the launcher to end; the sidecar follows it."""
        self._interrupted.set()
        self.state = "closing"
        if self._freezing is not None:
            # The freeze cannot be cancelled: what it stops after the SIGCONT would stay stopped.
            await asyncio.wait({self._freezing})
        await asyncio.to_thread(send_to_all, self._processes, signal.SIGCONT)
        if self._payload.wrapped:
            await asyncio.to_thread(start_nothing_again, self.run_dir / layout.ENVIRONMENT)
        # Not to muster-run, which would take it for the end of its pod, and drain every node.
        send(await asyncio.to_thread(self._command_pids), signal.SIGTERM)

    async def delete(self) -> None:
        """End the node as the kubelet does: notice to the sidecar, SIGTERM, SIGKILL in the end."""
        self._deleted = True
        self.state = "draining"
        launcher = self.launcher
        if not self._settings.native:
            try:
                await asyncio.wait_for(self._give_notice(), NOTICE_TIMEOUT_S)
                left = f"it has {self._settings.grace_s:g} s"
                detail = f"its sidecar has the notice, SIGTERM follows; {left}"
                self._timeline.record("node", "draining", self.name, detail)
            except TimeoutError:
                self._without_notice(f"its sidecar did not answer within {NOTICE_TIMEOUT_S:g} s")
            except OSError as error:
                self._without_notice(f"its sidecar is not there ({error.strerror or error})")
            except ValueError:
                self._without_notice("its sidecar ended before it took the notice")
        if launcher is not None and launcher.returncode is None:
            send({launcher.pid}, signal.SIGTERM)
            try:
                await asyncio.wait_for(launcher.wait(), self._settings.grace_s)
            except TimeoutError:
                self._timeline.record("node", "killed", self.name, "its grace was over")
                await self._end_container()

    def _without_notice(self, why: str) -> None:
        self._timeline.record("node", "draining", self.name, f"{why}; SIGTERM follows")

    async def _give_notice(self) -> None:
        """Do what the sidecar's preStop hook does; raises ``ValueError`` if the answer is cut."""
        path = self.run_dir / layout.NOTICE_SOCKET
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            notice = {"notice": "prestop", "reason": "the pod is deleted", "seconds_left": None}
            writer.write(json.dumps(notice).encode() + b"\n")
            json.loads(await reader.readline())
        finally:
            writer.close()

    async def kill(self) -> Ending:
        """End every process at once, after ``live`` was cancelled with the state ``killed``.

        The sidecar is killed first: a dead node announces nothing.
        """
        if self.sidecar is not None:
            send({self.sidecar.pid}, signal.SIGKILL)
        await self._end_all(self._processes)
        return Ending(self.name, "killed", EXIT_KILLED)

    async def kill_container(self) -> None:
        """End the launcher and its workers at once; the sidecar sees it and stays."""
        self._killed_by_event = True
        await self._end_container()

    async def kill_launcher(self) -> None:
        """End the launcher alone."""
        self._killed_by_event = True
        send(await asyncio.to_thread(self._command_pids), signal.SIGKILL)

    def kill_sidecar(self) -> None:
        """End the sidecar alone."""
        if self.sidecar is not None:
            send({self.sidecar.pid}, signal.SIGKILL)

    async def stop(self) -> None:
        """Freeze every process of the node."""
        if self.state != "stopped":
            self._state_before_stop, self.state = self.state, "stopped"
        freezing = asyncio.to_thread(send_to_all, self._processes, signal.SIGSTOP)
        self._freezing = asyncio.create_task(freezing, name=f"freeze {self.name}")
        await asyncio.shield(self._freezing)

    async def cont(self) -> None:
        """Let a frozen node go on."""
        if self.state == "stopped":
            self.state = self._state_before_stop
        await asyncio.to_thread(send_to_all, self._processes, signal.SIGCONT)

    def _command_pids(self) -> set[int]:
        """Return the launcher's pid or, under muster-run, its children's. Reads ``/proc``."""
        if self.launcher is None or self.launcher.returncode is not None:
            return set()
        own = {self.launcher.pid}
        return (children(self.launcher.pid) or own) if self._payload.wrapped else own

    def _processes(self) -> set[int]:
        return marked(self._settings.run, self.name)

    async def _end_container(self) -> None:
        kept = {self.sidecar.pid} if self.sidecar is not None else set()
        await self._end_all(lambda: self._processes() - kept)

    async def _end_all(self, find: Callable[[], set[int]]) -> None:
        own = {process.pid for process in (self.sidecar, self.launcher) if process is not None}
        deadline_s = time.monotonic() + KILL_TIMEOUT_S
        left = await asyncio.to_thread(end_all, find, own, deadline_s)
        if left:
            pids = ", ".join(map(str, sorted(left)))
            self._timeline.record("node", "stuck", self.name, f"outlive SIGKILL: {pids}")


def start_nothing_again(delivered: Path) -> None:
    """Keep muster-run from restarting its torchrun, however many steps that has made."""
    nascent = delivered.with_name(f".{delivered.name}.closing")
    with contextlib.suppress(FileNotFoundError):  # no sidecar has delivered anything
        nascent.write_text(f"{delivered.read_text()}{RESTART_STEPS}=0\n")
        nascent.replace(delivered)


def _last_message(sidecar_log: Path) -> str:
    """Return the last message in a sidecar's log, or its last line, as below a traceback."""
    lines = sidecar_log.read_text(errors="replace").splitlines()
    kept = [line for line in lines if not line.startswith("muster: this is a defect")] or [""]
    try:
        return str(json.loads(kept[-1])["message"])
    except (ValueError, KeyError, TypeError):
        return kept[-1]  # it failed before it could write its log
