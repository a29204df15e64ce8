# SPDX-License-Identifier: Apache-2.0
"""The process of a node's training container, its last words, and what follows its end.

A node is like a pod with restart policy OnFailure: a launcher that fails is restarted a few times,
unless the job itself is over.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import muster
from console.local.processes import NODE_MARK, RUN_MARK
from console.local.settings import LocalSettings, launcher_environment, native_delivery
from launcher_shim.exit_status import EXIT_KILLED
from launcher_shim.pod.launchers import CENTRAL
from launcher_shim.rundir import layout

RESTART_PAUSE_S = 1.0

Next = Literal["done", "spare", "restart", "failed"]

MAX_BYTES = 64 * 1024

_TORCHRUN_LINE = re.compile(r"[IWE]\d{4} \d\d:\d\d:\d\d|\[[IWE]\d{3} \d\d:\d\d:\d\d|\*{20,}")
_SCRIPT_FAILED = re.compile(r"E\d{4} .*\] failed \(exitcode: ")
_BLAMES_SCRIPT = "ChildFailedError"
_WORKER_LINE = re.compile(".*" + CENTRAL.prefix)


@dataclass(frozen=True, slots=True)
class Closing:
    """The closing of the run by its launchers, with the nodes of its last round."""

    succeeded: bool
    nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Ending:
    """The final end of one node; a list of these is in the order in which the nodes ended."""

    node: str
    how: Literal["done", "spare", "failed", "drained", "killed"]
    status: int


def shell_status(returncode: int) -> int:
    """Return a process's status as a shell reports it: 128 + N after signal N."""
    return 128 - returncode if returncode < 0 else returncode


def after_exit(
    node: str, status: int, restarts_left: int, closing: Closing | None
) -> tuple[Next, str]:
    """Decide what follows the end of a node's launcher, and why."""
    if status == 0:
        return "done", "its launcher exited with 0"
    if closing is not None and closing.succeeded and node not in closing.nodes:
        return "spare", "the job finished without it"
    if closing is not None:
        how = "succeeded" if closing.succeeded else "failed"
        return "failed", f"its launcher exited with {status}, and the job has {how}"
    if restarts_left > 0:
        return "restart", f"its launcher exited with {status}, and starts again"
    return "failed", f"its launcher exited with {status}, and no restart is left"


def central_status(launcher: Ending | None) -> tuple[int, str]:
    """Return the exit status of a central launcher's job and the reason: its own, if it ended."""
    if launcher is None:
        return EXIT_KILLED, f"{CENTRAL.name} never ran to an end"
    if launcher.how == "killed":
        return launcher.status, "the launcher was killed"
    if launcher.how == "done":
        return 0, "the job finished"
    return launcher.status, f"{CENTRAL.name} ended with {launcher.status}"


def job_status(endings: Sequence[Ending]) -> tuple[int, str]:
    """Return the job's exit status and the reason, from the ends of all nodes.

    The job has finished if a node was done and none failed after that; what failed or was killed
    before, the job has survived.
    """
    first_done = next((i for i, ending in enumerate(endings) if ending.how == "done"), None)
    failures = [ending for ending in endings[first_done or 0 :] if ending.how == "failed"]
    if failures:
        return failures[0].status, f"{failures[0].node} ended with {failures[0].status}"
    if first_done is None:
        return EXIT_KILLED, "no node was left"
    done = sum(ending.how == "done" for ending in endings)
    return 0, f"the job finished on {done} node{'s' if done != 1 else ''}"


