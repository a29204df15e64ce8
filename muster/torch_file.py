# SPDX-License-Identifier: Apache-2.0
"""The step and the save tag of a Lightning checkpoint, read without running anything in it.

``torch.save`` writes a zip archive, whose table of contents comes last: a file that was cut short
has none. The step is read from the opcodes of the pickle in it, never by unpickling.
"""

from __future__ import annotations

import pickletools
import zipfile
import zlib
from typing import Any, Optional

STEP_KEY = "global_step"
TAG_KEY = "muster_tag"

_PICKLE = "/data.pkl"
_PART = b"PK\x03\x04"
"""The first bytes of each part of a zip archive."""

_MEMO = frozenset({"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"})
_TEXTS = frozenset({"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"})
_NUMBERS = frozenset({"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"})


def whole_step(path: str) -> Optional[int]:
    """Return the step that the file at ``path`` was saved at; None if it is not proven to be whole.

    Whole means that the file has been written to its end, that its parts begin where its table of
    contents says, and that the part which describes the others is unharmed. The weights themselves
    are not read.
    """
    pickle = _description(path)
    try:
        return None if pickle is None else step_in(pickle)
    except ValueError:
        return None


def tag_of(path: str) -> str:
    """Return the save tag in the file at ``path``; empty if it has none, or is not whole."""
    pickle = _description(path)
    try:
        found = None if pickle is None else _follows(pickle, TAG_KEY, str)
    except ValueError:
        return ""
    return "" if found is None else str(found)


def _description(path: str) -> Optional[bytes]:
    """Read the part that describes the others; None if the file is not whole."""
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            for part in archive.infolist():
                file.seek(part.header_offset)
                if file.read(len(_PART)) != _PART:
                    return None
            name = next((n for n in archive.namelist() if n.endswith(_PICKLE)), None)
            return None if name is None else archive.read(name)
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return None  # absent, cut short, or a file of another kind


def step_in(pickle: bytes) -> Optional[int]:
    """Return the number that follows the key ``global_step`` in a pickle; None if there is none.

    Raises ``ValueError`` if it is no pickle.
    """
    found = _follows(pickle, STEP_KEY, int)
    return None if found is None else int(found)


def _follows(pickle: bytes, key: str, kind: "type[int] | type[str]") -> Optional[Any]:
    """Return the first number or text that follows ``key``; raises ``ValueError``."""
    opcodes = _NUMBERS if kind is int else _TEXTS
    comes_next = False
    for opcode, argument, _ in pickletools.genops(pickle):
        if opcode.name in _MEMO:
            continue
        if comes_next and opcode.name in opcodes and isinstance(argument, kind):
            return argument
        comes_next = argument == key
    return None
