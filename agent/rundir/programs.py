# SPDX-License-Identifier: Apache-2.0
"""The programs that the sidecar delivers to the training container: one executable file each.

Such a file is a zip archive that Python runs, behind a line of shell that looks for Python: it is
renamed into place whole, so that no program is ever half of one version and half of the next.
Python runs it isolated from the user's packages and variables, and without their start-up time.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from launcher_shim.pod.launchers import CENTRAL, LAUNCHERS
from launcher_shim.rundir import layout

_ROOMS = ("", "pod", "warm", "rundir", "tcpstore", *(one.folder for one in LAUNCHERS))
"""The contents of the programs: these folders of ``launcher_shim``, without their subfolders."""
_TOP = ("__init__", "exit_status", "launcher")
"""The modules of ``launcher_shim`` itself that they need."""
_EXEC_ROOMS = ("", CENTRAL.agent, "warm", "rundir")
"""The same for the programs that start a central launcher's workers."""
_HEAD = """\
#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Part of Muster; what follows these lines is a zip archive that Python runs.
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 131' QUIT
trap 'exit 143' TERM
# Python takes some time to start. Blocked, a signal that comes meanwhile waits for it.
block="env --block-signal=TERM,INT,QUIT,HUP"
$block true >/dev/null 2>&1 || block=
for python in python3 python; do
    if command -v "$python" >/dev/null 2>&1; then exec $block "$python" -I -S "$0" "$@"; fi
done
echo "$0: there is no python3 in the PATH of this container" >&2
exit 127
"""
_MAIN = """\
import sys
if sys.version_info < (3, 8):
    sys.exit(sys.argv[0] + ": 3.8 or newer is needed, and python3 is " + sys.version.split()[0])
from launcher_shim.exit_status import block_signals
block_signals()
from launcher_shim.{module} import main
sys.exit(main())
"""
PROGRAMS = {
    layout.MUSTER_RUN: "pod.run",
    "muster-hold": "pod.hold",
    **{one.name: one.program for one in LAUNCHERS},
}
"""Program name to the module of ``launcher_shim`` that it runs."""

_EXEC_HEAD = """\
#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Part of Muster; what follows these lines is a zip archive that Python imports from.
for python in python3 python; do
    if command -v "$python" >/dev/null 2>&1; then exec "$python" -I -S -c 'import sys
sys.argv[0] = sys.argv.pop(1)
if sys.version_info < (3, 8):
    sys.exit(sys.argv[0] + ": 3.8 or newer is needed, and python3 is " + sys.version.split()[0])
sys.path.insert(0, sys.argv[0])
from launcher_shim.{room}.{module} import main
sys.exit(main(sys.argv[1:]))' "$0" "$@"; fi
done
echo "$0: there is no python3 in the PATH of this container" >&2
exit 127
"""
"""Imports from the archive: to run it as a program takes Python longer, and each
worker has one."""
EXEC_PROGRAMS = {layout.KUBEXEC: "client", f"{layout.PROGRAMS}/{layout.MUSTER_EXEC}": "server"}
"""Path in the run directory to the module of the launcher's agent that it runs."""

PACKAGES = Path(__file__).parents[2]
"""The folder of the program's packages. ``importlib.resources`` would cost every sidecar memory."""

LIBRARY_HOME = PACKAGES if (PACKAGES / "muster").is_dir() else PACKAGES.parents[1]
"""The folder that has the package ``muster``. In an installation the program lies inside of it."""

_LONG_AGO = (1980, 1, 1, 0, 0, 0)


def program(name: str) -> bytes:
    """Build one of ``PROGRAMS``; the same sources give the same bytes."""
    main = _MAIN.format(module=PROGRAMS[name])
    contents = {**_way(_ROOMS), **dict(_sources(_ROOMS))}
    return _built(_HEAD, {"__main__.py": main.encode(), **contents})


def exec_program(path: str) -> bytes:
    """Build one of ``EXEC_PROGRAMS``; the same sources give the same bytes."""
    room = CENTRAL.agent.replace("/", ".")
    head = _EXEC_HEAD.format(room=room, module=EXEC_PROGRAMS[path])
    return _built(head, {**dict(_sources(_EXEC_ROOMS)), **_way(_EXEC_ROOMS)})


def _way(rooms: Iterable[str]) -> dict[str, bytes]:
    """Return the packages that the rooms lie in, empty."""
    inside = (room.rpartition("/")[0] for room in rooms)
    return {f"launcher_shim/{room}/__init__.py": b"" for room in inside if room}


def _sources(rooms: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield every module of some folders of ``launcher_shim``: name in an archive, and text."""
    for room in rooms:
        for source in sorted((PACKAGES / "launcher_shim" / room).iterdir()):
            if source.suffix == ".py" and (room or source.stem in _TOP):
                name = "/".join(filter(None, ("launcher_shim", room, source.name)))
                yield name, source.read_bytes()


def _built(head: str, contents: Mapping[str, bytes]) -> bytes:
    built = io.BytesIO()
    built.write(head.encode())
    with zipfile.ZipFile(built, "a") as archive:
        for name, content in contents.items():
            archive.writestr(_entry(name), content)
    return built.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(name, _LONG_AGO)
