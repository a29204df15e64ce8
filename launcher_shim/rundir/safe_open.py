# SPDX-License-Identifier: Apache-2.0
"""Opens a file of the run directory for reading, whatever the other container has put there.

Nothing is read through a link, and a pipe that lies there has no writer to wait for.
"""

from __future__ import annotations

import os
from typing import Union


def read_untrusted(path: "Union[str, os.PathLike[str]]", max_bytes: int) -> bytes:
    """Read at most ``max_bytes``; empty for a pipe that somebody holds open and does not write to.

    Raises ``OSError``, with ``ELOOP`` for a link.
    """
    with open(path, "rb", buffering=0, opener=_open) as file:
        return file.read(max_bytes) or b""


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
