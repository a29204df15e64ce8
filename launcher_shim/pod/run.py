# SPDX-License-Identifier: Apache-2.0
"""``muster-run -- COMMAND``: the first process of a training container.

It runs the command as a plain init would, with the environment that the sidecar has delivered. A
SIGTERM is held until the sidecar reports that the drain is over, or the time is: until then the
command trains on. Every other signal goes to the command at once. A torchrun whose restarts are
used up is started again, if its job makes progress.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
from contextlib import suppress
from typing import Callable, Dict, Mapping, Optional, Sequence, Set

from launcher_shim.exit_status import (
    ENDING_SIGNALS,
    EXIT_DONE,
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    EXIT_REMOVED,
    EXIT_TERMINATED,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
)
from launcher_shim.pod.container import GLOO_INTERFACE, Container, needed_interface
from launcher_shim.pod.delivery import RunDirectory, configure_log
from launcher_shim.pod.hold import OutgoingNotice, Release, give_notice, grace_s, reserve_s
from launcher_shim.pod.launch import Orphans, Reporter, keeps_orphans, read_launch
from launcher_shim.pod.launchers import CENTRAL, named, serves_workers
from launcher_shim.pod.ranks import Ended, StackReporter, StepWatch, restart_steps, starts_again
from launcher_shim.pod.relay import Relay
from launcher_shim.torchrun.launcher import keeps_flags, override, rendezvous_port

log = logging.getLogger(__name__)

USAGE = "usage: muster-run -- COMMAND [ARGUMENT …], as in muster-run -- torchrun train.py"
DELIVERY_TIMEOUT_S = 60.0
LOOK_S = 0.1
INSIST_S = 2.0
NEVER_AGAIN = (EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND)
"""Statuses of an agent that would end the same way once more."""
EXIT_EXCEPTION = 1
"""Python's status after a traceback."""
AGENT_PAUSE_S = 1.0
"""Pause before an agent of a launcher's workers that has ended by itself is started again."""


def main() -> int:
    """Run the command line; return the exit status."""
    configure_log("muster-run")
    command = sys.argv[1:]
    if command[:1] == ["--"]:
        command = command[1:]
    elif command[:1] == ["--help"]:
        sys.stdout.write(USAGE + "\n")
        return 0
    elif command[:1] and command[0].startswith("-"):
        command = []
    if not command:
        sys.stderr.write(USAGE + "\n")
        return EXIT_USAGE
    return asyncio.run(_run(command, RunDirectory.find(os.environ, sys.argv[0])))


async def _run(command: Sequence[str], run_dir: RunDirectory) -> int:
    # Made here: up to Python 3.9 an event belongs to the loop that runs when it is made.
    return await CommandRun(command, run_dir).run()


