# SPDX-License-Identifier: Apache-2.0
"""One rank as a process of its own, as torchrun would start it, beside no torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import muster

ROOT = Path(muster.__file__).parents[1]
SCRIPTS = ROOT / "tests" / "support" / "scripts"
START_S = 240.0
"""For libraries to be imported, or a step to be trained: this only ends what hangs."""


@contextmanager
def worker(
    script: Path, *arguments: str | Path, run_dir: Path, master: str = "", **environ: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a script as the only worker of the round that ``master`` names; kill it at the end."""
    address, _, port = master.partition(":")
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}",
        "HOME": str(run_dir),
        "MUSTER_RUN_DIR": str(run_dir),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **({"TORCHELASTIC_RUN_ID": "job"} if master else {}),
        **({"MASTER_ADDR": address, "MASTER_PORT": port} if master else {}),
        **environ,
    }
    process = subprocess.Popen(
        [sys.executable, script, *arguments],
        env=env,
        cwd=run_dir,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
