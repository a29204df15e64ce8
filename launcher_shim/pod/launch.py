# SPDX-License-Identifier: Apache-2.0
"""The processes below ``muster-run``: the launcher that it reports to the sidecar, and orphans.

A torchrun with another rendezvous endpoint never connects to the sidecar, so only this process can
report it. It searches all processes below it, because the command may be a shell script. The report
has only the options of the rendezvous: a command line may hold secrets.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from launcher_shim.pod.launchers import found
from launcher_shim.rundir import layout
from launcher_shim.rundir.layout import open_regular, read_untrusted

PART_MAX_BYTES = 4 * 1024 * 1024
"""More than the kernel lets a process start with."""


def parents() -> Dict[int, int]:
    """Return the parent of each process that has not ended."""
    found: Dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it has just ended, or hidepid hides it: another user's, so not below us
            if state != b"Z":
                found[int(name)] = int(parent)
    return found


def descendants(root: int) -> Set[int]:
    """Return the processes below ``root`` that have not ended."""
    return below(root, parents())


def below(root: int, parent_of: Dict[int, int]) -> Set[int]:
    """Return those of ``parent_of`` that are below ``root``."""
    children: Dict[int, Set[int]] = {}
    for pid, parent in parent_of.items():
        children.setdefault(parent, set()).add(pid)
    below_root: Set[int] = set()
    unseen = {root}
    while unseen:
        found = children.get(unseen.pop(), set()) - below_root
        below_root |= found
        unseen |= found
    return below_root


def parts(path: str) -> List[str]:
    """Read the texts of a file such as ``/proc/PID/environ``; raises ``OSError``."""
    with open(path, "rb") as file:
        return file.read(PART_MAX_BYTES).decode(errors="replace").rstrip("\0").split("\0")


log = logging.getLogger(__name__)

LOOKS_EARLY, LOOK_EARLY_S = 60, 1.0
LOOK_S = 30.0
"""Poll interval after the first minute; a script may start another launcher at any time."""

REPORT_MAX_BYTES = 4096
TEXT_MAX = 255
PROGRAM_WORDS = 32
"""The number of words of a command line among which the launcher's name is searched: ``numactl -N 0
-m 0 torchrun``."""


class Launch(NamedTuple):
    """One launcher: ``launcher`` is its name, empty while none is seen."""

    launcher: str = ""
    pid: int = 0
    options: Mapping[str, str] = {}

    def to_json(self, started: str) -> bytes:
        """Encode for the file; ``started`` names the run of ``muster-run`` that saw it."""
        fields: Dict[str, object] = {
            "schema": 1,
            "started": started,
            "launcher": self.launcher,
            "pid": self.pid,
        }
        fields.update((name.replace("-", "_"), text) for name, text in self.options.items())
        return json.dumps(fields).encode() + b"\n"


def read_launch(pid: int, words: Sequence[str], environ: Mapping[str, str]) -> Optional[Launch]:
    """Return the launcher that a process is, with the options to report; None for any other."""
    launcher, after = found(words[:PROGRAM_WORDS])
    if launcher is None:
        return None
    options = launcher.report(words[:after], words[after:], environ)
    if options is None:
        return None
    return Launch(launcher.name, pid, {name: text[:TEXT_MAX] for name, text in options.items()})


def look(pids: Iterable[int]) -> Launch:
    """Find the launcher among processes; of several, the one with the lowest number."""
    for pid in sorted(pids):
        try:
            words = parts(f"/proc/{pid}/cmdline")
            if found(words[:PROGRAM_WORDS])[0] is None:
                continue
            variables = (part.partition("=") for part in parts(f"/proc/{pid}/environ"))
            launch = read_launch(pid, words, {name: value for name, _, value in variables})
        except OSError:
            continue  # it has just ended, or may not be read
        if launch is not None:
            return launch
    return Launch()


class Reporter:
    """The report on the launcher below this process, written to the run directory if it changes."""

    def __init__(self, run_directory: str) -> None:
        self._path = os.path.join(run_directory, layout.LAUNCH, layout.LAUNCHER)
        self._started = os.urandom(6).hex()
        self._reported: Optional[Launch] = None
        self._looks = 0

    def look(self) -> Optional[float]:
        """Report a change; return when to look again, in seconds, or None: there is no reporting.

        Raises ``OSError`` if ``/proc`` cannot be read.
        """
        if not self._looks and not os.path.isdir(os.path.dirname(self._path)):
            return None
        launch = look(descendants(os.getpid()))
        if launch != self._reported:
            if not self.report(launch):
                return None
            self._reported = launch
        self._looks += 1
        return LOOK_EARLY_S if self._looks < LOOKS_EARLY else LOOK_S

    def report(self, launch: Launch) -> bool:
        """Write a report; return whether it was written."""
        nascent = f"{self._path}.{os.getpid()}"
        try:
            with open(nascent, "wb", opener=_create) as file:
                os.fchmod(file.fileno(), 0o644)  # for the sidecar, whatever the umask is
                file.write(launch.to_json(self._started))
            os.replace(nascent, self._path)
        except OSError as error:
            # A sidecar of another version does not look for it; training does not depend on it.
            log.debug("the launcher cannot be reported to the sidecar: %s", error.strerror)
            return False
        return True

    def withdraw(self) -> None:
        """Remove this process's report; keep that of another ``muster-run``."""
        try:
            report = json.loads(read_untrusted(self._path, REPORT_MAX_BYTES))
            if isinstance(report, dict) and report.get("started") == self._started:
                os.unlink(self._path)
        except (OSError, ValueError, RecursionError) as error:
            # There is no report, or it is not this process's to remove.
            log.debug("no report of a launcher was removed: %s", error)


def _create(path: str, flags: int) -> int:
    file = open_regular(path, flags, 0o644)
    os.fchmod(file, 0o644)  # whatever the umask is: the sidecar may be another user
    return file


VARIABLE = "MUSTER_KEEP_ORPHANS"
TERM_TIMEOUT_S = 5.0
"""Time for an orphan to end by SIGTERM; SIGKILL follows."""
KILL_TIMEOUT_S = 2.0
"""Only processes in the kernel's uninterruptible sleep outlive SIGKILL."""
ORPHANS_LOOK_S, LOOK_MAX_S = 0.05, 0.5
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
    """The processes below this one whose world has ended.

    A child in a session of its own, such as a tracker or a profiler, lives on and may hold
    memory of a GPU; its parent is this process then. Its environment names its world, which it
    has from the worker that started it. Processes that no worker started have no such name, and
    none of them is touched.
    """

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
        pause_s = ORPHANS_LOOK_S
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
