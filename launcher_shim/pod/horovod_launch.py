# SPDX-License-Identifier: Apache-2.0
"""``horovodrun``, first in the PATH of a command: the image's own, as a launcher of Muster's.

In a launcher's container it gets Muster's host list, and starts its workers through the sidecar;
anywhere else it is the image's own with the same arguments. Files that an operator mounts read-only
at ``/etc/mpi`` are not changed: Horovod does not use them. It starts by the image's entry point.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import signal
import socket
import struct
import sys
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from launcher_shim.exit_status import (
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    EXIT_USAGE,
    unblock_signals,
)
from launcher_shim.pod.delivery import RunDirectory, configure_log, images_own
from launcher_shim.pod.horovod_line import (
    TELLS_ONLY,
    JobSize,
    LineError,
    arguments,
    environment,
    is_launcher,
    read_options,
)
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


log = logging.getLogger(__name__)

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_USUAL_INTERFACE = "eth0"


def main() -> int:
    """Become the image's horovodrun; return the exit status if that fails."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    unblock_signals()
    configure_log("muster-run")
    words = sys.argv[1:]
    own = images_own(layout.HOROVODRUN, sys.argv[0], os.environ)
    if own is None:
        log.error("horovodrun: not found in the PATH")
        return EXIT_NOT_FOUND
    environ: Mapping[str, str] = os.environ
    run_dir = RunDirectory.find(environ, sys.argv[0])
    try:
        delivered = run_dir.delivered() or {}
    except ValueError as error:
        log.error("%s", error)
        return EXIT_USAGE
    start = [own]
    if is_launcher(delivered) and not TELLS_ONLY & set(read_options(words).names()):
        try:
            words, environ = _as_launcher(words, environ, run_dir, delivered)
        except LineError as error:
            log.error("%s", error)
            return EXIT_USAGE
        start = started_lightly(own)
    try:
        os.execve(start[0], [*start, *words], environ)
    except OSError as error:
        log.error("%s: %s", start[0], error.strerror)
        return EXIT_NOT_EXECUTABLE


def _as_launcher(
    words: Sequence[str],
    environ: Mapping[str, str],
    run_dir: RunDirectory,
    delivered: Mapping[str, str],
) -> Tuple[List[str], Dict[str, str]]:
    remote = os.path.join(run_dir.path, layout.REMOTE_SHELL)
    discovery = os.path.join(run_dir.path, layout.DISCOVER_HOSTS)
    interface = interface_of(delivered.get("PET_LOCAL_ADDR", ""))
    made, said = arguments(words, discovery, interface, JobSize.of(delivered))
    for sentence in said:
        log.info("%s", sentence)
    command_bytes = sum(len(os.fsencode(word)) + 3 for word in read_options(words).command)
    # The PATH is the image's own: the programs beside this one are only for muster-run.
    return made, environment(environ, run_dir.path, remote, command_bytes)


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
