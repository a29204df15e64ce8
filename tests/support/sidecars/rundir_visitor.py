# SPDX-License-Identifier: Apache-2.0
"""What either container of a pod does in the run directory, and what it finds that it can do.

``train RUN_DIR`` is the training container's side, ``watch RUN_DIR`` the sidecar's, ``meddle
RUN_DIR`` that of a second training container. Prints a JSON object. Runs under one user or the
other, by ``as_user.py``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from agent.rundir.reports import read_launch, read_lines
from launcher_shim.pod.launch import Reporter
from muster.gate import GateFile
from muster.progress import ProgressFile


def main() -> None:
    role, run_dir = sys.argv[1], Path(sys.argv[2])
    told = {"train": train, "watch": watch, "meddle": meddle}[role](run_dir)
    sys.stdout.write(json.dumps(told) + "\n")


def train(run_dir: Path) -> dict[str, object]:
    gate = GateFile(str(run_dir))
    told = {
        "variables": "PET_NNODES" in (run_dir / "env").read_text(),
        "hosts": subprocess.run([run_dir / "discover_hosts.sh"], capture_output=True).returncode,
        "program": (run_dir / "bin" / "muster-run").read_bytes()[:2] == b"#!",
        "library": (run_dir / "python" / "muster" / "__init__.py").stat().st_size > 0,
        "gate": gate.read() is not None and gate.by_page,
        "connected": [connects(run_dir / name) for name in ("c10d.sock", "notice.sock")],
    }
    for process in range(2):  # the second is that of a later round
        rank = ProgressFile(str(run_dir / "progress"), {"RANK": "3", "LOCAL_RANK": "1"})
        rank.write(7 + process)
        rank.close()
    Reporter(str(run_dir)).look()
    return told | {"replaceable": replaceable(run_dir)}


def watch(run_dir: Path) -> dict[str, object]:
    return {
        "steps": [line.step for line in read_lines(run_dir / "progress")],
        "launch": read_launch(run_dir) is not None,
    }


def meddle(run_dir: Path) -> dict[str, object]:
    return {name: replaceable(run_dir / name) for name in ("progress", "launch")}


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    return True


def replaceable(directory: Path) -> list[str]:
    """What this user could take away although it is the other's; each is put back."""
    found = []
    for path in sorted(directory.iterdir()):
        if path.lstat().st_uid != os.geteuid():
            with suppress(PermissionError):
                path.rename(directory / "taken")
                (directory / "taken").rename(path)
                found.append(path.name)
    return found
