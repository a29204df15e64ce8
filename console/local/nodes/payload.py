# SPDX-License-Identifier: Apache-2.0
"""The process of a node's training container, and the decision what follows its end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import muster
from console.local.launch.horovod_line import HorovodLine
from console.local.launch.launch_line import LaunchLine
from console.local.launch.settings import (
    LocalSettings,
    horovodrun_environment,
    launcher_environment,
    native_delivery,
)
from console.local.report.outcome import Closing, Next, after_exit, after_horovodrun
from launcher_shim.pod.horovod_launch import started_lightly
from launcher_shim.rundir import layout


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

    def __init__(
        self, settings: LocalSettings, line: LaunchLine, closing: Callable[[], Closing | None]
    ) -> None:
        self.wrapped = not settings.native
        self.restarts: int | None = settings.restarts
        self._settings = settings
        self._line = line
        self._closing = closing

    def prepare(self, node: str, pod_uid: str, run_dir: Path, port: int) -> Process:
        """Build the process from what the sidecar has delivered; without a sidecar, deliver it."""
        if not self._settings.native:
            environment = launcher_environment(self._settings, node, run_dir, {})
            return Process(_wrapped(self._line.command, run_dir), environment)
        _copy_package(Path(muster.__file__).parent, run_dir / layout.MODULES / "muster")
        delivered = native_delivery(self._settings, port, is_host=node == "node-0")
        environment = launcher_environment(self._settings, node, run_dir, delivered)
        return Process(self._line.command, environment)

    def after(self, node: str, status: int, restarts: int) -> tuple[Next, str]:
        """Decide as the restart policy OnFailure does."""
        return after_exit(node, status, self._settings.restarts - restarts, self._closing())


class Horovodrun:
    """The one horovodrun of a job, on a node of its own.

    It starts its workers through the ``ssh`` that is first on its PATH and only looks like one.
    """

    name = "horovodrun"
    role: Literal["worker", "launcher"] = "launcher"
    insistent = True
    wrapped = False

    def __init__(self, settings: LocalSettings, line: HorovodLine) -> None:
        self.restarts: int | None = 0
        self._settings = settings
        self._line = line

    def prepare(self, node: str, pod_uid: str, run_dir: Path, port: int) -> Process:
        """Build horovodrun's command and environment, with the ssh that the sidecar delivered."""
        settings = self._settings
        command = self._line.full_command(
            run_dir / layout.DISCOVER_HOSTS,
            nodes=settings.nodes,
            min_nodes=settings.min_nodes,
            max_nodes=settings.max_nodes,
        )
        environment = horovodrun_environment(settings, node, run_dir)
        own = shutil.which(command[0], path=environment["PATH"])
        start = started_lightly(own) if own is not None else command[:1]
        return Process((*start, *command[1:]), environment)

    def after(self, node: str, status: int, restarts: int) -> tuple[Next, str]:
        """Decide against a restart: what it has trained was in its workers' memory."""
        return after_horovodrun(status)


class ExecHost:
    """The agent that starts horovodrun's workers on their node, and outlives them.

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
