# SPDX-License-Identifier: Apache-2.0
"""Processes that outlive the world they belong to, and are ended before the next one starts.

torchrun ends the process groups of its workers. A child in a session of its own, such as a tracker
or a profiler, lives on and may hold memory of a GPU; its parent is this process then. Its
environment names its world, which it has from the worker that started it. Processes that no worker
started have no such name, and none of them is touched.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import Dict, Iterable, Mapping, Optional, Set, Tuple

from launcher_shim.pod.process_table import below, parents, parts

log = logging.getLogger(__name__)

VARIABLE = "MUSTER_KEEP_ORPHANS"
TERM_TIMEOUT_S = 5.0
"""Time for an orphan to end by SIGTERM; SIGKILL follows."""
KILL_TIMEOUT_S = 2.0
"""Only processes in the kernel's uninterruptible sleep outlive SIGKILL."""
LOOK_S, LOOK_MAX_S = 0.05, 0.5
"""Interval between two looks at all processes: it grows from the first to the second."""
TOLD_S = 1.0
"""The time to end them from which on the log has it: the next world starts so much later."""
NAMED_MAX = 8
"""The number of processes that a log line names."""

World = Tuple[str, ...]
"""The run and the master's address of one world."""

_NAMES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")


def keeps_orphans(environ: Mapping[str, str]) -> bool:
    """Read whether orphans are left alone; raises ``ValueError`` with one sentence."""
    text = environ.get(VARIABLE, "").strip()
    if text not in ("", "0", "1"):
        raise ValueError(
            f"{VARIABLE} is {text!r}: give 1 to leave processes of ended worlds alone, or 0"
        )
    return text == "1"


def world_of(words: Iterable[str]) -> Optional[World]:
    """Return the world that an environment names; None if it is not that of a worker."""
    pairs = (word.partition("=") for word in words)
    found = {name: value for name, _, value in pairs if name in _NAMES}
    return tuple(found[name] for name in _NAMES) if len(found) == len(_NAMES) else None


def orphans_of(parent_of: Mapping[int, int], worlds: Mapping[int, World]) -> Set[int]:
    """Return the processes whose world has ended: pure.

    ``parent_of`` has all processes below this one, ``worlds`` the worlds of those that name one. A
    world lives while one of its processes is the child of a process outside of it: its torchrun.
    """
    live = {
        world
        for pid, world in worlds.items()
        if parent_of[pid] in parent_of and worlds.get(parent_of[pid]) != world
    }
    return {pid for pid, world in worlds.items() if world not in live}


class Orphans:
    """The processes below this one whose world has ended."""

    def __init__(self) -> None:
        self._outer = world_of("=".join(pair) for pair in os.environ.items())
        self._ending = asyncio.Lock()
        self._outlived: Set[int] = set()
        """Those that have outlived SIGKILL: no other world waits for them."""

    async def end(self) -> None:
        """End them: by SIGTERM, and those that are left after ``TERM_TIMEOUT_S`` by SIGKILL.

        Processes of another user, whose environment cannot be read, stay.
        """
        loop = asyncio.get_running_loop()
        async with self._ending:
            began_s = loop.time()
            if await self._signal(signal.SIGTERM, TERM_TIMEOUT_S):
                self._outlived |= await self._signal(signal.SIGKILL, KILL_TIMEOUT_S)
            took_s = loop.time() - began_s
        if took_s >= TOLD_S:
            log.info("processes of ended worlds delayed the next world by %.1f s", took_s)

    async def _signal(self, number: signal.Signals, timeout_s: float) -> Set[int]:
        """Send a signal to all of them, and wait until they have ended; return those left."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        pause_s = LOOK_S
        signalled: Set[int] = set()
        while True:
            left = await loop.run_in_executor(None, self._find)
            fresh = left - signalled
            signalled |= fresh
            if fresh:
                log.info(
                    "%s to %s: a world that has ended has left them behind (%s=1 keeps such ones)",
                    number.name,
                    await loop.run_in_executor(None, _named, fresh),
                    VARIABLE,
                )
            for pid in fresh:
                try:
                    os.kill(pid, number)
                except (ProcessLookupError, PermissionError) as error:
                    log.debug("process %d gets no %s: %s", pid, number.name, error.strerror)
            if not left or loop.time() >= deadline_s:
                return left
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LOOK_MAX_S)

    def _find(self) -> Set[int]:
        everywhere = parents()
        mine = below(os.getpid(), everywhere)
        worlds: Dict[int, World] = {}
        for pid in mine:
            try:
                world = world_of(parts(f"/proc/{pid}/environ"))
            except OSError:
                continue  # it has just ended, or is another user's
            if world is not None and world != self._outer:
                worlds[pid] = world
        self._outlived &= mine
        return orphans_of({pid: everywhere[pid] for pid in mine}, worlds) - self._outlived


def _named(pids: Set[int]) -> str:
    """Name processes for a log line: their numbers and the kernel's names of them."""
    named = []
    for pid in sorted(pids)[:NAMED_MAX]:
        try:
            with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                named.append(f"{pid} ({file.read().strip()})")
        except OSError:
            named.append(str(pid))
    more = f" and {len(pids) - NAMED_MAX} more" if len(pids) > NAMED_MAX else ""
    return f"process{'es' if len(pids) > 1 else ''} {', '.join(named)}{more}"
