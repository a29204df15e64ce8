# SPDX-License-Identifier: Apache-2.0
"""The launchers that Muster drives: one row each, and the program that runs in their place."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import List, Optional, Sequence, Tuple

from launcher_shim.exit_status import (
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    EXIT_USAGE,
    unblock_signals,
)
from launcher_shim.horovod.launcher import HOROVODRUN
from launcher_shim.launcher import Launcher
from launcher_shim.pod.delivery import RunDirectory, configure_log, images_own
from launcher_shim.rundir import layout
from launcher_shim.torchrun.launcher import TORCHRUN

log = logging.getLogger(__name__)

LAUNCHERS: List[Launcher] = [TORCHRUN, HOROVODRUN]
CENTRAL: Launcher = HOROVODRUN
"""The one that runs in a launcher's pod, and starts its workers in the others."""


def named(name: str) -> Optional[Launcher]:
    """Return the launcher of that name; None if there is none."""
    return next((one for one in LAUNCHERS if one.name == name), None)


def has_rounds(name: str) -> bool:
    """Return whether a launcher of that name asks for rounds, or may still start one that does."""
    launcher = named(name)
    return launcher is None or launcher.has_rounds


def found(words: Sequence[str]) -> Tuple[Optional[Launcher], int]:
    """Return the launcher that a command line starts, and the index behind the words that do."""
    for at, word in enumerate(words):
        for one in LAUNCHERS:
            if after := one.found_in(words, at):
                return one, after
        if os.path.basename(word).endswith((".py", ".sh")):
            break  # the rest is for that script; a launcher that it starts is a process of its own
    return None, 0


def serves_workers(command: Sequence[str]) -> bool:
    """Return whether a container's command is the agent of a central launcher's workers.

    Nothing is complete when it ends, so its end says nothing about the job.
    """
    return os.path.basename(command[0]) == layout.MUSTER_EXEC


def main() -> int:
    """Become the image's program of this one's name; return the exit status if that fails."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    unblock_signals()
    configure_log("muster-run")
    name = os.path.basename(sys.argv[0])
    own = images_own(name, sys.argv[0], os.environ)
    if own is None:
        log.error("%s: not found in the PATH", name)
        return EXIT_NOT_FOUND
    command, environ = [own, *sys.argv[1:]], dict(os.environ)
    said: List[str] = []
    run_dir = RunDirectory.find(environ, sys.argv[0])
    launcher = named(name)
    try:
        delivered = run_dir.delivered() or {}
        if launcher is not None:
            command, environ, said = launcher.started(
                own, sys.argv[1:], environ, delivered, run_dir.path
            )
    except ValueError as error:
        log.error("%s", error)
        return EXIT_USAGE
    for sentence in said:
        log.info("%s", sentence)
    try:
        os.execve(command[0], command, environ)
    except OSError as error:
        log.error("%s: %s", command[0], error.strerror)
        return EXIT_NOT_EXECUTABLE
