# SPDX-License-Identifier: Apache-2.0
"""What starts horovodrun's workers, as files that a test may change: the sidecar delivers it whole.

The launcher's side is ``kubexec.sh`` beside the modules.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import launcher_shim

_KUBEXEC = """#!/bin/sh
exec python3 -I -S -c 'import sys
sys.path.insert(0, sys.argv.pop(1))
from launcher_shim.horovod.exec.client import main
sys.exit(main(sys.argv[1:]))' "${0%/*}/python" "$@"
"""


def copy_exec(directory: Path) -> None:
    """Copy the modules into ``python`` of a directory, and make its ``kubexec.sh``."""
    shim, target = Path(launcher_shim.__file__).parent, directory / "python" / "launcher_shim"
    for room in (Path("rundir"), Path("horovod", "exec"), Path("warm")):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(shim / room, target / room, ignore=ignored)
    for module in ("__init__.py", "exit_status.py", "horovod/__init__.py"):
        shutil.copy(shim / module, target / module)
    (directory / "kubexec.sh").write_text(_KUBEXEC)
    (directory / "kubexec.sh").chmod(0o755)
