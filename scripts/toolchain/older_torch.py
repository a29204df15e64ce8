# SPDX-License-Identifier: Apache-2.0
"""Older releases of torch, each in a virtual environment of its own in the cache.

``scripts/toolchain/older_torch.py 2.6.0`` creates one by hand.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

NUMPY = {"2.6.0": "numpy==2.2.6", "2.9.1": "numpy==2.2.6"}
SETUP_TIMEOUT_S = 3600


def python_with_torch(version: str) -> str:
    """Return the python of an environment with this torch; creates it if missing: 2.5 GB, once."""
    cache = Path(os.environ.get("MUSTER_CACHE") or Path.home() / ".cache" / "muster")
    venv = cache / f"torch-{version}"
    python, complete = venv / "bin" / "python", venv / ".complete"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"torch-{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            sys.stderr.write(
                f"Setting up torch {version} in {venv}: downloads about 2.5 GB, takes about 5 GB"
                " and 5 to 15 minutes (once).\n"
            )
            subprocess.run([sys.executable, "-m", "venv", venv], check=True)
            subprocess.run(
                [
                    *(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
                    *(f"torch=={version}", NUMPY[version]),
                ],
                check=True,
                timeout=SETUP_TIMEOUT_S,
            )
            complete.touch()
    return str(python)


if __name__ == "__main__":
    sys.stdout.write(f"{python_with_torch(sys.argv[1])}\n")
