# SPDX-License-Identifier: Apache-2.0
"""The lab's cgroups: one for its own processes, one per node for pods; version 1 hierarchies."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

from kubelab.errors import LabError, MachineUnfit
from kubelab.layout import CGROUP, CGROUP_ROOT, NODES
from kubelab.processes import signal_process

CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "pids", "freezer", "devices", "blkio")
CPU_SHARES = 20 * 1024
"""CPU shares of all pods together. Every process outside of a cgroup has 1024: with only as much
for the whole cluster, pods would starve as soon as anything else runs on the machine."""


def hierarchies() -> list[Path]:
    """Return the mount points of all version 1 hierarchies; controllers may share one."""
    found = []
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup" and Path(where).parent == CGROUP_ROOT:
            found.append(Path(where))
    return found


def require() -> None:
    """Raise MachineUnfit if the lab's cgroups cannot be created."""
    missing = [name for name in CONTROLLERS if not (CGROUP_ROOT / name).is_dir()]
    if missing:
        raise MachineUnfit(
            f"scripts/kubelab needs cgroup version 1 hierarchies under {CGROUP_ROOT}, and there is"
            f" none for {', '.join(missing)}: use a machine that mounts them."
        )
    try:
        if not (CGROUP_ROOT / "pids" / CGROUP).is_dir():
            (CGROUP_ROOT / "pids" / CGROUP).mkdir()
            (CGROUP_ROOT / "pids" / CGROUP).rmdir()
    except OSError as error:
        raise MachineUnfit(
            f"scripts/kubelab cannot make cgroups under {CGROUP_ROOT} ({error.strerror}):"
            " run it as root, outside of a container that holds them read-only."
        ) from error


def make() -> None:
    """Create all cgroups, with the processors and memory nodes of their parents."""
    for hierarchy in hierarchies():
        for name in (CGROUP, f"{CGROUP}/host", *(node.cgroup for node in NODES)):
            cgroup = hierarchy / name
            cgroup.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (cgroup / file).exists() and not (cgroup / file).read_text().strip():
                    (cgroup / file).write_text((cgroup.parent / file).read_text())
        if (hierarchy / CGROUP / "cpu.shares").exists():
            (hierarchy / CGROUP / "cpu.shares").write_text(str(CPU_SHARES))


def pids_in(name: str) -> set[int]:
    """Return the processes in a cgroup of the lab and below it."""
    found: set[int] = set()
    for cgroup in _bottom_up(CGROUP_ROOT / "pids" / name):
        try:
            found |= {int(pid) for pid in (cgroup / "cgroup.procs").read_text().split()}
        except (FileNotFoundError, OSError):
            continue
    return found


def kill_all(name: str, timeout_s: float = 60.0) -> None:
    """Send SIGKILL until a cgroup and all below it are empty; LabError after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while pids := pids_in(name):
        if time.monotonic() > deadline_s:
            raise LabError(f"processes {sorted(pids)} of the lab outlive SIGKILL")
        for pid in pids:
            signal_process(pid, signal.SIGKILL)
        time.sleep(0.02)


def remove(timeout_s: float = 60.0) -> None:
    """Remove all of the lab's cgroups; wait for ended processes to leave theirs."""
    deadline_s = time.monotonic() + timeout_s
    for hierarchy in hierarchies():
        for cgroup in _bottom_up(hierarchy / CGROUP):
            while True:
                try:
                    cgroup.rmdir()
                except FileNotFoundError:
                    break
                except OSError as error:
                    if time.monotonic() > deadline_s:
                        raise LabError(f"{cgroup} cannot be removed: {error.strerror}") from error
                    time.sleep(0.05)
                else:
                    break


def _bottom_up(cgroup: Path) -> Iterator[Path]:
    try:
        below = [entry for entry in cgroup.iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return
    for entry in below:
        yield from _bottom_up(entry)
    yield cgroup
