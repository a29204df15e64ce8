# SPDX-License-Identifier: Apache-2.0
"""The size of a Horovod job and the roles of its pods, by its manifest alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from injection import facts
from injection.kinds import Kind
from injection.launches import HOROVODRUN, words_of
from injection.workloads import Role, Template, Workload
from injection.yaml_tree import value_of
from launcher_shim.pod.horovod_line import (
    LEAST,
    MOST,
    PROCESSES,
    SLOTS,
    GivenOptions,
    read_options,
)

_OF_MPI = ("mpirun", "mpiexec", "orterun")
_ACTIVATES = ("activate", "activate.sh")
TUNNEL_PORT = 9401


@dataclass(frozen=True, slots=True)
class LauncherSays:
    """The numbers that a horovodrun in a launcher's command is given; None if it is not."""

    least: int | None = None
    most: int | None = None
    slots: int | None = None


def role_of(workload: Workload, template: Template, told: str | None) -> Role | None:
    """Return a pod's role for a horovodrun; None if it has nothing to do with one."""
    kind = workload.known or Kind(())
    if kind.horovod:
        return template.role
    return None if told is None else "launcher" if told == "launcher" else "worker"


def line_of_job(workload: Workload, container: Mapping[str, Any]) -> LauncherSays:
    """Read the options of the object's horovodrun: in its launcher's command, else this one's."""
    for one in launchers(workload, container):
        given = _options(one)
        if given is not None:
            return LauncherSays(
                _count(given.value(LEAST)) or _count(given.value(PROCESSES)),
                _count(given.value(MOST)),
                _count(given.value((SLOTS,))),
            )
    return LauncherSays()


def launchers(workload: Workload, container: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the containers of the object's launcher; of an object without one this container."""
    kind = workload.known or Kind(())
    containers = [container]
    if kind.launcher is not None:
        for template in workload.templates_at(kind.launcher):
            pod = (value_of(template.node) or {}).get("spec") or {}
            containers = [c for c in facts.listed(pod, "containers") if isinstance(c, Mapping)]
    return containers


def starts_mpi(container: Mapping[str, Any]) -> str | None:
    """Return the MPI program in a container's command if that has no horovodrun, else None."""
    found = [word.rpartition("/")[2] for line in _lines(container) for word in line]
    return None if HOROVODRUN in found else next((one for one in found if one in _OF_MPI), None)


def goes_past(container: Mapping[str, Any], ours: str) -> str | None:
    """Return the word of a shell line that leads to a horovodrun other than ``ours``, or None.

    That is its path, or the activation of an environment before it.
    """
    for line in _lines(container)[1:]:
        activated = None
        for word in line:
            folder, _, name = word.rstrip(";").rpartition("/")
            if name in _ACTIVATES:
                activated = activated or word
            if name == HOROVODRUN and word != ours and (folder or activated):
                return word if folder else activated
    return None


def _lines(container: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    """Return a container's command, and each line of shell that may be in it, as words."""
    words = [
        *map(str, facts.listed(container, "command")),
        *map(str, facts.listed(container, "args")),
    ]
    return (words, *(words_of(word) for word in words if " " in word.strip()))


def _options(container: Mapping[str, Any]) -> GivenOptions | None:
    """Parse the options of the horovodrun in a container's command or in its lines of shell.

    None if there is no horovodrun.
    """
    for candidate in _lines(container):
        for number, word in enumerate(candidate):
            if word.rpartition("/")[2] == HOROVODRUN:
                return read_options(candidate[number + 1 :])
    return None


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) else None
