# SPDX-License-Identifier: Apache-2.0
"""One rank's progress line, as ``import muster`` writes it, read whole or not at all.

A rank overwrites the line where it is. Who reads it meanwhile meets half of two writes, which the
checksum tells.
"""

from __future__ import annotations

import os
import zlib
from typing import Optional, Union

from launcher_shim.rundir.safe_open import read_untrusted

MAX_LINE_BYTES = 4096
READS = 5
"""How often a line is read that a rank may just be overwriting."""

_SUM_END = len('{"crc":"00000000"')


def read_whole(path: "Union[str, os.PathLike[str]]") -> Optional[bytes]:
    """Read one line; None where there is none, or none that is whole in ``READS`` reads."""
    for _ in range(READS):
        try:
            content = read_untrusted(path, MAX_LINE_BYTES)
        except OSError:
            return None  # the training script may leave there what it wants
        if is_whole(content):
            return content
    return None


def is_whole(content: bytes) -> bool:
    """Whether the line is as one write made it."""
    try:
        checksum = int(content[len('{"crc":"') : _SUM_END - 1], 16)
    except ValueError:
        return False
    return content.endswith(b"\n") and checksum == zlib.crc32(content[_SUM_END:])
