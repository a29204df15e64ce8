# SPDX-License-Identifier: Apache-2.0
"""A whole sidecar but for health, metrics and the loop's lag: parts, tasks, and what it keeps.

Every task is vital: if one ends, the sidecar ends. The exception is a sidecar that is fenced: it
stays, writes nothing, and registers again when it is let in. The registration is on the disk before
it is announced, for the sidecar that starts here next. A full disk does not keep the pod out: the
write is retried until it succeeds, as without it the next sidecar would begin as a fresh pod.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from agent.parts import job_client, launcher_parts, member_parts
from agent.rundir.files import RunDir, State
from agent.surroundings import MemberSettings, Sockets, Surroundings
from launcher_shim.pod.launchers import CENTRAL
from launcher_shim.rundir import layout
from rdzv.errors import Fenced, StoreUnavailable
from rdzv.members.registration import Held
from rdzv.reconcile import first_of
from rdzv.sentences import named

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 5.0
"""Retry interval after a registration that the disk did not take, in seconds."""

LEAVE_TIMEOUT_S = 3.0
"""Time limit for leaving the job in the store, in seconds. After it, the lease expires instead."""


class KeptRegistration:
    """The keeper of the newest registration of the pod ``pod_uid``.

    One task writes, so that an older registration never lands last: a write that hangs goes on in
    its thread after ``keep`` is cancelled.
    """

    def __init__(self, run_dir: RunDir, pod_uid: str) -> None:
        self._run_dir = run_dir
        self._pod_uid = pod_uid
        self._held: Held | None = None
        self._attempted = asyncio.Event()
        """Set once the disk has taken or refused the newest registration."""
        self._news = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    async def keep(self, held: Held) -> None:
        """Have a registration written; if the disk refuses it, retry until ``end``."""
        self._held = held
        self._attempted = attempted = asyncio.Event()
        self._news.set()
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name="keep-registration")
        await attempted.wait()
        if self._writing.done():
            self._writing.result()  # raises what ended it, if it is a defect

    def end(self) -> None:
        """Stop retrying."""
        if self._writing is not None:
            self._writing.cancel()

    async def _write(self) -> None:
        """Write the newest registration, and each newer one, until the disk has taken it."""
        refused = False
        while self._news.is_set() or refused:
            self._news.clear()
            attempted = self._attempted
            try:
                await asyncio.to_thread(self._run_dir.keep, State(self._pod_uid, self._held))
            except OSError as error:
                if not attempted.is_set():  # later attempts have the same reason
                    self._log_refusal(error)
                refused = True
            else:
                if refused:
                    log.info("what is registered is kept now", extra={"event": "state_kept"})
                refused = False
            finally:
                attempted.set()
            if refused:
                await self._news_or_pause()

    async def _news_or_pause(self) -> None:
        try:
            async with asyncio.timeout(RETRY_PAUSE_S):
                await self._news.wait()
        except TimeoutError:
            return  # retry the same registration

    def _log_refusal(self, error: OSError) -> None:
        log.error(
            "%s cannot be written (%s): were this sidecar started again, it would be taken for a"
            " fresh pod",
            self._run_dir.path / layout.STATE,
            error.strerror,
            extra={"event": "state_not_kept"},
        )


Tasks = dict[str, asyncio.Task[None]]


class RunningParts:
    """One member's parts, from its registration until it leaves.

    ``held``: the registration of the previous sidecar; None for a pod that has never had one.
    ``fenced``: why the member may not write, or empty. ``stopping``: it has begun to leave, and
    delivers no host list any more.
    """

    def __init__(
        self,
        around: Surroundings,
        settings: MemberSettings,
        run_dir: RunDir,
        sockets: Sockets,
        held: Held | None,
    ) -> None:
        self.fenced = ""
        self.stopping = False
        self.client = job_client(around, settings.keys)
        self._kept = KeptRegistration(run_dir, settings.identity.pod_uid)
        self.member = member_parts(
            around, settings, self.client, held=held, on_held=self._kept.keep
        )
        self.launcher = launcher_parts(
            *(around, settings, self.member, run_dir, sockets), ready=lambda: not self.not_ready()
        )
        self._store_address = around.store_address
        self._settings = settings
        self._fresh = held is None
        self._awaits_agent = False

    async def run(self, stop: asyncio.Event) -> None:
        """Run the member until ``stop`` is set, then leave.

        Raises an ``ExceptionGroup`` of the errors that ended a task.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = self._start(group)
                await self._serve_until_stopped(stop)
                await self._leave(tasks)
        finally:
            self._kept.end()

    def not_ready(self) -> str | None:
        """Return why launchers beside this sidecar should not start, or None if they may."""
        if self.stopping:
            return "stopping"
        if self.fenced:
            return self.fenced
        if self._awaits_agent:
            return None  # the agent that is awaited starts only once this is ready
        if not self.launcher.hosts.joined:
            registrar = self.member.registrar
            if registrar.upheld:
                # Its launcher trains. A start probe that failed would end this sidecar, and with it
                # the lease that it renews.
                return None
            return ": ".join(filter(None, ("not registered yet", registrar.trouble)))
        if self.launcher.drains.own.active:
            return "draining"
        if not self.launcher.hosts.delivered.is_set():
            return "the host list is not delivered yet"
        if not self.launcher.endpoint.listening.is_set():
            return "the rendezvous endpoint does not listen yet"
        if not self.launcher.tunnel.listening.is_set():
            return "the tunnel does not listen yet"
        return None

    # -- from start to end

    def _start(self, group: asyncio.TaskGroup) -> Tasks:
        work = {
            "registration": self._stay_registered(),
            "hosts": self.launcher.hosts.run(),
            "watching": self.client.watching.run(),
            "c10d": self.launcher.endpoint.run(),
            "losses": self.member.losses.run(),
            "roll-back": self.member.roll_back.run(),
            "drains": self.launcher.drains.run(),
            "shards": self.launcher.shards.run(),
            "world": self.launcher.world.run(),
            "watcher": self.launcher.watcher.run(),
            "failures": self.launcher.failures.run(),
            "sweeper": self.member.sweeper.run(),
            "store-version": self.member.store_version.run(),
            "states": self.member.states.run(),
            "tunnel": self.launcher.tunnel.run(),
        }
        if self.member.peers is not None:
            work["peers"] = self.member.peers.run()
        return {name: start_vital(group, name, one) for name, one in work.items()}

    async def _serve_until_stopped(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.stopping = True
        log.info("stopping: leaving the job", extra={"event": "stopping"})

    async def _leave(self, tasks: Tasks) -> None:
        # The host list stays as it was: a restart of the sidecar does not change the job.
        await _end(tasks["registration"], tasks["hosts"])
        outlived = "a torchrun" if self.launcher.endpoint.outlived else ""
        if self.launcher.tunnel.carrying:
            outlived = f"a command of {CENTRAL.name}"
        if outlived:
            # The next sidecar of this pod goes on with it; without one, the lease expires.
            log.info(
                "%s stays behind muster-run: leaving its place to the next sidecar",
                outlived,
                extra={"event": "outlived"},
            )
        else:
            await self.member.registrar.leave(LEAVE_TIMEOUT_S)
        for task in tasks.values():
            task.cancel()

    # -- registration

    async def _stay_registered(self) -> None:
        await self._reach_store()
        if self._fresh and self.launcher.tunnel.serves:
            await self._meet_agent()
        registrar = self.member.registrar
        while True:
            try:
                await registrar.run()
            except Fenced as error:
                # The launcher beside it runs on, but nothing writes its requests to the store.
                self.fenced = str(error)
                log.error(
                    "fenced, this sidecar writes no more: %s", error, extra={"event": "fenced"}
                )
            await registrar.let_in_again()
            self.fenced = ""
            log.info(
                "no longer fenced: the job is this pod's again", extra={"event": "fence_lifted"}
            )

    async def _meet_agent(self) -> None:
        """Wait until this pod can start a central launcher's commands, before any host list has it.

        Its container starts after this sidecar, and may have an image of many gigabytes to pull; a
        worker that is started there before that fails. A pod that drains meanwhile waits no longer.
        """
        self._awaits_agent = True
        log.info(
            "registering once the agent of %s's workers listens (muster-exec)",
            CENTRAL.library,
            extra={"event": "registration"},
        )
        try:
            await first_of(self.launcher.tunnel.until_agent(), self._until_drained())
        finally:
            self._awaits_agent = False

    async def _until_drained(self) -> None:
        membership, pod_uid = self.client.membership, self._settings.identity.pod_uid
        while pod_uid not in (snapshot := membership.snapshot()).drains:
            await membership.changed_from(snapshot)

    async def _reach_store(self) -> None:
        """Wait for the first read of the store; one that has been a member waits until cancelled.

        Raises ``StoreUnavailable`` if a fresh pod has waited for the start timeout.
        """
        timeout_s = self._settings.start_timeout_s if self._fresh else None
        try:
            async with asyncio.timeout(timeout_s):
                await self.client.mirror.changed_after(0)
        except TimeoutError:
            trouble = self.client.watching.trouble
            raise StoreUnavailable(
                f"the store at {self._store_address} could not be read within"
                f" {timeout_s:g} s{f' ({trouble})' if trouble else ''}: check"
                f" {named('--etcd-endpoints')}, that it runs, and that it lets this member in"
            ) from None


def start_vital(
    group: asyncio.TaskGroup, name: str, work: Coroutine[None, None, None]
) -> asyncio.Task[None]:
    """Start a task that takes its group down if it ends by itself."""
    task = group.create_task(_vital(name, work), name=name)
    task.add_done_callback(lambda _: work.close())  # for one that is cancelled before it began
    return task


async def _vital(name: str, work: Coroutine[None, None, None]) -> None:
    await work
    raise RuntimeError(f"the task {name} ended by itself")


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
