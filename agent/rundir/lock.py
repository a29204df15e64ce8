# SPDX-License-Identifier: Apache-2.0
"""One sidecar for each run directory: a second one would deliver its own port to the first's pod.

The lock is the kernel's: it ends with the process, however that ends, so that a sidecar that
restarts finds it free.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from launcher_shim.rundir import layout
from launcher_shim.rundir.layout import open_regular, read_untrusted
from rdzv.errors import ConfigError
from rdzv.sentences import named

log = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 5.0
"""Longest wait for a predecessor that was killed to be gone, in seconds."""
RETRY_INTERVAL_S = 0.1

OWNER_MAX_BYTES = 1024


def lock(path: Path, member: str) -> BinaryIO:
    """Lock the existing directory ``path`` until the returned file is closed.

    Blocks for up to ``RELEASE_TIMEOUT_S``; raises ``ConfigError`` that names the owner after that.
    """
    try:
        descriptor = open_regular(path / layout.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{named('--run-dir')}: {path} cannot be locked ({error.strerror}): choose another one"
        ) from error
    file = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        _take(file, path)
        with suppress(OSError):  # a full disk is tolerated: the name is for people
            file.truncate(0)
            file.write(f"{member} (pid {os.getpid()})".encode())
    except BaseException:
        file.close()
        raise
    return file


def _take(file: BinaryIO, path: Path) -> None:
    deadline_s = time.monotonic() + RELEASE_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                # A volume without locks: nothing but the pod's own definition prevents a second
                # sidecar.
                sentence = "%s has no locks (%s): a second sidecar on it would not be noticed"
                log.warning(sentence, path, error.strerror, extra={"event": "no_lock"})
                return
        if time.monotonic() > deadline_s:
            owner = read_untrusted(path / layout.LOCK, OWNER_MAX_BYTES).decode(errors="replace")
            raise ConfigError(
                f"{named('--run-dir')}: {path} is in use by the sidecar of"
                f" {owner or 'another pod'}: give each sidecar a run directory of its own"
            )
        time.sleep(RETRY_INTERVAL_S)
