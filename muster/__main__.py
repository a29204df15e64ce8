# SPDX-License-Identifier: Apache-2.0
"""The command ``muster``, and ``python -m muster``: finds the program beside this library.

The program's packages (``agent``, ``console``, ``launcher_shim``, ``rdzv``) have names that users'
own modules have, too. So an installation has them in ``muster/_program``, where no ``import`` of a
user's sees them, and this module puts their folder first for its own process alone, before the
entries of ``PYTHONPATH``. In a checkout, or an editable installation, they lie beside ``muster``.
Where the library is installed alone, they are missing.
"""

from __future__ import annotations

import sys
from pathlib import Path


def program_folder(library: Path) -> Path:
    """Return the folder of the program's packages, given the folder of this library."""
    installed = library / "_program"
    return installed if installed.is_dir() else library.parent


def main() -> None:
    """Run the command line and end the process with its exit status."""
    folder = program_folder(Path(__file__).resolve().parent)
    if not (folder / "launcher_shim").is_dir():
        sys.exit(
            "muster: only the library is installed here. The command is in muster-elastic, for"
            " Python 3.11 or newer: pip install muster-elastic"
        )
    sys.path.insert(0, str(folder))
    from console.main import main as command_line

    command_line()


if __name__ == "__main__":
    main()
