# SPDX-License-Identifier: Apache-2.0
"""The gate, by which the sidecar tells this pod's ranks what to do: ``$MUSTER_RUN_DIR/gate.page``.

A rank maps it and looks at one word at each step boundary. Beside a sidecar of 0.1 it is
``gate.json``, renamed into place whenever something changes, and a rank looks by ``stat``. The
standard library has no notification of a change made in another container, so a rank that has to
wait polls every few milliseconds.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import stat
import struct
import time
import zlib
from typing import Any, NamedTuple, Optional, Tuple

from muster.boundary import Rank, RankGate, waits_for
from muster.process import RankIdentity
from muster.saved_steps import CommittedStep, decode

log = logging.getLogger(__name__)

PAGE_NAME = "gate.page"

WORD = struct.Struct("<Q")
HEAD = struct.Struct("<IIq")
"""Of a slot: checksum, length, and when the environment file beside it was written, in ns."""
SLOT_BYTES = 8192
FIRST_SLOT = 64
PAGE_BYTES = FIRST_SLOT + 2 * SLOT_BYTES

READS = 5
"""Maximum number of reads of a page that the sidecar may just be changing."""

SCHEMA = 1
GATE_NAME = "gate.json"
ENVIRONMENT_NAME = "env"
"""A file in the run directory; if there is a sidecar, it has put it there."""
PHASES = ("idle", "hold", "commit", "done", "void")

POLL_S = 0.005
"""Poll interval of a rank that waits."""

OWN_ROUND_WAIT_S = 5.0
"""Maximum wait of a new rank until its sidecar has seen that the round is complete."""

SAY_S = 60.0
"""Time after which a rank that waits logs what it waits for: longer than a usual save."""

LOOK_S = 0.05
"""Interval at which a rank asks whether the page that it has mapped is still the one in use. It is
shorter than a sidecar of 0.1 needs from its start to its first gate."""


class MappedPage:
    """One page, mapped; raises ``OSError`` or ``ValueError`` if it cannot be.

    The sidecar allocates it when it starts and overwrites it from then on, so that no change of
    the gate needs space on the disk. It begins with the generation word, which grows by one
    with each change. Two slots follow, used in turns: the word's last bit says in which one the
    content lies, as its checksum over the word and the content, its length, which environment
    file it belongs to, and the content. Until the word has changed the slot of the content
    before is left alone, so a sidecar that dies amid a change leaves a whole page.
    """

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self.inode = os.fstat(descriptor).st_ino
            self._map = mmap.mmap(descriptor, PAGE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self.words = memoryview(self._map).cast("Q")
        """``words[0]`` is the generation word: one load of memory, the cheapest look there is."""

    @property
    def environment_ns(self) -> int:
        """The time (ns) of the environment file beside which the page was changed last."""
        ns: int = HEAD.unpack_from(self._map, FIRST_SLOT + (self.words[0] & 1) * SLOT_BYTES)[2]
        return ns

    def content(self, word: int) -> Optional[bytes]:
        """Return what was written with this word; None if that is not whole, or not there any more.

        The sidecar may be writing, or have died in it.
        """
        start = FIRST_SLOT + (word & 1) * SLOT_BYTES
        checksum, length, _ = HEAD.unpack_from(self._map, start)
        start += HEAD.size
        content = self._map[start : start + min(length, SLOT_BYTES - HEAD.size)]
        if zlib.crc32(content, zlib.crc32(WORD.pack(word))) != checksum:
            return None
        return content


class Reading(NamedTuple):
    """The content of a gate. ``deadline_boot_s`` is on CLOCK_BOOTTIME, common to all containers.

    ``ended``: this pod was let go, and the others have ended well since. ``ask`` names the drain of
    a central launcher for which a rank is to save; 0 without one. ``ending``: the round is about to
    end without a save. ``run`` and ``round``: those that ``gate.master`` belongs to.
    """

    gate: RankGate
    leaving: bool
    deadline_boot_s: Optional[float]
    reason: str
    last_commit: Optional[CommittedStep]
    ended: bool = False
    ask: int = 0
    ending: bool = False
    run: str = ""
    round: int = -1


class GateFile:
    """The gate of one run directory; parsed only when it has changed."""

    def __init__(self, run_dir: str) -> None:
        self._path = os.path.join(run_dir, GATE_NAME)
        self._page_path = os.path.join(run_dir, PAGE_NAME)
        self._environment_path = os.path.join(run_dir, ENVIRONMENT_NAME)
        self._page: Optional[MappedPage] = None
        self._word = 0
        self._look_s = 0.0
        self._seen: Optional[Tuple[int, int, int]] = None
        self._reading: Optional[Reading] = None
        self._wait_until_s: Optional[float] = None
        self._warned = False

    @property
    def by_page(self) -> bool:
        """Whether the page was read last, and not ``gate.json``."""
        return self._page is not None

    def read(self) -> Optional[Reading]:
        """Read the present gate; None if there is none.

        If it cannot be read or parsed, the last one stays in force, and a warning is logged once:
        to go on without knowing could mean to train past the step that all others save.
        """
        page = self._page
        if page is not None and time.monotonic() < self._look_s:
            if page.words[0] != self._word:
                self._parse_page(page)
        else:
            self._look()
        return self._reading

    def wait_for_own(self, rank: RankIdentity) -> bool:
        """Wait for the gate of this rank's round, which has all earlier commits.

        Returns whether it has come. Only a rank of torchrun beside a sidecar waits, for
        ``OWN_ROUND_WAIT_S`` in all at most; it logs a warning if the gate has not come by then.
        """
        waits = rank.of_torchrun and os.path.exists(self._environment_path)
        while True:
            reading = self.read()
            if reading is not None and reading.gate.master == rank.master:
                return True
            if not waits:
                return False
            now_s = time.monotonic()
            if self._wait_until_s is None:
                self._wait_until_s = now_s + OWN_ROUND_WAIT_S
            elif now_s >= self._wait_until_s:
                if self._wait_until_s:
                    self._wait_until_s = 0.0  # a second wait would be as vain
                    log.warning(
                        "the sidecar has not confirmed within %g s that this round (%s) is"
                        " complete; training goes on without it, and the last commit may be missed",
                        OWN_ROUND_WAIT_S,
                        rank.master,
                    )
                return False
            time.sleep(POLL_S)

    def _look(self) -> None:
        """Read the page if the sidecar that runs has written it, else ``gate.json``.

        A sidecar of 0.1 knows no page, and writes its environment file as it starts: then it
        is not the one that the page names. Which is the later one does not count: a clock may be
        set.
        """
        self._look_s = time.monotonic() + LOOK_S
        try:
            page, started = self._mapped(), _status(self._environment_path)
            started_ns = 0 if started is None else started.st_mtime_ns
            if page is not None and page.environment_ns == started_ns:
                if page is not self._page or page.words[0] != self._word:
                    self._page = page
                    self._parse_page(page)
                return
            self._page = None
            status = _status(self._path)
            if status is None:
                if self._reading is not None:
                    self._warn("it is gone")
                return
            seen = (status.st_mtime_ns, status.st_ino, status.st_size)
            if seen != self._seen:
                with open(self._path, "rb") as file:
                    self._reading = parse(file.read())
                self._seen = seen
        except (OSError, ValueError, RecursionError) as error:
            self._warn(error)

    def _mapped(self) -> Optional[MappedPage]:
        """Return the page, which need not be in force; None if there is none."""
        status = _status(self._page_path)
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        page = self._page
        try:
            if page is None or page.inode != status.st_ino:
                page = MappedPage(self._page_path)
        except (OSError, ValueError):
            return None  # no page, or a file system that maps none: gate.json is there, too
        return page if page.words[0] else None

    def _parse_page(self, page: MappedPage) -> None:
        try:
            for _ in range(READS):
                word = page.words[0]
                content = page.content(word)
                if content is not None:
                    self._seen = None
                    self._reading = parse(content)
                    self._word = word
                    return
        except (ValueError, RecursionError) as error:
            self._warn(error)

    def _warn(self, why: object) -> None:
        if not self._warned:
            self._warned = True
            path = self._page_path if self.by_page else self._path
            log.warning("cannot read %s, keeping the last gate read, if any: %s", path, why)


class LongWait:
    """The wait of a rank at one step; it is logged once when it has become long."""

    def __init__(self) -> None:
        self._step: Optional[int] = None
        self._since_s = 0.0

    def look(self, rank: Rank, reading: Optional[Reading]) -> None:
        """Note that the rank waits still, by what it has read."""
        if self._step != rank.step:
            self._step, self._since_s = rank.step, time.monotonic()
        elif time.monotonic() - self._since_s >= SAY_S:
            self._since_s = math.inf
            log.warning(
                "this rank has waited for %g s %s: %s",
                SAY_S,
                "at step %d" % rank.step if rank.step >= 0 else "before its first step",
                waits_for(rank, reading.gate if reading is not None else None),
            )


def _status(path: str) -> Optional[os.stat_result]:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def parse(content: bytes) -> Reading:
    """Parse a gate; raises ``ValueError``."""
    fields = json.loads(content.decode("utf-8"))
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise ValueError("no gate of schema %d" % SCHEMA)
    try:
        phase, step, last = fields["phase"], fields["step"], fields["last_commit"]
        deadline_boot_s = fields["deadline_boot_s"]
        if phase not in PHASES:
            raise ValueError("no phase of a commit: %r" % (phase,))
        return Reading(
            RankGate(
                epoch=int(fields["epoch"]),
                master=str(fields["master"]),
                phase=phase,
                step=None if step is None else int(step),
                cut=fields.get("cut") is True,
            ),
            leaving=fields["leaving"] is True,
            deadline_boot_s=None if deadline_boot_s is None else float(deadline_boot_s),
            reason=str(fields["reason"]),
            last_commit=None if last is None else _committed(last, fields),
            ended=fields.get("ended") is True,
            ask=int(fields.get("ask", 0)),
            ending=fields.get("ending") is True,
            run=str(fields.get("run", "")),
            round=int(fields.get("round", -1)),
        )
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError("a field is missing or of another type: %s" % error) from error


def _committed(last: Any, fields: Any) -> CommittedStep:
    return CommittedStep(
        int(last["step"]),
        decode(str(last.get("cursor", ""))),
        str(last.get("tag", "")),
        of_former_life=fields.get("of_former_life") is True,
    )


_gate: Optional[GateFile] = None


def own_gate() -> Optional[GateFile]:
    """Return this process's view of its pod's gate; None without ``MUSTER_RUN_DIR``."""
    global _gate
    if _gate is None:
        run_dir = os.environ.get("MUSTER_RUN_DIR")
        if run_dir:
            _gate = GateFile(run_dir)
    return _gate
