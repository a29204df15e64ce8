# SPDX-License-Identifier: Apache-2.0
"""A unix socket in the run directory that listens as soon as it has its name.

It is bound under a nascent name, made accessible to its clients, and renamed into place.
"""

from __future__ import annotations

import os
from contextlib import suppress

PATH_MAX_BYTES = 107
"""Maximum length of the path of a unix socket on Linux."""


class PathTooLong(ValueError):
    """The run directory's path leaves no room for a socket's name; the message says which."""


def nascent_name(path: str) -> str:
    """Return the name to bind, before ``path`` takes its place; raises ``PathTooLong``."""
    nascent = f"{path}.{os.getpid()}"
    if len(os.fsencode(nascent)) > PATH_MAX_BYTES:
        raise PathTooLong(f"{path} is too long for a unix socket: choose a shorter run directory")
    return nascent


def publish(nascent: str, path: str, mode: int) -> int:
    """Give a listening socket its mode and its name; return its inode. Raises ``OSError``."""
    os.chmod(nascent, mode)
    os.rename(nascent, path)
    return os.stat(path).st_ino


def withdraw(path: str, inode: int) -> None:
    """Remove the socket with that inode, but not that of a successor; raises ``OSError``."""
    with suppress(FileNotFoundError):
        if os.stat(path).st_ino == inode:
            os.unlink(path)
