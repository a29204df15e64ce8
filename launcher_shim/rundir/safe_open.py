# SPDX-License-Identifier: Apache-2.0
"""The safe opening of a file of the run directory, whatever the other container has put there.

No link is followed, and a pipe in the file's place does not block.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Union


def read_untrusted(path: "Union[str, os.PathLike[str]]", max_bytes: int) -> bytes:
    """Read at most ``max_bytes``; empty for a pipe without data.

    Raises ``OSError``, with ``ELOOP`` for a link.
    """
    with open(path, "rb", buffering=0, opener=_open) as file:
        return file.read(max_bytes) or b""


def open_regular(path: "Union[str, os.PathLike[str]]", flags: int, mode: int) -> int:
    """Open a regular file for writing, as ``os.open`` does, and return its descriptor.

    Raises ``OSError``, with ``ELOOP`` for a link; also for a pipe, with or without a reader.
    """
    descriptor = _open(path, flags | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "%s is no regular file" % os.path.basename(path))
    return descriptor


def _open(path: "Union[str, os.PathLike[str]]", flags: int, mode: int = 0) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, mode)
