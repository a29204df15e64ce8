# SPDX-License-Identifier: Apache-2.0
"""The saved steps of a rank, each with its data cursor: where training goes on from it.

A cursor is whatever JSON the script gives to ``drain.committed``, small, and the same on all ranks.
Its file is renamed into place before the progress line that reports the save: a reader of the line
and then of the file finds the cursor of every step named.
"""

from __future__ import annotations

import json
import logging
import os
import re
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from muster import process

log = logging.getLogger(__name__)

CURSOR_MAX_BYTES = 1024
"""Maximum length of a cursor as JSON: it is part of records that every sidecar keeps."""

UNKEPT = "unkept"
"""The name under which a sampler's cursor says why it is not the place of what was trained."""

ENDING = ".cursors"
"""Suffix of the file's name, after the local rank."""

SPREAD = (1, 4, 16, 64)
"""For each number, the newest save whose count is a multiple of it is named."""

REASON_CHARACTERS = 80
"""Maximum length of a reason in the line: why a save failed, or does not keep the samples."""

NOT_PLAIN = re.compile(r'[^ -~]|["\\]')

KEPT = "kept"
NOT_KEPT = "not kept: "
"""The start of a verdict that gives a reason."""


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
    """The file of one rank's cursors; ``pid`` and ``started`` identify the writing process.

    It is whatever JSON the script gives to ``drain.committed``, small, and the same on every
    rank. It lies beside the rank's progress line, in a file that is renamed into place before
    the line that reports the save: a reader that reads the line first and then the file finds
    the cursor of every step named.
    """

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


class Listener(NamedTuple):
    """A pair of callbacks: ``arrive`` at the boundary after a step, ``save`` once a step is saved.

    ``save`` returns why the save must not count, or an empty string. It may raise an exception that
    ends the process.

    A listener is called at a boundary before the rank goes on, and for a save before it counts:
    so the content of a checkpoint is on record no later than the checkpoint itself.
    """

    arrive: Callable[[int], None]
    save: Callable[[int], str]


listeners: List[Listener] = []
"""The listeners of this process, in the order in which they were added."""


boundaries = 0
"""The boundaries that this process has come to."""


def at_boundary(step: int) -> None:
    """Call every listener for a boundary."""
    for listener in listeners:
        listener.arrive(step)


def at_save(step: int) -> str:
    """Call the listeners for a save; return why it must not count, or an empty string."""
    for listener in listeners:
        why = listener.save(step)
        if why:
            return why
    return ""


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
        if process.passed_over:
            return NOT_KEPT + plain(
                "%s=warn: %s" % (process.CHECKS_VARIABLE, process.passed_over[0])
            )
        if not cursor:
            return KEPT if listeners else ""  # shards are on record with the save
        place = decode(cursor)
        if isinstance(place, dict) and place.get(UNKEPT):
            return NOT_KEPT + plain(str(place[UNKEPT]))
        if cursor == self._place and step > self._place_of:
            return "%sthe data cursor is the one of step %d" % (NOT_KEPT, self._place_of)
        self._place, self._place_of = cursor, step
        return KEPT
