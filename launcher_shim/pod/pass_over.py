# SPDX-License-Identifier: Apache-2.0
"""``torchrun``, first in the PATH of a command: ends well where its stage has ended well already.

A container that is started again runs its command from the start, while the job may be stages
ahead. torch has no way to be told so: it would end with 1. So the sidecar is asked first; unless
it says so the image's own torchrun takes the place of this process, with the same arguments.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import struct
import sys
from typing import Mapping, Optional, Sequence, Tuple

import launcher_shim.c10d.wire as wire
from launcher_shim.pod.delivery import LOOPBACK
from launcher_shim.pod.early_signals import unblock
from launcher_shim.pod.launch import told
from launcher_shim.pod.log_lines import configure

log = logging.getLogger(__name__)

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""As a shell has it."""

_VARIABLES = {
    "rdzv-endpoint": "PET_RDZV_ENDPOINT",
    "rdzv-backend": "PET_RDZV_BACKEND",
    "rdzv-id": "PET_RDZV_ID",
    "standalone": "PET_STANDALONE",
}


def main() -> int:
    """Pass over, or become the image's torchrun; return the exit status."""
    unblock()
    configure("muster-run")
    arguments = sys.argv[1:]
    meets = meets_at(arguments, os.environ)
    if meets is not None and _passes_over(*meets, digest(arguments)):
        log.info("this stage of %s has ended well already: it is passed over", meets[1])
        return 0
    own = images_own(sys.argv[0], os.environ)
    if own is None:
        log.error("torchrun: not found in the PATH")
        return NOT_FOUND
    try:
        os.execv(own, [own, *arguments])
    except OSError as error:
        log.error("%s: %s", own, error.strerror)
        return NOT_EXECUTABLE


def meets_at(words: Sequence[str], environ: Mapping[str, str]) -> Optional[Tuple[int, str]]:
    """Tell the loopback port and the run id of a torchrun that comes to the sidecar; else None."""
    options = told(words, environ, _VARIABLES)
    host, _, port = options.get("rdzv-endpoint", "").rpartition(":")
    run_id = options.get("rdzv-id", "")
    here = options.get("rdzv-backend") == "c10d" and host in LOOPBACK and port.isdigit()
    alone = options.get("standalone", "") not in ("", "0", "false", "False")
    return (int(port), run_id) if here and run_id and not alone else None


def digest(words: Sequence[str]) -> bytes:
    """Tell one launch line from another, without its words: they may hold secrets."""
    return hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest().encode()


def images_own(program: str, environ: Mapping[str, str]) -> Optional[str]:
    """Find the torchrun that the PATH has after ``program``."""
    for directory in os.get_exec_path(dict(environ)):
        path = os.path.join(directory, "torchrun")
        runs = os.path.isfile(path) and os.access(path, os.X_OK)
        if runs and not os.path.samefile(path, program):
            return path
    return None


def _passes_over(port: int, run_id: str, line: bytes) -> bool:
    """Ask, and wait as torch would; no sidecar, or one of an older version, is no reason to."""
    request = wire.CompareSet(wire.STAGE + run_id.encode(errors="surrogateescape"), b"", line)
    try:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(wire.HANDSHAKE + wire.encode(request))
            answer = connection.makefile("rb")
            (length,) = wire.U64.unpack(answer.read(wire.U64.size))
            return answer.read(length) == wire.PASSED
    except (OSError, struct.error):  # the latter where the connection was closed instead
        return False