class CommandRun:
    """One command, from its first start to its last end."""

    def __init__(self, command: Sequence[str], run_dir: RunDirectory) -> None:
        self._command = command
        self._run_dir = run_dir
        self._container = Container()
        self._delivered: Optional[Dict[str, str]] = None
        self._relay: Optional[Relay] = None
        self._ended_early = asyncio.Event()
        self._ended_by: Optional[signal.Signals] = None
        self._drain: Optional[asyncio.Task[None]] = None
        self._grace_s = 0.0
        self._keeps_orphans = False
        self._drained: Optional[Release] = None
        self._passed: Set[int] = set()
        self._passed_on_until_s: Optional[float] = None
        self._insisting: Optional[asyncio.Task[None]] = None

    async def run(self) -> int:
        """Run the command; return the exit status of the container."""
        self._container.adopt(self._on_signal)
        environ = dict(os.environ)
        try:
            self._delivered = await self._delivery()
            if self._delivered is not None:
                self._delivered, overruled = override(environ, self._delivered)
                for sentence in overruled:
                    log.info("%s", sentence)
                environ = self._run_dir.environment(environ, self._delivered)
                if is_central(self._delivered):
                    self._command, environ = CENTRAL.found_first(self._command, environ)
                else:
                    environ = await _with_interface(environ)
            self._grace_s = grace_s(environ)
            restart_steps(environ)
            self._keeps_orphans = keeps_orphans(environ)
            keeps_flags(environ)
            self._relay = await self._serve_port()
        except ValueError as error:
            log.error("%s", error)
            return EXIT_USAGE
        try:
            return await self._keep(environ)
        finally:
            if self._relay is not None:
                await self._relay.close()

    async def _keep(self, environ: Mapping[str, str]) -> int:
        """Run the command, as often as it has to start again; return the exit status."""
        while self._ended_by is None:
            steps = await self._live(environ)
            await self._container.kill_rest()
            if not self._starts_again(steps):
                self._explain_traceback()
                return self._status()
            if self._relay is not None:
                self._relay.renew()
            if serves_workers(self._command):
                log.warning(
                    "the agent of %s's workers ended with %s: it starts again in %g s",
                    CENTRAL.library,
                    self._container.status,
                    AGENT_PAUSE_S,
                )
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._ended_early.wait(), AGENT_PAUSE_S)
        log.info("%s came before the command was started", self._ended_by.name)
        return EXIT_DONE if serves_workers(self._command) else 128 + self._ended_by

    async def _live(self, environ: Mapping[str, str]) -> Optional[int]:
        """Run the command once; return how many steps its ranks have made, None if unknown."""
        watch = self._step_watch()
        self._passed.clear()
        self._container.start(self._command, environ)
        reporter = Reporter(self._run_dir.path)
        stacks = StackReporter(self._run_dir.path)
        reporting = asyncio.ensure_future(_poll(reporter.look))
        reporting.add_done_callback(_on_reporting_ended)
        beside = [reporting]
        if watch is not None:
            beside.append(asyncio.ensure_future(_poll(watch.look)))
        if self._delivered is not None:
            beside.append(asyncio.ensure_future(_poll(stacks.look)))
        await self._container.ended.wait()
        stacks.end()
        for task in beside:
            task.cancel()
        reporter.withdraw()
        if self._insisting is not None:
            self._insisting.cancel()
        if self._passed_on_until_s is not None:
            await self._container.group_ended(self._passed_on_until_s)
        return watch.made() if watch is not None else None

    def _step_watch(self) -> Optional[StepWatch]:
        """Create the step counter of a torchrun beside a sidecar; None for other commands."""
        counts = self._delivered is not None and self._has_rounds()
        return StepWatch(self._run_dir.path) if counts else None

    def _starts_again(self, steps: Optional[int]) -> bool:
        """Decide whether the command, which has ended, is started once more."""
        status = self._container.status
        assert status is not None
        drained = self._drain is not None or self._passed_on_until_s is not None
        if self._drain is not None:
            self._drain.cancel()
        if serves_workers(self._command):
            return not drained and not self._passed and status not in NEVER_AGAIN
        ended = Ended(status, steps, frozenset(self._passed), drained)
        # The variables that are delivered now count: another sidecar may be there, or the job is to
        # end.
        delivered = self._delivered or {}
        try:
            delivered = self._run_dir.delivered() or delivered
        except ValueError as error:  # the command has its status, whatever this is
            log.warning("using what the sidecar delivered before: %s", error)
        try:
            again, sentence = starts_again(ended, restart_steps({**os.environ, **delivered}))
        except ValueError as error:
            log.error("%s", error)
            return False
        if sentence:
            log.info("%s", sentence)
        return again

    def _explain_traceback(self) -> None:
        """Log what the traceback is by which a torchrun ends that gets SIGTERM, after a drain."""
        drained = self._drained
        if drained is None or self._container.status != EXIT_EXCEPTION or not self._has_rounds():
            return
        at = "" if drained.step is None else f" at step {drained.step}"
        log.info("drained%s; the traceback above is how torchrun ends", at)

    def _status(self) -> int:
        status = self._container.status
        assert status is not None
        if serves_workers(self._command) and self._passed_on_until_s is not None:
            return EXIT_DONE  # no job needs it to be complete, but a failed worker ends an MPIJob
        if is_central(self._delivered or {}) and status == EXIT_DONE:
            return status  # it ends with 0 only once all is trained
        # A status of 0 would end the job of which only this container was drained.
        if self._drained is not None and (status != EXIT_REMOVED or self._has_rounds()):
            return EXIT_TERMINATED
        return status

    def _has_rounds(self) -> bool:
        """Return whether the command is a torchrun: one that aborts at its end was drained, too."""
        launch = read_launch(0, self._command, {**os.environ, **(self._delivered or {})})
        launcher = named(launch.launcher) if launch is not None else None
        return launcher is not None and launcher.has_rounds

    # -- before the command

    async def _delivery(self) -> Optional[Dict[str, str]]:
        """Wait, within bounds, for the sidecar's variables; None without a sidecar.

        None also if a signal has ended the wait. Raises ``ValueError`` if they cannot be read.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + DELIVERY_TIMEOUT_S
        while True:
            delivered = self._run_dir.delivered()
            if delivered is not None or not self._run_dir.expected:
                return delivered
            if loop.time() >= deadline_s:
                log.warning(
                    "no sidecar has delivered to %s within %g s: going on without one",
                    self._run_dir.path,
                    DELIVERY_TIMEOUT_S,
                )
                return None
            try:
                await asyncio.wait_for(self._ended_early.wait(), LOOK_S)
            except asyncio.TimeoutError:
                continue
            return None

    async def _serve_port(self) -> Optional[Relay]:
        """Serve torchrun's port; raises ``ValueError`` if another program than the sidecar has it.

        A sidecar of an older version does not report that it serves the port itself.
        """
        port = rendezvous_port(self._delivered) if self._delivered is not None else None
        if port is None:
            return None
        if self._keeps_orphans:
            relay = Relay(port, self._run_dir.c10d_socket)
        else:
            relay = Relay(port, self._run_dir.c10d_socket, Orphans().end)
        try:
            await relay.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            if self._delivered is not None and self._delivered.get("MUSTER_C10D_PORT") == "0":
                raise ValueError(
                    f"port {port} of the loopback, which torchrun is told to connect to, is taken"
                    " by another program of this pod: end that, or give the sidecar another"
                    " MUSTER_RELAY_PORT"
                ) from error
            log.warning(
                "port %d is taken, as by a sidecar that serves it itself: with MUSTER_C10D_PORT=0"
                " it would leave the port to muster-run, and could be restarted unnoticed",
                port,
            )
            return None
        return relay

    # -- signals

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._container.runs and self._passed_on_until_s is None:
            # No command can get it, not yet or not any more.
            if number in ENDING_SIGNALS and self._ended_by is None:
                self._ended_by = number
                self._ended_early.set()
            return
        if number != signal.SIGTERM:
            self._passed.add(number)
            self._container.signal(number)
            return
        if self._delivered is None or self._passed_on_until_s is not None:
            self._pass_on(self._grace_s)
        elif self._drain is None:
            self._drain = asyncio.ensure_future(self._hold())
            self._drain.add_done_callback(self._on_hold_ended)

    def _on_hold_ended(self, hold: asyncio.Task[None]) -> None:
        if not hold.cancelled() and hold.exception() is not None:
            log.error("a defect of muster-run ends the hold", exc_info=hold.exception())
            self._pass_on(self._grace_s)

    def _pass_on(self, left_s: float) -> None:
        if self._passed_on_until_s is None:
            self._passed_on_until_s = asyncio.get_running_loop().time() + left_s
        self._container.signal(signal.SIGTERM)
        if is_central(self._delivered or {}) and self._insisting is None:
            self._insisting = asyncio.ensure_future(self._insist())
        if self._relay is not None:
            self._relay.hurry()

    async def _insist(self) -> None:
        """Repeat SIGTERM: a launcher that is just starting a worker may not handle it."""
        while True:
            await asyncio.sleep(INSIST_S)
            self._container.signal(signal.SIGTERM)

    async def _hold(self) -> None:
        """Hold the SIGTERM that has come, until the sidecar's release or the deadline."""
        now_s = asyncio.get_running_loop().time()
        end_s = now_s + self._grace_s
        notice = OutgoingNotice(
            "sigterm",
            "SIGTERM reached the training container",
            end_s,
            end_s - reserve_s(self._grace_s),
        )
        log.info("SIGTERM is held: the command goes on until the drain is over")
        release = await give_notice(self._run_dir.notice_socket, notice)
        self._drain = None
        if release.how == "cancelled":
            log.info(
                "the drain is cancelled, the command goes on (%s); if it is the container that is"
                " being ended, it is killed in %.0f s",
                release.sentence,
                end_s - asyncio.get_running_loop().time(),
            )
            return
        log.info("SIGTERM goes to the command: %s (%s)", release.how, release.sentence)
        self._drained = release if release.how != "absent" else None
        self._pass_on(end_s - asyncio.get_running_loop().time())


