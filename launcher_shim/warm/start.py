# SPDX-License-Identifier: Apache-2.0
"""The start of a zygote by the torchrun whose workers it makes (``MUSTER_WARM=1``).

torchrun starts ``PYTHON_EXEC`` as its workers' interpreter, where that is set: its own documented
override. Here it names the stub.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any, Dict, List, Mapping

from launcher_shim.rundir import layout
from launcher_shim.warm import wire
from launcher_shim.warm.stub import ANSWER_TIMEOUT_S, note
from launcher_shim.warm.zygote import MARK, ROOM, command

log = logging.getLogger(__name__)

VARIABLE = "MUSTER_WARM"
BACKLOG = 64
FOLDER = "muster-warm-"
STUB = "python"
TRIAL_TIMEOUT_S = 10.0
_STUB = """\
#!{python} -IS
import sys
sys.path.insert(0, {archive!r})
from launcher_shim.warm.stub import main
main()
"""
"""Started without a shell, which would add variables of its own."""

_zygotes: "List[subprocess.Popen[bytes]]" = []
"""That of this process: kept, as it is to be no orphan."""


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Read whether workers start warm; raises ``ValueError`` with one sentence."""
    text = environ.get(VARIABLE, "").strip()
    if text not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} is {text!r}: give 1 for workers that start warm, or 0")
    return text == "1"


def offer(archive: str) -> None:
    """Have torchrun, which is this process, start workers by a stub.

    ``archive`` has Muster's modules. An interpreter that the user has set stays.
    """
    forget_notes(os.environ)
    if wire.OVERRIDE in os.environ:
        _without(f"{wire.OVERRIDE} is set")
        return
    try:
        os.environ[wire.OVERRIDE] = made_stub(archive)
    except (OSError, subprocess.SubprocessError) as error:
        _without(f"there is no folder in which a program runs: {error}")


def forget_notes(environ: Mapping[str, str]) -> None:
    """Delete the notes on the workers of a torchrun, or an agent, before this one."""
    notes = os.path.join(environ.get("MUSTER_RUN_DIR", ""), layout.PLAIN_STARTS)
    with suppress(OSError):
        for name in os.listdir(notes):
            os.unlink(os.path.join(notes, name))


def made_stub(archive: str) -> str:
    """Write a stub of this process's Python, and return its path.

    Raises ``OSError`` and ``subprocess.SubprocessError`` if no program runs in a new folder.
    """
    folder = tempfile.mkdtemp(prefix=FOLDER)  # no other user may look into it
    # The zygote removes it as well: it is there after a SIGKILL to this process.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    stub = os.path.join(folder, STUB)
    with open(os.open(stub, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "w") as file:
        file.write(_STUB.format(python=sys.executable, archive=archive))
    subprocess.run([stub, wire.TRIAL], check=True, timeout=TRIAL_TIMEOUT_S)
    return stub


def _without(why: str) -> None:
    """Say that no worker of this torchrun starts warm: in its log, and to its sidecar."""
    log.warning("workers start without a zygote: %s", why)
    note(os.environ, why)


def begin(entrypoint: object, archive: str) -> None:
    """Start the zygote, if ``entrypoint`` is the stub and there is none; raises ``OSError``.

    Where it is something else, as with ``--no-python``, workers do not see the override.
    """
    stub = os.environ.get(wire.OVERRIDE, "")
    if os.path.basename(os.path.dirname(stub))[: len(FOLDER)] != FOLDER:
        return  # the user's own, or none
    if entrypoint != stub:
        del os.environ[wire.OVERRIDE]
        _without("torchrun starts another program than Python")
        return
    if any(one.poll() is None for one in _zygotes):
        return
    environ = {name: text for name, text in os.environ.items() if name != wire.OVERRIDE}
    start_zygote(stub, archive, environ)


def start_zygote(
    stub: str, archive: str, environ: Mapping[str, str], *, whole_groups: bool = False
) -> None:
    """Start a zygote for a stub, with these variables, and await its imports; raises ``OSError``.

    It ends with the thread that calls this. ``whole_groups``: what a worker leaves in its process
    group ends with it.
    """
    place = wire.beside(stub)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(place)
        listening.listen(BACKLOG)
        state: "Dict[str, Any]" = {
            "python": sys.executable,
            "torchrun": os.getpid(),
            "listening": listening.fileno(),
            "socket": place,
            "workers": [],
            "dying": [],
            "whole_groups": whole_groups,
            "wanted": [],
            "without": [],
        }
        words, written = command(sys.executable, archive, state)
        try:
            zygote = subprocess.Popen(
                words,
                env={**environ, MARK: ROOM},
                stdin=subprocess.DEVNULL,
                pass_fds=[listening.fileno(), written],
                start_new_session=True,
            )
        finally:
            os.close(written)
        _zygotes[:] = [zygote]
    _await_imports(place)


def _await_imports(place: str) -> None:
    """Wait until the zygote serves: the world that this torchrun joins is not to wait for it."""
    with suppress(OSError, wire.Unsaid), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(ANSWER_TIMEOUT_S)
        line.connect(place)
        wire.send(line, {"imported": []})
        line.recv(1)  # it closes the line