@dataclass(frozen=True, slots=True)
class Process:
    """A command and its environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


class Payload(Protocol):
    """The process of one node's training container.

    ``insistent``: it may miss a single SIGTERM. ``wrapped``: muster-run is around the command.
    ``restarts``: their limit, or None.
    """

    name: str
    role: Literal["worker", "launcher"]
    insistent: bool
    wrapped: bool
    restarts: int | None

    def prepare(self, node: str, pod_uid: str, run_dir: Path, port: int) -> Process:
        """Prepare the node, and return the process to start; blocks on the disk."""

    def after(self, node: str, status: int, restarts: int) -> tuple[Next, str]:
        """Decide what follows an end that no event has caused, and why."""


class Torchrun:
    """One torchrun on each node; ``closing`` returns how they closed the run, once they have.

    Without Muster there is no ``muster-run`` around it.
    """

    name = "torchrun"
    role: Literal["worker", "launcher"] = "worker"
    insistent = False

    def __init__(self, settings: LocalSettings, closing: Callable[[], Closing | None]) -> None:
        self.wrapped = not settings.native
        self.restarts: int | None = settings.restarts
        self._settings = settings
        self._closing = closing

    def prepare(self, node: str, pod_uid: str, run_dir: Path, port: int) -> Process:
        """Build the process from what the sidecar has delivered; without a sidecar, deliver it."""
        if not self._settings.native:
            environment = launcher_environment(self._settings, node, run_dir, {})
            return Process(_wrapped(self._settings.line.command, run_dir), environment)
        _copy_package(Path(muster.__file__).parent, run_dir / layout.MODULES / "muster")
        delivered = native_delivery(self._settings, port, is_host=node == "node-0")
        environment = launcher_environment(self._settings, node, run_dir, delivered)
        return Process(self._settings.line.command, environment)

    def after(self, node: str, status: int, restarts: int) -> tuple[Next, str]:
        """Decide as the restart policy OnFailure does."""
        return after_exit(node, status, self._settings.restarts - restarts, self._closing())


class CentralLauncher:
    """The one central launcher of a job, on a node of its own.

    It starts its workers through the sidecars.
    """

    name = CENTRAL.name
    role: Literal["worker", "launcher"] = "launcher"
    insistent = True
    wrapped = False

    def __init__(self, settings: LocalSettings) -> None:
        self.restarts: int | None = 0
        self._settings = settings

    def prepare(self, node: str, pod_uid: str, run_dir: Path, port: int) -> Process:
        """Build the launcher's command and environment."""
        settings, line = self._settings, self._settings.line
        least, most = settings.policy.min_nodes, settings.policy.max_nodes
        counts = [n * line.slots for n in (max(least, min(settings.nodes, most)), least, most)]
        first, *others = line.command[: line.program]
        command, variables = line.launcher.started_here(
            (shutil.which(first) or first, *others),
            line.command[line.program :],
            {"PATH": os.defpath, **os.environ},
            str(run_dir),
            counts,
        )
        return Process(tuple(command), {**variables, RUN_MARK: settings.run, NODE_MARK: node})

    def after(self, node: str, status: int, restarts: int) -> tuple[Next, str]:
        """Decide against a restart: what it has trained was in its workers' memory."""
        return "failed" if status else "done", f"{self.name} ended with {status}"


class ExecHost:
    """The agent that starts a central launcher's workers on their node, and outlives them.

    It runs under ``muster-run``.
    """

    name = "agent"
    role: Literal["worker", "launcher"] = "worker"
    insistent = False

    def __init__(self, settings: LocalSettings) -> None:
        self.wrapped = True
        self.restarts: int | None = None
        self._settings = settings

    def prepare(self, node: str, pod_uid: str, run_dir: Path, port: int) -> Process:
        """Build the agent's process from what the sidecar has delivered."""
        command = (str(run_dir / layout.PROGRAMS / layout.MUSTER_EXEC),)
        environment = launcher_environment(self._settings, node, run_dir, {})
        return Process(_wrapped(command, run_dir), environment)

    def after(self, node: str, status: int, restarts: int) -> tuple[Next, str]:
        """Decide for a restart, without a limit."""
        return "restart", f"its agent ended with {status}, and starts again"


def _wrapped(command: tuple[str, ...], run_dir: Path) -> tuple[str, ...]:
    """Put the command under the ``muster-run`` that the sidecar has delivered."""
    return (str(run_dir / layout.PROGRAMS / layout.MUSTER_RUN), "--", *command)


def _copy_package(source: Path, target: Path) -> None:
    # Compiled files appear and vanish while other processes run.
    ignored = shutil.ignore_patterns("__pycache__", "_program")
    shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)


def last_words(lines: Sequence[str], count: int) -> list[str]:
    """Return the last ``count`` lines, oldest first.

    If torchrun ended because the script failed, these are the script's lines before that; if
    torchrun failed by itself, its own. A central launcher marks its workers' lines; without any
    such line, all output is its own.
    """
    if workers := [line for line in lines if _WORKER_LINE.match(line)]:
        return workers[-count:]
    end = len(lines)
    if any(line.rstrip(": ").endswith(_BLAMES_SCRIPT) for line in lines):
        failures = [i for i, line in enumerate(lines) if _SCRIPT_FAILED.match(line)]
        end = failures[-1] if failures else end
    spoken = [line for line in lines[:end] if line.strip() and not _TORCHRUN_LINE.match(line)]
    return spoken[-count:]


def read_last_words(log: Path, count: int) -> list[str]:
    """Read the last words from a log file's last ``MAX_BYTES``; empty if there is no file."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - MAX_BYTES))
        return last_words(file.read().decode(errors="replace").splitlines(), count)