async def _with_interface(environ: Dict[str, str]) -> Dict[str, str]:
    """Return the command's environment with the network interface that Gloo needs, if any."""
    loop, address = asyncio.get_running_loop(), environ.get("PET_LOCAL_ADDR", "")
    try:
        needed = await loop.run_in_executor(None, needed_interface, environ, address)
    except OSError as error:
        log.debug("whether Gloo finds its network interface is unknown: %s", error)
        return environ
    if needed is None:
        return environ
    interface, sentence = needed
    log.info("%s", sentence)
    return {**environ, GLOO_INTERFACE: interface}


async def _poll(look: Callable[[], Optional[float]]) -> None:
    """Call ``look`` in a thread after each pause that it returns, in seconds; end with None.

    What it looks at, the files of ranks and the processes, gives no notification of a change.
    """
    loop = asyncio.get_running_loop()
    while True:
        pause_s = await loop.run_in_executor(None, look)
        if pause_s is None:
            return
        await asyncio.sleep(pause_s)


def is_central(delivered: Mapping[str, str]) -> bool:
    """Return whether the job's one launcher runs in this pod, as its sidecar says."""
    return delivered.get("MUSTER_ROLE") == "launcher"


def _on_reporting_ended(reporting: asyncio.Task[None]) -> None:
    if not reporting.cancelled() and reporting.exception() is not None:
        # Training does not depend on it.
        log.error(
            "the launcher is not reported to the sidecar any more",
            exc_info=reporting.exception(),
        )
