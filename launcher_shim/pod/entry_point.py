# SPDX-License-Identifier: Apache-2.0
"""The start of the image's horovodrun: by its entry point instead of by its script.

For each poll of the host list, one a second, and for each worker, horovodrun starts a Python in
which ``multiprocessing`` runs its parent's script again: all of horovodrun is imported to run one
command. A program without a script, ``python -c``, is not run again in its children.
"""

from __future__ import annotations

import re
from typing import List, Optional, Tuple

SCRIPT_BYTES = 4096
"""Maximum size of such a script; a longer one does more."""

_START = """\
import os, sys
try:
    with open("/proc/self/comm", "wb") as name:
        name.write(b"horovodrun")
except OSError:
    pass
del sys.argv[0]
if sys.path[:1] == [""]:
    sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
from horovod.runner.launch import run_commandline
sys.exit(run_commandline())
"""
"""The same as such a script does. Its process gets the script's name, as the kernel gives it:
``pkill`` and ``pgrep -x`` go by that; if it cannot be given, all else works. Python searches the
script's folder first, and not the working directory, in which a user's file may have the name of a
module."""

_SHEBANG = re.compile(rb"#![ \t]*(\S+)[ \t]*(.*)")
_PYTHON = re.compile(rb"(.*/)?python[0-9.]*")
_IMPORTS = b"from horovod.runner.launch import run_commandline"
_GUARD = b"if __name__ == '__main__':"
_ENDS = b"    sys.exit(run_commandline())"
_SCRIPTS = frozenset(
    (*modules, _IMPORTS, _GUARD, *cuts, _ENDS)
    for modules, cuts in (
        (  # installer, older pip, older uv
            (b"import re", b"import sys"),
            (rb"    sys.argv[0] = re.sub(r'(-script\.pyw|\.exe)?$', '', sys.argv[0])",),
        ),
        (  # conda
            (b"import re", b"import sys"),
            (rb"    sys.argv[0] = re.sub(r'(-script\.pyw?|\.exe)?$', '', sys.argv[0])",),
        ),
        (  # pip
            (b"import sys",),
            (b"    sys.argv[0] = sys.argv[0].removesuffix('.exe')",),
        ),
        (  # uv
            (b"import sys",),
            (
                b"    if sys.argv[0].endswith('-script.pyw'):",
                b"        sys.argv[0] = sys.argv[0][:-11]",
                b"    elif sys.argv[0].endswith('.exe'):",
                b"        sys.argv[0] = sys.argv[0][:-4]",
            ),
        ),
    )
)
"""The scripts that installers write: lines without comments and blank ones, and with one kind of
quotes. The lines between guard and end cut off the suffixes of the name on Windows."""


def started_lightly(program: str) -> List[str]:
    """Return the words that start the horovodrun at ``program``, before its arguments.

    They are those of its entry point; just the program if it is not the script that installers
    write.
    """
    try:
        with open(program, "rb") as file:
            interpreter = _interpreter(file.read(SCRIPT_BYTES + 1))
    except OSError:
        interpreter = None
    return [program] if interpreter is None else [*interpreter, "-c", _START, program]


def _interpreter(script: bytes) -> Optional[Tuple[str, ...]]:
    """Return the interpreter's words of such a script, as the kernel has them; None for others."""
    shebang = _SHEBANG.match(script)
    if shebang is None or len(script) > SCRIPT_BYTES or _code(script) not in _SCRIPTS:
        return None
    name, argument = shebang.group(1), shebang.group(2).rstrip()
    python = argument.split()[-1:] if name.endswith(b"/env") else [name]
    if not python or not _PYTHON.fullmatch(python[0]):
        return None
    words = (name, argument) if argument else (name,)
    return tuple(word.decode("utf-8", "surrogateescape") for word in words)


def _code(script: bytes) -> Tuple[bytes, ...]:
    lines = script.replace(b'"', b"'").split(b"\n")
    return tuple(line for line in lines if line.strip() and not line.startswith(b"#"))
