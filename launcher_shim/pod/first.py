# SPDX-License-Identifier: Apache-2.0
"""A launcher's program, first in the PATH of a command: the image's own, as Muster drives it."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import List

from launcher_shim.exit_status import (
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    EXIT_USAGE,
    unblock_signals,
)
from launcher_shim.launchers import named
from launcher_shim.pod.delivery import RunDirectory, configure_log, images_own

log = logging.getLogger(__name__)


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
