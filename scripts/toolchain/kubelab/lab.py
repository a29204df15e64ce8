# SPDX-License-Identifier: Apache-2.0
"""The lab as a whole: up, down and status."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kubelab import cgroups, control_plane, images, needs, network, node
from kubelab.errors import LabError
from kubelab.layout import (
    CGROUP,
    FOR_TESTS,
    KUBECONFIG,
    LOCK,
    MADE_BY_TESTS,
    NODES,
    PROGRAMS,
    STATE,
    NodeLayout,
)
from kubelab.processes import pid_of, stop

_FOUND = STATE / "found.json"
"""The former state of the machine: kernel settings, and folders that had to be created."""

_KERNEL_SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
"""The kernel settings that a kubelet changes when it starts."""


@dataclass(frozen=True)
class Status:
    """The lab's running processes and ready nodes."""

    running: dict[str, bool]
    ready_nodes: list[str]

    @property
    def up(self) -> bool:
        """Whether every process runs and both nodes accept pods."""
        return all(self.running.values()) and len(self.ready_nodes) == len(NODES)


@dataclass(frozen=True)
class Prepared:
    """The parts that a lab is built from; they stay on the machine."""

    programs: Path
    etcd: Path
    archives: list[Path]
    """The archives of the images that are loaded into both nodes."""


@contextmanager
def locked() -> Iterator[None]:
    """Hold the lock within the context, so that only one process changes the lab at a time."""
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepare() -> Prepared:
    """Download, install and build missing parts; raises MachineUnfit if the lab cannot run here."""
    needs.require()
    programs = needs.programs()
    etcd = needs.toolchain("etcd")
    of_etcd = images.etcd(etcd, needs.toolchain("etcdutl"))
    archives = [images.pause(programs), images.trainer(), of_etcd]
    return Prepared(programs, etcd, archives)


def up() -> None:
    """Create the lab, or its missing parts."""
    prepared = prepare()
    _claim()
    if status().up:
        return
    STATE.mkdir(mode=0o711, exist_ok=True)
    if not PROGRAMS.exists():
        # Also if the link points to a cache that is gone.
        PROGRAMS.unlink(missing_ok=True)
        PROGRAMS.symlink_to(prepared.programs)
    _remember()
    cgroups.make()
    network.make()
    control_plane.up(prepared.etcd)
    for layout in NODES:
        node.start_runtime(layout)
    images.load(prepared.archives)
    for layout in NODES:
        node.start_kubelet(layout)
    control_plane.wait_until("service accounts", "get", "serviceaccount", "default", "-o", "name")
    for layout in NODES:
        control_plane.wait_until(
            f"{layout.name} is ready",
            *("wait", "--for=condition=Ready", f"node/{layout.name}", "--timeout=30s"),
        )


def down() -> None:
    """Stop everything and remove all but the cache, installed packages and the lock file."""
    for layout in NODES:
        node.stop_all(layout)
    for name in reversed(control_plane.PARTS):
        stop(name)
    cgroups.kill_all(CGROUP)
    network.remove()
    _put_back()
    cgroups.remove()
    if STATE.exists():
        shutil.rmtree(STATE)
    MADE_BY_TESTS.unlink(missing_ok=True)


def status() -> Status:
    """Return the processes that run and the nodes that report ready."""
    names = [*control_plane.PARTS]
    for layout in NODES:
        names += [f"containerd-{layout.name}", f"kubelet-{layout.name}"]
    running = {name: pid_of(name) is not None for name in names}
    ready: list[str] = []
    if running["kube-apiserver"] and KUBECONFIG.exists():
        try:
            listed = json.loads(control_plane.kubectl("get", "nodes", "-o", "json"))
        except LabError:
            listed = {"items": []}
        for item in listed["items"]:
            conditions = {c["type"]: c["status"] for c in item["status"]["conditions"]}
            if conditions.get("Ready") == "True":
                ready.append(item["metadata"]["name"])
    return Status(running, sorted(ready))


def layout_of(name: str) -> NodeLayout:
    """Return the node of that name; raises LabError if there is none."""
    for layout in NODES:
        if layout.name == name:
            return layout
    raise LabError(f"there is no node {name}: {' or '.join(layout.name for layout in NODES)}.")


def _claim() -> None:
    """Record the owner of the lab: tests that create it, until a person brings it up, too."""
    if FOR_TESTS not in os.environ:
        MADE_BY_TESTS.unlink(missing_ok=True)
    elif not STATE.exists():
        MADE_BY_TESTS.touch()


def _remember() -> None:
    if not _FOUND.exists():
        made = []
        for folder in node.PRIVATE:
            path = Path(folder)
            while not path.exists():
                made.append(str(path))
                path = path.parent
        settings = {name: (Path("/proc/sys") / name).read_text() for name in _KERNEL_SETTINGS}
        # Renamed into place first: an incomplete file would restore only a part, or nothing.
        aside = _FOUND.with_suffix(".part")
        aside.write_text(json.dumps({"made": made, "settings": settings}))
        aside.replace(_FOUND)
    for folder in node.PRIVATE:
        Path(folder).mkdir(parents=True, exist_ok=True)


def _put_back() -> None:
    if not _FOUND.exists():
        return
    found = json.loads(_FOUND.read_text())
    for name, value in found["settings"].items():
        (Path("/proc/sys") / name).write_text(value)
    for folder in found["made"]:
        try:
            Path(folder).rmdir()
        except OSError:
            # Another program uses it by now.
            continue
