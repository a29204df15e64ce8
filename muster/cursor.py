# SPDX-License-Identifier: Apache-2.0
"""The data cursor of a saved step: the place in the data where training goes on from it.

It is whatever JSON the script gives to ``drain.committed``, small, and the same on every rank. It
lies beside the rank's progress line, in a file that is renamed into place before the line that
reports the save: a reader that reads the line first and then the file finds the cursor of every
step named.
"""

from __future__ import annotations

import json
import os
from typing import Any, Mapping, Optional

CURSOR_MAX_BYTES = 1024
"""Maximum length of a cursor as JSON: it is part of records that every sidecar keeps."""

UNKEPT = "unkept"
"""The name under which a sampler's cursor says why it is not the place of what was trained."""

ENDING = ".cursors"
"""Suffix of the file's name, after the local rank."""


def encode(cursor: Any, step: int) -> str:
    """Encode a cursor as JSON, equal cursors alike; None as the empty text.

    Raises ``ValueError`` if it is not JSON, or longer than ``CURSOR_MAX_BYTES``.
    """
    if cursor is None:
        return ""
    try:
        text = json.dumps(cursor, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            "drain.committed(%d): the cursor is no JSON (%s): give numbers, texts, lists and dicts"
            " of them, as sampler.cursor does" % (step, error)
        ) from error
    if len(text) > CURSOR_MAX_BYTES:
        raise ValueError(
            "drain.committed(%d): the cursor is %d bytes long as JSON, and may be %d: keep the rest"
            " in the checkpoint" % (step, len(text), CURSOR_MAX_BYTES)
        )
    return text


def decode(text: str) -> Any:
    """Decode a cursor, None from the empty text; raises ``ValueError``."""
    return json.loads(text) if text else None


class CommittedStep(int):
    """The step of a commit, which is an ``int``.

    ``cursor``: None if none was given. ``tag``: the save tag of the world that saved it; empty if
    its ranks have not asked for one, so that the checkpoint has a name of the script's own.
    ``of_former_life``: a job of this name made it that was deleted since.
    """

    cursor: Any
    tag: str
    of_former_life: bool

    def __new__(
        cls, step: int, cursor: Any = None, tag: str = "", *, of_former_life: bool = False
    ) -> CommittedStep:
        """Create it from a step, its cursor and its tag."""
        made = super().__new__(cls, step)
        made.cursor, made.tag, made.of_former_life = cursor, tag, of_former_life
        return made


class CursorFile:
    """The file of one rank's cursors; ``pid`` and ``started`` identify the writing process."""

    def __init__(self, directory: str, local_rank: int, pid: int, started: int) -> None:
        self._path = os.path.join(directory, "%d%s" % (local_rank, ENDING))
        self._aside = os.path.join(directory, ".%d.%d%s" % (local_rank, pid, ENDING))
        self._whose = {"pid": pid, "started": started}
        self._written: Optional[Mapping[int, str]] = None

    def write(self, cursors: Mapping[int, str]) -> None:
        """Write ``cursors``, by step, aside and rename, if changed; raises ``OSError``."""
        if cursors == self._written:
            return
        by_step = {"%d" % step: text for step, text in cursors.items()}
        content = json.dumps({**self._whose, "cursors": by_step}, separators=(",", ":"))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            with open(os.open(self._aside, flags, 0o644), "wb") as file:
                os.fchmod(file.fileno(), 0o644)  # the sidecar is another user
                file.write(content.encode("ascii"))
            os.replace(self._aside, self._path)
        except OSError:
            if os.path.exists(self._aside):
                os.unlink(self._aside)
            raise
        self._written = dict(cursors)
