# SPDX-License-Identifier: Apache-2.0
"""A rank's stacks, written when ``muster-run`` asks why its world stands still.

Python's ``faulthandler`` writes them from the signal's handler itself, so a rank that hangs in C
code, or in an endless loop, answers as well. The file is ``progress/<local rank>.stacks``.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from typing import IO, Optional

STACKS_SIGNAL = 61
"""A signal for real-time use of its own: scripts use SIGUSR1 and SIGUSR2."""

STACKS_MAX_BYTES = 1024 * 1024
"""Length of the file from which on a rank begins it again."""

_file: Optional[IO[bytes]] = None


def offer_stacks(directory: str, local_rank: str, started: int) -> None:
    """Let ``STACKS_SIGNAL`` write the stacks of this process, and say so in the file.

    Does nothing if the script has a handler for it. Without the file there are no stacks, and
    training does not depend on it.
    """
    global _file
    register = getattr(faulthandler, "register", None)  # not on every system
    if register is None or _file is not None or not local_rank.isdigit():
        return
    with suppress(OSError, ValueError):
        if signal.getsignal(STACKS_SIGNAL) != signal.SIG_DFL:
            return
        path = os.path.join(directory, "%s.stacks" % local_rank)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.fdopen(os.open(path, flags, 0o644), "ab", buffering=0)
        if os.fstat(file.fileno()).st_size > STACKS_MAX_BYTES:
            file.truncate(0)
        os.fchmod(file.fileno(), 0o644)  # the sidecar is another user, whatever the umask is
        file.write(b"process %d started %d\n" % (os.getpid(), started))
        register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
        _file = file
