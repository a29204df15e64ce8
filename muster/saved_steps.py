# SPDX-License-Identifier: Apache-2.0
"""The steps that this rank has saved: the few of them that are needed to find a common one.

Ranks are read at different moments, and one may have saved again by then. So each names, besides
its newest save, older ones that the others name, too: as every rank makes the same saves, the
newest of every fourth, sixteenth and sixty-fourth are the same on all, for a while.

With its saves a rank says whether they keep the samples: whether a world that goes on from them
trains each sample once an epoch. All that it names have the same verdict: with another one it names
no older saves.
"""

from __future__ import annotations

import logging
import re
from typing import Dict, Optional, Tuple

from muster import checks, step_listeners
from muster.cursor import UNKEPT, CommittedStep, decode, encode

log = logging.getLogger(__name__)

SPREAD = (1, 4, 16, 64)
"""For each number, the newest save whose count is a multiple of it is named."""

REASON_CHARACTERS = 80
"""Maximum length of a reason in the line: why a save failed, or does not keep the samples."""

NOT_PLAIN = re.compile(r'[^ -~]|["\\]')

KEPT = "kept"
NOT_KEPT = "not kept: "
"""The start of a verdict that gives a reason."""


def plain(reason: str) -> str:
    """Return ``reason`` as it fits into the line: short, printable ASCII, nothing to be escaped."""
    return NOT_PLAIN.sub("?", reason.replace("\n", " ").replace('"', "'"))[:REASON_CHARACTERS]


class SavedSteps:
    """The saves to report: ``named``, newest first, and their ``cursors``, empty texts for none.

    ``samples``: what they say of the samples, empty if neither a cursor nor shards were given.
    ``told``: all this as fields of the progress line, which are put together once a save.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Name none of the saves so far."""
        self._place, self._place_of = "", -1
        self._begin("")

    def _begin(self, samples: str) -> None:
        """Name none of the saves so far, and give the later ones this verdict."""
        self.samples = samples
        self.named: Tuple[int, ...] = ()
        self.cursors: Dict[int, str] = {}
        self.with_cursors = False
        """Whether any of them has a cursor: looked at with each step."""
        self.told = ""
        self._count = 0
        self._newest_of: Dict[int, int] = {}

    def go_on_from(self, commit: Optional[CommittedStep]) -> None:
        """Begin after ``commit``: a later save at the same place in the data does not keep it."""
        if commit is not None and not commit.of_former_life:
            self._place, self._place_of = encode(commit.cursor, commit), int(commit)

    def add(self, step: int, cursor: str = "") -> None:
        """Record that ``step`` is saved; ignore one that is not above all before.

        ``cursor`` is its text. The newest step may get one in a later call, or another. Logs a
        warning for the first save that does not keep the samples.
        """
        if self.named and (step < self.named[0] or (step == self.named[0] and not cursor)):
            return
        samples = self._verdict(step, cursor)
        if samples != self.samples:
            if samples.startswith(NOT_KEPT):
                log.warning("samples of the save of step %d: %s", step, samples)
            self._begin(samples)
        if step not in self.named[:1]:
            self._count += 1
            for many in SPREAD:
                if self._count % many == 0:
                    self._newest_of[many] = step
            self.named = tuple(sorted(set(self._newest_of.values()), reverse=True))
        self.cursors[step] = cursor
        self.cursors = {named: self.cursors[named] for named in self.named}
        self.with_cursors = any(self.cursors.values())
        self.told = ',"saved":[%s]%s%s' % (
            ",".join(["%d" % named for named in self.named]),
            ',"cursors":true' if self.with_cursors else "",
            ',"samples":"%s"' % samples if samples else "",
        )

    def come_to(self, step: int) -> None:
        """Forget saves of later steps: they are of a loop that has counted its steps otherwise."""
        if self.named and self.named[0] > step:
            self.forget()

    def _verdict(self, step: int, cursor: str) -> str:
        """Return whether the save keeps the samples, and why not; empty if nothing says it."""
        if checks.passed_over:
            return NOT_KEPT + plain("%s=warn: %s" % (checks.CHECKS_VARIABLE, checks.passed_over[0]))
        if not cursor:
            return KEPT if step_listeners.listeners else ""  # shards are on record with the save
        place = decode(cursor)
        if isinstance(place, dict) and place.get(UNKEPT):
            return NOT_KEPT + plain(str(place[UNKEPT]))
        if cursor == self._place and step > self._place_of:
            return "%sthe data cursor is the one of step %d" % (NOT_KEPT, self._place_of)
        self._place, self._place_of = cursor, step
        return KEPT
