# SPDX-License-Identifier: Apache-2.0
"""One rank's progress line, as ``import muster`` writes it, read whole or not at all.

A rank overwrites the line in place. A concurrent reader gets parts of two writes, which the
checksum detects.
"""

from __future__ import annotations

import os
import zlib
from typing import Optional, Union

from launcher_shim.rundir.safe_open import read_untrusted

MAX_LINE_BYTES = 4096
READS = 5
"""Maximum number of reads of a line that a rank may just be overwriting."""

_SUM_END = len('{"crc":"00000000"')


def read_whole(path: "Union[str, os.PathLike[str]]") -> Optional[bytes]:
    """Read one line; None if there is none, or none that is whole in ``READS`` reads."""
    for _ in range(READS):
        try:
            content = read_untrusted(path, MAX_LINE_BYTES)
        except OSError:
            return None  # the training script may put anything there
        if is_whole(content):
            return content
    return None


def is_whole(content: bytes) -> bool:
    """Return whether the line is as one write made it."""
    try:
        checksum = int(content[len('{"crc":"') : _SUM_END - 1], 16)
    except ValueError:
        return False
    return content.endswith(b"\n") and checksum == zlib.crc32(content[_SUM_END:])
