# SPDX-License-Identifier: Apache-2.0
"""How the image's horovodrun is started: by its entry point instead of by its script.

For each look at the host list, one a second, and for each worker, horovodrun starts a Python that
``multiprocessing`` has run its parent's script again: all of horovodrun is imported to run one
command. A program without a script, ``python -c``, is not run again in its children.
"""

from __future__ import annotations

import re
from typing import List, Optional, Tuple

HEAD_BYTES = 4096
"""More than such a script has."""

_START = """\
import os, sys
del sys.argv[0]
if sys.path[:1] == [""]:
    sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
from horovod.runner.launch import run_commandline
sys.exit(run_commandline())
"""
"""What the script does. Python searches the script's folder first, and not the working directory,
in which a user's file may have the name of a module."""

_SHEBANG = re.compile(rb"#![ \t]*(\S+)[ \t]*(.*)")
_PYTHON = re.compile(rb"(.*/)?python[0-9.]*")
_ENTRY_POINT = re.compile(
    rb"^from horovod\.runner\.launch import run_commandline\b.*^if __name__ == ['\"]__main__['\"]:",
    re.MULTILINE | re.DOTALL,
)


def started_lightly(program: str) -> List[str]:
    """Return the words that start the horovodrun at ``program``, before its arguments.

    Those of its entry point; the program alone where it is not the script that installers write.
    """
    try:
        with open(program, "rb") as file:
            interpreter = _interpreter(file.read(HEAD_BYTES))
    except OSError:
        interpreter = None
    return [program] if interpreter is None else [*interpreter, "-c", _START, program]


def _interpreter(head: bytes) -> Optional[Tuple[str, ...]]:
    """The first words of such a script's interpreter, as the kernel has them; None for others."""
    shebang = _SHEBANG.match(head)
    if shebang is None or not _ENTRY_POINT.search(head):
        return None
    name, argument = shebang.group(1), shebang.group(2).rstrip()
    python = argument.split()[-1:] if name.endswith(b"/env") else [name]
    if not python or not _PYTHON.fullmatch(python[0]):
        return None
    words = (name, argument) if argument else (name,)
    return tuple(word.decode("utf-8", "surrogateescape") for word in words)
