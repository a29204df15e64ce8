# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of Lightning in a directory, and which one to go on from: no unpickling.

``torch.save`` writes a zip archive, whose table of contents comes last: a file that was cut short
has none. The step is read from the opcodes of the pickle in it, without running anything.
"""

from __future__ import annotations

import glob
import logging
import os
import pickletools
import zipfile
import zlib
from typing import Any, Dict, List, Optional

from muster.resuming import TAG, is_left_behind, shortfall
from muster.saved_steps import CommittedStep

log = logging.getLogger(__name__)

STEP_KEY = "global_step"
TAG_KEY = "muster_tag"

KEPT = 2
"""Number of the callback's own checkpoints to keep: an older one until the next is whole."""

ASIDE = ".part"
"""Suffix of a checkpoint that is being written."""

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


def newest(directory: str, committed: Optional[CommittedStep]) -> Optional[str]:
    """Return the checkpoint to go on from; None without one.

    ``committed``: what ``last_commit()`` has returned.
    """
    own = None if committed is None else path_of(directory, committed, committed.tag)
    steps: Dict[str, int] = {}
    for path in glob.glob(os.path.join(glob.escape(directory), "*.ckpt")):
        step = step_of(path)
        if step is not None and is_left_behind(step, tag_of(described(path)), committed):
            log.warning("%s is of a world that was cut off: passed over", path)
        elif step is not None:
            steps[path] = step
        elif path != own:
            log.warning("%s is not whole, or no checkpoint of Lightning's: passed over", path)
    # Found by name, as a listing may be stale; in any format, as all ranks have saved it.
    if committed is not None and own and (os.path.isfile(own) or step_of(own) is not None):
        steps[own] = committed
    # Of two of the same step, prefer the one that was renamed into place.
    ordered = sorted(steps, key=lambda path: (steps[path], path == own, is_own(path)))
    found = ordered[-1] if ordered else None
    missing, _ = shortfall(steps[found] if found else 0, directory)
    if missing:
        log.warning("%s", missing)
    return found


def path_of(directory: str, step: int, tag: str) -> str:
    """Return the path of the callback's own checkpoint."""
    return os.path.join(directory, "muster-%d%s.ckpt" % (step, "-" + tag if tag else ""))


def is_own(path: str) -> bool:
    """Return whether the callback has saved the checkpoint itself."""
    return os.path.basename(path).startswith("muster-")


def superseded(directory: str, tag: str) -> List[str]:
    """Return the callback's own checkpoints but the newest ``KEPT``, and those left unfinished."""
    start = os.path.join(glob.escape(directory), "muster-*")
    own = sorted(not_later(glob.glob(start + ".ckpt"), tag), key=os.path.getmtime)
    return [*own[:-KEPT], *not_later(glob.glob(start + ASIDE), tag)]


def not_later(paths: List[str], tag: str) -> List[str]:
    """Leave out what a later world saves: it counts, and this world does not know of it."""
    tags = {path: TAG.search(os.path.basename(path)) for path in paths}
    return [path for path, found in tags.items() if found is None or found.group() <= tag]


def step_of(path: str) -> Optional[int]:
    """Return the step of a whole file, or of a sharded checkpoint's last part; else None."""
    return whole_step(described(path))


def described(path: str) -> str:
    """Return the file that describes a checkpoint: itself, or its last part if it is sharded."""
    return os.path.join(path, "meta.pt") if os.path.isdir(path) else path
