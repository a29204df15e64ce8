# SPDX-License-Identifier: Apache-2.0
"""The sidecar as a process: its lock, its running parts with health and metrics, signals, and exit.

Status: 0 it was stopped and has left, 2 wrong configuration, 69 no store within the time limit of a
first start, 70 a defect of Muster. A run directory has one sidecar, as a second one would deliver
its own port to the first's pod; the lock is the kernel's, and ends with the process, however that
ends.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from time import monotonic
from typing import BinaryIO

from agent.config import Config
from agent.neighbour import dial
from agent.rundir.files import RunDir, State
from agent.running import RunningParts, start_vital
from agent.surroundings import MemberSettings, Sockets, Surroundings
from agent.telemetry.gauges import add_drain_gauges, add_gauges, add_launcher_gauges
from agent.telemetry.http import LoopLag, serving
from agent.telemetry.metrics import CountedStore, Metrics
from agent.tunnel.identity import TunnelIdentity, make_identity
from launcher_shim.exit_status import EXIT_DEFECT, EXIT_DONE, EXIT_UNAVAILABLE, EXIT_USAGE
from launcher_shim.hosts import token_of
from launcher_shim.rundir import layout
from launcher_shim.rundir.layout import open_regular, read_untrusted
from rdzv.errors import ConfigError, MusterError, StoreError
from rdzv.sentences import named
from rdzv.store.etcd.client import open_store

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 5.0
"""Longest wait for a predecessor that was killed to be gone, in seconds."""
LOCK_RETRY_S = 0.1

OWNER_MAX_BYTES = 1024


class Sidecar:
    """One member, with its health and metrics."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        state: State,
        around: Surroundings,
        metrics: Metrics,
        tunnel: TunnelIdentity | None = None,
    ) -> None:
        self._config = config
        self._fresh = state.held is None
        self._parts = parts = RunningParts(
            around,
            MemberSettings.of(config, state.pod_uid, around.version, tunnel.pin if tunnel else ""),
            run_dir,
            Sockets.of(config, run_dir, tunnel),
            state.held,
        )
        self._loop_lag = LoopLag(around.clock)
        self._metrics = metrics
        add_gauges(metrics, parts.member, parts.launcher, self._loop_lag, around.clock)
        add_drain_gauges(metrics, parts.launcher.drains, around.boot_clock)
        add_launcher_gauges(metrics, parts.launcher.watcher)

    async def run(self, stop: asyncio.Event) -> None:
        """Run the member until ``stop`` is set, then leave.

        Raises an ``ExceptionGroup`` of the errors that ended a task, or ``ConfigError`` if a port
        is taken.
        """
        config = self._config
        async with (
            serving(config, self._loop_lag, self._parts.not_ready, self._metrics),
            asyncio.TaskGroup() as group,
        ):
            log.info(
                "the sidecar of %s starts %s",
                config.member,
                "as a fresh pod" if self._fresh else "again",
                extra={"event": "start", "fresh": self._fresh, "http_port": config.http_port},
            )
            measuring = start_vital(group, "loop-lag", self._loop_lag.run())
            await self._parts.run(stop)
            measuring.cancel()


def locked(path: Path, member: str) -> BinaryIO:
    """Lock the existing directory ``path`` until the returned file is closed.

    Blocks for up to ``RELEASE_TIMEOUT_S``; raises ``ConfigError`` that names the owner after that.
    """
    try:
        descriptor = open_regular(path / layout.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{named('--run-dir')}: {path} cannot be locked ({error.strerror}): choose another one"
        ) from error
    file = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        _take(file, path)
        with suppress(OSError):  # a full disk is tolerated: the name is for people
            file.truncate(0)
            file.write(f"{member} (pid {os.getpid()})".encode())
    except BaseException:
        file.close()
        raise
    return file


def _take(file: BinaryIO, path: Path) -> None:
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                # A volume without locks: nothing but the pod's own definition prevents a second
                # sidecar.
                sentence = "%s has no locks (%s): a second sidecar on it would not be noticed"
                log.warning(sentence, path, error.strerror, extra={"event": "no_lock"})
                return
        if time.monotonic() > deadline_s:
            owner = read_untrusted(path / layout.LOCK, OWNER_MAX_BYTES).decode(errors="replace")
            raise ConfigError(
                f"{named('--run-dir')}: {path} is in use by the sidecar of"
                f" {owner or 'another pod'}: give each sidecar a run directory of its own"
            )
        time.sleep(LOCK_RETRY_S)


def boot_s() -> float:
    """Return the seconds since the machine booted, including the time it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def run(config: Config, version: str = "") -> int:
    """Run the sidecar until a signal ends it; return the process's exit status.

    ``version`` is the program's, for the member's record.
    """
    # First of all: process 1 of a container gets no signal that it does not handle.
    with _stop_signals() as stop:
        try:
            await _serve(config, version, stop)
        except (MusterError, ExceptionGroup) as error:
            return _report(error)
    log.info("%s has left", config.member, extra={"event": "stopped"})
    return EXIT_DONE


async def _serve(config: Config, version: str, stop: asyncio.Event) -> None:
    run_dir = RunDir(config.run_dir)
    await asyncio.to_thread(run_dir.make)
    with await asyncio.to_thread(locked, run_dir.path, config.member):
        await _run(config, version, run_dir, stop)


async def _run(config: Config, version: str, run_dir: RunDir, stop: asyncio.Event) -> None:
    metrics = Metrics()
    random = SystemRandom()
    state = await asyncio.to_thread(run_dir.state, config.pod_uid)
    host = token_of(config.member, state.pod_uid)
    await asyncio.to_thread(run_dir.deliver, config, host)
    tunnel = await make_identity() if config.tunnel_port else None
    first = random.randrange(len(config.etcd_endpoints))
    opened = open_store(config.access, first=first, random=random)
    around = Surroundings(
        store=CountedStore(opened, metrics.store),
        clock=monotonic,
        boot_clock=boot_s,
        random=random,
        store_address=", ".join(config.etcd_endpoints),
        version=version,
        dial=dial,
    )
    try:
        if not stop.is_set():
            await Sidecar(config, run_dir, state, around, metrics, tunnel).run(stop)
    finally:
        await around.store.close()


@contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    """Yield an event that SIGTERM and SIGINT set."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _report(error: BaseException) -> int:
    """Log why the process ends, one line a cause; return the exit status."""
    if isinstance(error, ExceptionGroup):
        return max(_report(cause) for cause in error.exceptions)
    if isinstance(error, ConfigError):
        log.error("%s", error, extra={"event": "misconfigured"})
        return EXIT_USAGE
    if isinstance(error, StoreError):
        log.error("%s", error, extra={"event": "store_unavailable"})
        return EXIT_UNAVAILABLE
    log.critical("a defect of muster: %s", error, exc_info=error, extra={"event": "defect"})
    return EXIT_DEFECT
