# SPDX-License-Identifier: Apache-2.0
"""What a node's training container runs, and what comes after it has ended."""

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
from launcher_shim.pod.entry_point import started_lightly
from launcher_shim.rundir import layout


@dataclass(frozen=True, slots=True)
class Process:
    """A command and its environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


class Payload(Protocol):
    """One node's.

    ``insistent`` is set where one SIGTERM may go unheard, ``wrapped`` where muster-run is around
    the command; ``restarts`` is None without a limit.
    """

    name: str
    role: Literal["worker", "launcher"]
    insistent: bool
    wrapped: bool
    restarts: int | None

    def prepare(self, node: str, pod_uid: str, run_dir: Path, port: int) -> Process:
        """Make ready, and say what is to be started; blocks for as long as the disk does."""

    def after(self, node: str, status: int, restarts: int) -> tuple[Next, str]:
        """What comes after an end of its own, and why."""


class Torchrun:
    """One torchrun on each node; ``closing`` tells how they closed the run, once they have.

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
        """Take what the sidecar has delivered, or without one deliver it."""
        if not self._settings.native:
            environment = launcher_environment(self._settings, node, run_dir, {})
            return Process(_wrapped(self._line.command, run_dir), environment)
        _copy_package(Path(muster.__file__).parent, run_dir / layout.MODULES / "muster")
        delivered = native_delivery(self._settings, port, is_host=node == "node-0")
        environment = launcher_environment(self._settings, node, run_dir, delivered)
        return Process(self._line.command, environment)

    def after(self, node: str, status: int, restarts: int) -> tuple[Next, str]:
        """As the restart policy OnFailure says."""
        return after_exit(node, status, self._settings.restarts - restarts, self._closing())


class Horovodrun:
    """The one horovodrun of a job, on a node of its own.

    Its workers are started through the ``ssh`` that is first on its PATH and only looks like one.
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
        """Say what it is told; its ssh is the one that the sidecar has delivered."""
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
        """It is never started again: what it trained was in its workers' memory."""
        return after_horovodrun(status)


class ExecHost:
    """What starts horovodrun's workers on their node, and outlives them, under ``muster-run``."""

    name = "agent"
    role: Literal["worker", "launcher"] = "worker"
    insistent = False

    def __init__(self, settings: LocalSettings) -> None:
        self.wrapped = True
        self.restarts: int | None = None
        self._settings = settings

    def prepare(self, node: str, pod_uid: str, run_dir: Path, port: int) -> Process:
        """Take what the sidecar has delivered."""
        command = (str(run_dir / layout.PROGRAMS / layout.MUSTER_EXEC),)
        environment = launcher_environment(self._settings, node, run_dir, {})
        return Process(_wrapped(command, run_dir), environment)

    def after(self, node: str, status: int, restarts: int) -> tuple[Next, str]:
        """Started again, as often as it takes."""
        return "restart", f"its agent ended with {status}, and starts again"


def _wrapped(command: tuple[str, ...], run_dir: Path) -> tuple[str, ...]:
    """The same command under the ``muster-run`` that the sidecar has delivered."""
    return (str(run_dir / layout.PROGRAMS / layout.MUSTER_RUN), "--", *command)


def _copy_package(source: Path, target: Path) -> None:
    # What is compiled appears and goes while others run.
    ignored = shutil.ignore_patterns("__pycache__", "_program")
    shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
