# SPDX-License-Identifier: Apache-2.0
"""``horovodrun``, first in the PATH of a command: the image's own, as a launcher of Muster's.

In a launcher's container it gets Muster's host list, and starts its workers through the sidecar;
anywhere else it is the image's own with the same arguments. Files that an operator mounts read-only
at ``/etc/mpi`` are not changed: Horovod does not use them. It starts by the image's entry point.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from launcher_shim.horovod.line import (
    LEAST,
    MOST,
    PROCESSES,
    SLOTS,
    TELLS_ONLY,
    JobSize,
    arguments,
    environment,
    local_arguments,
    local_slots,
    read_options,
    variables,
)
from launcher_shim.launcher import GivenSizes, Launcher, LocalLine
from launcher_shim.rundir import layout

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

    For each poll of the host list, one a second, and for each worker, horovodrun starts a
    Python in which ``multiprocessing`` runs its parent's script again: all of horovodrun is
    imported to run one command. A program without a script, ``python -c``, is not run again in
    its children.
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


_SIOCGIFADDR = 0x8915  # linux/sockios.h
_USUAL_INTERFACE = "eth0"


class HorovodLauncher(Launcher):
    """horovodrun: one for the job, in a pod of its own, where it gets Muster's host list."""

    name = "horovodrun"
    library = "Horovod"
    folder = "horovod"
    agent = "horovod/exec"
    modules = ("horovod.runner.launch",)
    has_rounds = False
    is_central = True
    prefix = r"\[(\d+)\]<(?:stdout|stderr)>:"
    paused = (
        "horovodrun and its workers wait in their pods, with what they trained in memory. They may"
        " be deleted only if the script saves when it is asked to. horovodrun waits for"
        " --elastic-timeout, a week unless you gave it another."
    )
    waits_in = r"/horovod/[^/]+/(mpi_ops|functions)\.py$|/horovod/common/"

    def found_in(self, words: Sequence[str], at: int) -> int:
        """See ``Launcher``: its module is not looked for in processes."""
        return at + 1 if os.path.basename(words[at]) == self.name else 0

    def found_first(
        self, command: Sequence[str], environ: Mapping[str, str]
    ) -> Tuple[List[str], Dict[str, str]]:
        """See ``Launcher``: one given by its path is found right behind the PATH's first."""
        folder, name = os.path.split(command[0])
        if name != self.name or not folder:
            return list(command), dict(environ)
        ours, colon, rest = environ.get("PATH", os.defpath).partition(os.pathsep)
        path = os.pathsep.join([ours, folder, *([rest] if colon else [])])
        return [name, *command[1:]], {**environ, "PATH": path}

    def started(
        self,
        own: str,
        words: Sequence[str],
        environ: Mapping[str, str],
        delivered: Mapping[str, str],
        run_dir: str,
    ) -> Tuple[List[str], Dict[str, str], List[str]]:
        """See ``Launcher``: anywhere but in a launcher's pod it is the image's own."""
        given = read_options(words)
        if delivered.get("MUSTER_ROLE") != "launcher" or TELLS_ONLY & set(given.names()):
            return [own, *words], dict(environ), []
        remote = os.path.join(run_dir, layout.REMOTE_SHELL)
        discovery = os.path.join(run_dir, layout.DISCOVER_HOSTS)
        interface = interface_of(delivered.get("PET_LOCAL_ADDR", ""))
        made, said = arguments(words, discovery, interface, JobSize.of(delivered))
        command_bytes = sum(len(os.fsencode(word)) + 3 for word in given.command)
        # The PATH is the image's own: the programs beside this one are only for muster-run.
        kept = environment(environ, run_dir, remote, command_bytes)
        return [*started_lightly(own), *made], kept, said

    def sizes(self, words: Sequence[str]) -> GivenSizes:
        """See ``Launcher``."""
        given = read_options(words)
        least = _count(given.value(LEAST)) or _count(given.value(PROCESSES))
        return GivenSizes(least, _count(given.value(MOST)), _count(given.value((SLOTS,))))

    def local(self, words: Sequence[str], environ: Mapping[str, str]) -> LocalLine:
        """See ``Launcher``."""
        return LocalLine(local_slots(words))

    def started_here(
        self,
        program: Sequence[str],
        words: Sequence[str],
        environ: Mapping[str, str],
        run_dir: str,
        counts: Sequence[int],
    ) -> Tuple[List[str], Dict[str, str]]:
        """See ``Launcher``: with the ssh that the sidecar delivered."""
        made = local_arguments(words, os.path.join(run_dir, layout.DISCOVER_HOSTS), counts)
        kept = variables(environ, run_dir, os.path.join(run_dir, layout.REMOTE_SHELL))
        return [*started_lightly(program[0]), *program[1:], *made], kept


def _count(text: Optional[str]) -> Optional[int]:
    return int(text) if text is not None and text.isdecimal() and int(text) else None


HOROVODRUN = HorovodLauncher()


def interface_of(address: str) -> str:
    """Return the network interface that has the pod's address; ``eth0`` if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address of this family
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return _USUAL_INTERFACE
