# SPDX-License-Identifier: Apache-2.0
"""The sidecar's process: its signals and its exit status.

Status: 0 it was stopped and has left, 2 wrong configuration, 69 no store within the time limit of a
first start, 70 a defect of Muster.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import SystemRandom
from time import monotonic

from agent.config.sidecar import Config
from agent.peers.line import dial
from agent.rundir.files import RunDir
from agent.rundir.lock import lock
from agent.sidecar import Sidecar
from agent.surroundings import Surroundings
from agent.telemetry.counted_store import CountedStore
from agent.telemetry.metrics import Metrics
from agent.tunnel.identity import make_identity
from launcher_shim.exit_status import EXIT_DEFECT, EXIT_DONE, EXIT_UNAVAILABLE, EXIT_USAGE
from launcher_shim.horovod.hosts import token_of
from rdzv.errors import ConfigError, MusterError, StoreError
from rdzv.store.etcd.client import open_store

log = logging.getLogger(__name__)


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
    with await asyncio.to_thread(lock, run_dir.path, config.member):
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
