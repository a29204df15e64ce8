# SPDX-License-Identifier: Apache-2.0
"""``torchrun``, first in the PATH of a command: succeeds at once if its stage has done so already.

A container that is started again runs its command from the start, while the job may be stages
ahead; torch itself would end with status 1. So the sidecar is asked first. Unless it confirms, the
image's own torchrun replaces this process, without the options that the sidecar overrules. The same
holds without an answer: a torchrun started in vain ends with an error, but work skipped by mistake
would look done.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
import struct
import sys
from typing import BinaryIO, Mapping, Optional, Sequence, Tuple

import launcher_shim.tcpstore.wire as wire
from launcher_shim.exit_status import EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, EXIT_USAGE
from launcher_shim.pod.delivery import LOOPBACK
from launcher_shim.pod.early_signals import unblock
from launcher_shim.pod.images_own import images_own
from launcher_shim.pod.launch import given_options
from launcher_shim.pod.log_lines import configure
from launcher_shim.pod.overruling import TELLS_ONLY, keeps_flags, kept_line, starts_own_job
from launcher_shim.pod.torchrun_line import read_line
from launcher_shim.rundir import layout

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 600.0
"""torch's default join timeout, in seconds: a sidecar answers once it is registered, and the store
may be away, or the sidecar may be being replaced."""
ANSWER_MAX = 64
"""Maximum length of an answer in bytes; a longer one does not come from a sidecar."""

ASKED = "MUSTER_ASKED_BY"
"""Variable that a torchrun gets: the process that has asked, which it has taken the place of."""

_WHERE = ("rdzv-endpoint", "rdzv-backend", "rdzv-id", "standalone")
"""Options that decide which rendezvous a torchrun comes to."""


def main() -> int:
    """Skip the stage, or become the image's torchrun; return the exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while it waits
    unblock()
    configure("muster-run")
    arguments = sys.argv[1:]
    try:
        keeps_flags(os.environ)
    except ValueError as error:
        log.error("%s", error)
        return EXIT_USAGE
    if starts_own_job(os.environ):
        arguments, sentences = kept_line(arguments, os.environ)
        for sentence in sentences:
            log.info("%s", sentence)
    meets = meets_at(arguments, os.environ)
    if meets is not None and passes_over(*meets, digest(arguments)):
        log.info("this stage of %s has succeeded already: skipping it", meets[1])
        return 0
    own = images_own(layout.TORCHRUN, sys.argv[0], os.environ)
    if own is None:
        log.error("torchrun: not found in the PATH")
        return EXIT_NOT_FOUND
    try:
        os.execve(own, [own, *arguments], {**os.environ, ASKED: str(os.getpid())})
    except OSError as error:
        log.error("%s: %s", own, error.strerror)
        return EXIT_NOT_EXECUTABLE


def meets_at(words: Sequence[str], environ: Mapping[str, str]) -> Optional[Tuple[int, str]]:
    """Return the loopback port and run id of a torchrun that comes to the sidecar; else None.

    A torchrun without a script, or one asked for help, starts nothing, so it comes to no sidecar.
    """
    line = read_line(words)
    if line.script == () or TELLS_ONLY & {*line.values()}:
        return None
    options = given_options(words, environ, _WHERE)
    host, _, port = options.get("rdzv-endpoint", "").rpartition(":")
    run_id = options.get("rdzv-id", "")
    here = options.get("rdzv-backend") == "c10d" and host in LOOPBACK and port.isdigit()
    alone = options.get("standalone", "") not in ("", "0", "false", "False")
    return (int(port), run_id) if here and run_id and not alone else None


def digest(words: Sequence[str]) -> bytes:
    """Return a digest that tells launch lines apart without their words, which may be secret."""
    return hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest().encode()


def passes_over(port: int, run_id: str, line: bytes) -> bool:
    """Ask the sidecar whether the stage is done, and wait; False if none answers that."""
    key = wire.STAGE + run_id.encode(errors="surrogateescape")
    request = wire.encode(wire.CompareSet(key, b"", line))
    idles = False
    try:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            connection.sendall(wire.HANDSHAKE)
            answers = connection.makefile("rb")
            while True:
                connection.sendall(request)
                answer = _answer(answers)
                if answer != wire.AGAIN:
                    return answer == wire.PASSED
                if not idles:
                    idles = True
                    log.info(
                        "this pod is drained: torchrun waits until the run %s succeeds or the drain"
                        " is cancelled",
                        run_id,
                    )
    except socket.timeout:  # no TimeoutError before Python 3.10
        log.warning(
            "the sidecar has not answered within %g s whether this stage of %s has succeeded"
            " already: starting torchrun",
            ANSWER_TIMEOUT_S,
            run_id,
        )
    except (OSError, struct.error):  # the latter if the connection was closed
        return False
    return False


def _answer(answers: BinaryIO) -> bytes:
    (length,) = wire.U64.unpack(answers.read(wire.U64.size))
    return answers.read(min(length, ANSWER_MAX))
