# SPDX-License-Identifier: Apache-2.0
"""The step of a Lightning checkpoint, read without running anything in it.

``torch.save`` writes a zip archive, whose table of contents comes last: a file that was cut short
has none. The step is read from the opcodes of the pickle in it, never by unpickling.
"""

from __future__ import annotations

import pickletools
import zipfile
import zlib
from typing import Optional

STEP_KEY = "global_step"

_PICKLE = "/data.pkl"
_PART = b"PK\x03\x04"
"""The first bytes of each part of a zip archive."""

_MEMO = frozenset({"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"})
_NUMBERS = frozenset({"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"})


def whole_step(path: str) -> Optional[int]:
    """Return the step that the file at ``path`` was saved at; None if it is not proven to be whole.

    Whole means that the file has been written to its end, that its parts begin where its table of
    contents says, and that the part which describes the others is unharmed. The weights themselves
    are not read.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            for part in archive.infolist():
                file.seek(part.header_offset)
                if file.read(len(_PART)) != _PART:
                    return None
            name = next((n for n in archive.namelist() if n.endswith(_PICKLE)), None)
            return None if name is None else step_in(archive.read(name))
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return None  # absent, cut short, or a file of another kind


def step_in(pickle: bytes) -> Optional[int]:
    """Return the number that follows the key ``global_step`` in a pickle; None if there is none.

    Raises ``ValueError`` if it is no pickle.
    """
    comes_next = False
    for opcode, argument, _ in pickletools.genops(pickle):
        if opcode.name in _MEMO:
            continue
        if comes_next and opcode.name in _NUMBERS and isinstance(argument, int):
            return argument
        comes_next = argument == STEP_KEY
    return None
