# SPDX-License-Identifier: Apache-2.0
"""The mark of the newest world in a checkpoint directory whose file names have no save tag.

Trainers save to names of their own, such as ``checkpoint-500`` and ``last.ckpt``, which two worlds
would share. So each world that begins writes its tag to ``muster-tag`` beside them. One that finds
a later world's tag there was cut off from the store, and may not save any more.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Callable, Optional

from muster.cursor import CommittedStep
from muster.tag import FIRST, TAG, life_of, save_tag

log = logging.getLogger(__name__)

MARK = "muster-tag"
"""The name of the file: in a checkpoint directory, and in a checkpoint that is a directory."""


class LaterWorld(RuntimeError):
    """Another world of this job has begun since, and saves to the same directory."""


class WorldMark:
    """One world's claim to ``directory``. ``marks``: this is the rank that writes the mark.

    It does nothing until a sidecar has confirmed the round: then ``tag`` changes, once.
    """

    def __init__(self, directory: str, *, marks: bool, tag: Callable[[], str] = save_tag) -> None:
        self._directory = directory
        self._marks = marks
        self._tag = tag

    def begin(self) -> None:
        """Mark the directory as this world's, whichever marked it before."""
        own = self._tag()
        if self._marks and own >= FIRST:
            with suppress(OSError):  # what cannot be made cannot be marked either
                os.makedirs(self._directory, exist_ok=True)
            mark(self._directory, own)

    def check(self) -> None:
        """Raise ``LaterWorld`` if a later world's mark is there; call it before each save."""
        own = self._tag()
        if own < FIRST:
            return
        found = marked(self._directory)
        if found > own:
            raise LaterWorld(
                "a later world of this job saves to %s (%s), and this rank is of %s: its pod was"
                " cut off from the store, so it may not save here any more"
                % (self._directory, found, own)
            )
        if found != own:  # an earlier world began more slowly, or the round was confirmed late
            self.begin()


def mark(directory: str, tag: str) -> None:
    """Write a tag into a directory, aside and renamed; log a warning if that fails."""
    path = os.path.join(directory, MARK)
    aside = "%s.%d.part" % (path, os.getpid())
    try:
        with open(aside, "w", encoding="ascii") as file:
            file.write(tag + "\n")
        os.replace(aside, path)
    except OSError as error:
        log.warning("cannot write which world saves to %s: %s", directory, error)
        with suppress(OSError):
            os.unlink(aside)


def marked(directory: str) -> str:
    """Return the tag in a directory; empty without one."""
    try:
        with open(os.path.join(directory, MARK), encoding="ascii", errors="replace") as file:
            tag = file.read(64).strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        log.warning("cannot read which world saves to %s: %s", directory, error)
        return ""
    return tag if TAG.fullmatch(tag) else ""


def is_left_behind(step: int, tag: str, committed: Optional[CommittedStep]) -> bool:
    """Return whether a save that is later than ``committed`` is of a world before that one.

    That world was cut off from the store and trained on for itself. ``committed`` is that of
    ``last_commit()``. Tags of two lives say nothing of each other: the directory may be another
    job's.
    """
    if committed is None or committed.of_former_life or life_of(tag) != life_of(committed.tag):
        return False
    return step > committed and "" < tag < committed.tag
