# SPDX-License-Identifier: Apache-2.0
"""A rank's progress, reported to the sidecar through one small file per rank.

The file is ``$MUSTER_RUN_DIR/progress/<local rank>.json``: one line of JSON, padded with blanks. A
process renames its own file into place once and from then on overwrites the line in place, with one
``pwrite``: a few microseconds, and no new space on a disk that has become full. A reader that sees
parts of two writes finds a wrong checksum and reads again.
"""

from __future__ import annotations

import errno
import logging
import os
import time
import zlib
from contextlib import suppress
from operator import index
from typing import Callable, Mapping, Optional, Tuple

from muster import process
from muster.boundary import Rank
from muster.process import FileOwner, RankIdentity, began, living_owner
from muster.saved_steps import NOT_PLAIN, CursorFile, SavedSteps, plain
from muster.waiting import DIRECTORY_NAME, watch

log = logging.getLogger(__name__)

SCHEMA = 1

BLOCK_BYTES = 512
"""The length of the line is a multiple of this: mostly twice, more with a very long host name."""

VARYING_BYTES = 660
"""Maximum length of the fields after ``master``."""

WORLD_BYTES = 512
"""Maximum length of what a rank says of a world that changes in place."""

TIMED_S, TIMED_MAX_S = 1.0, 1e6
"""Bounds on the times of saves that are reported, in seconds: shorter ones endanger no drain."""

LOOK_LINES = 16
"""Lines after which a rank looks whether its file is still in its place: a look takes 1 µs, of 6 of
a boundary."""


class ProgressFile:
    """One rank's progress file; created with its first line.

    It belongs to the process that created it: a process forked from that writes nothing. A foreign
    process, such as a script that the rank starts, does not take it from a rank that lives. A rank
    from which one has taken it puts it back.
    ``of_drain``: ``muster.drain()`` reports the steps now. ``left``: returns the rank's state on
    leaving the last such block. ``saved``: the steps it has saved, reported with all else.
    ``mute``: ``report_step`` has given up. ``saver``: this rank saves if that is asked for a
    launcher that goes; ``answered``: (ask, step) of its newest save of that kind. ``page``: it
    reads the gate's page. ``tag``: the save tag that the script has asked for, empty before.
    ``world``: what the rank says of a world that changes in place, as JSON; empty for nothing.
    ``unwritten``: the state that was to be published last is not in it; ``outdated``: an older one
    is, and could not be removed.
    """

    def __init__(self, directory: str, environ: Mapping[str, str]) -> None:
        self.directory = directory
        self.rank = rank = RankIdentity(environ)
        self._path = os.path.join(directory, "%d.json" % rank.local_rank)
        self._pid = os.getpid()
        self._forks = process.forks
        self._started = began("self") or 0
        self._changes_rank = process.CENTRAL_RANK in environ
        self._foreign = False
        self._lines = 0
        self._cursors = CursorFile(directory, rank.local_rank, self._pid, self._started)
        self._master = NOT_PLAIN.sub("?", rank.master)
        self._identity = self._identified()
        fixed = len('{"crc":"00000000"') + len(self._identity) + VARYING_BYTES + len("\n")
        self._blanks_to = -(-fixed // BLOCK_BYTES) * BLOCK_BYTES - len('{"crc":"00000000"')
        self._descriptor = -1
        self._watched = False
        self._first = -1
        self.of_drain = False
        self.left: Optional[Callable[[], Rank]] = None
        self.saved = SavedSteps()
        self.mute = False
        self.saver = False
        self.answered: Optional[Tuple[int, int]] = None
        self.page = False
        self.tag = ""
        self.world = ""
        self.unwritten = self.outdated = self._warned = False
        self._save = ""
        self._waits = ""
        self._tagged = self._identity  # all that changes seldom: the text of a step costs less

    def _identified(self) -> str:
        rank = self.rank
        return (
            ',"schema":%d,"pid":%d,"started":%d,"restart":%d,"rank":%d,"local_rank":%d,'
            '"world_size":%d,"local_world_size":%d,"master":"%s",'
            % (
                SCHEMA,
                self._pid,
                self._started,
                rank.restart,
                rank.rank,
                rank.local_rank,
                rank.world_size,
                rank.local_world_size,
                self._master,
            )
        )

    def make_room(self) -> None:
        """Make the line long enough for ``world``: the next one is in a new file."""
        self._blanks_to += WORLD_BYTES
        self.close()

    def renumber(self, rank: int, world_size: int) -> None:
        """Report as another rank of the same round from now on: its world has changed in place."""
        self.rank.rank, self.rank.world_size = rank, world_size
        self._identity = self._identified()
        self._retag()

    @property
    def of_this_process(self) -> bool:
        """Whether this process created it, and not one that this process was forked from."""
        return self._forks == process.forks

    @property
    def has_spoken(self) -> bool:
        """Whether something has been written to it."""
        return self._descriptor >= 0

    def write(
        self,
        step: int,
        drain: bool = False,
        held: bool = False,
        epoch: int = 0,
        acked: Optional[Tuple[int, int]] = None,
        failed: Optional[Tuple[int, str]] = None,
        away: bool = False,
    ) -> None:
        """Write the whole line; raises ``OSError``. ``docs/training.md`` has the fields."""
        if self._forks != process.forks or (self._descriptor < 0 and self.is_foreign):
            return
        if self._first < 0:
            self._first = step
        record = (
            '%s"first":%d,"step":%d,"time":%.3f,"drain":%s,"held":%s,"epoch":%d'
            ',"acked":%s,"failed":%s%s%s%s%s%s%s%s}'
            % (
                self._tagged,
                self._first,
                step,
                time.time(),
                "true" if drain else "false",
                "true" if held else "false",
                epoch,
                "null" if acked is None else "[%d,%d]" % acked,
                "null" if failed is None else '[%d,"%s"]' % (failed[0], plain(failed[1])),
                ',"away":true' if away else "",
                self.saved.told,
                ',"saver":true' if self.saver else "",
                ',"answered":[%d,%d]' % self.answered if self.answered else "",
                ',"page":true' if self.page else "",
                self._waits,
                ',"world":' + self.world if self.world else "",
            )
        )
        summed = record.ljust(self._blanks_to - 1).encode("ascii") + b"\n"
        line = b'{"crc":"%08x"%b' % (zlib.crc32(summed), summed)
        if self.saved.with_cursors:  # before the line, so that its reader finds the cursors
            self._cursors.write(self.saved.cursors)
        if self._descriptor < 0:
            self._create(line)
            if self.rank.world_size > 1 and _file is self and not self._watched:
                self._watched = True
                watch(self._boundaries, self._tell_waits)
            return
        self._lines += 1
        if self._lines % LOOK_LINES == 0 and self._is_unlinked() and self._is_robbed():
            self.close()
            self._create(line)
        elif os.pwrite(self._descriptor, line, 0) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)

    def publish(self, rank: Rank, inside: bool = True, away: bool = False) -> None:
        """Write the state of a rank; if that fails, remove the file, which is outdated then."""
        try:
            self.write(rank.step, inside, rank.held, rank.saving, rank.acked, rank.failed, away)
            self.unwritten = self.outdated = False
        except OSError as error:
            self.unwritten = True
            if not self._warned:
                self._warned = True
                log.warning(
                    "the progress of this rank cannot be written, so no step can be committed until"
                    " it can; training goes on: %s",
                    error,
                )
            self._take_back()

    def _take_back(self) -> None:
        try:
            self.remove()
            self.outdated = False
        except OSError as error:
            # The file that remains is outdated: a save may then be asked for too early, but as this
            # rank cannot acknowledge it, it counts for no rank.
            self.outdated = True
            log.warning("cannot delete the outdated progress file of this rank: %s", error)

    @property
    def is_foreign(self) -> bool:
        """Whether the file is another process's, and this one is not the rank; for good then."""
        if not self._foreign and self._descriptor < 0 and self.of_this_process:
            owner = living_owner(self._path)
            if owner is not None and self._is_rank(owner):
                self._foreign = True
                log.warning(
                    "process %d reports the steps of this rank: this process, %d, reports none and"
                    " takes part in no drain",
                    owner.pid,
                    self._pid,
                )
        return self._foreign

    def _is_rank(self, owner: FileOwner) -> bool:
        """Return whether ``owner``, which lives, is the rank, and this process is not.

        Of two with one round and local rank the older one is: the other one has inherited its
        environment. A central launcher gives processes that live other ranks.
        """
        if owner.pid == self._pid or self._changes_rank:
            return False
        older = (owner.started, owner.pid) < (self._started, self._pid)
        if self.rank.of_torchrun:
            return older and owner.master == self._master
        return older or bool(owner.master)

    def _is_unlinked(self) -> bool:
        return os.fstat(self._descriptor).st_nlink == 0

    def _is_robbed(self) -> bool:
        """Return whether the file, which is not at its path any more, is to be put back there."""
        owner = living_owner(self._path)
        if owner is not None and (
            owner.pid == self._pid
            or self._is_rank(owner)
            or owner.master not in ("", self._master)  # this rank's world is over
        ):
            return False
        by = "" if owner is None else ", process %d has taken it" % owner.pid
        log.warning("the progress file of this rank was gone%s: it is put back", by)
        return True

    def take_tag(self, tag: str) -> None:
        """Report a save tag from now on, and no earlier saves, as they have other paths."""
        if tag != self.tag:
            self.tag = tag
            self._retag()
            self.saved.forget()

    def time_save(self) -> None:
        """Report from now on how long ago the last line was written, at the boundary of a save."""
        took_s = 0.0
        if self._descriptor >= 0:  # not by a time kept at each step, which would cost each step
            took_s = time.time() - os.fstat(self._descriptor).st_mtime
        self._save = '"save_s":%.1f,' % took_s if TIMED_S <= took_s < TIMED_MAX_S else ""
        self._retag()

    def _retag(self) -> None:
        tag = '"tag":"%s",' % self.tag if self.tag else ""
        self._tagged = self._identity + self._save + tag

    def _boundaries(self) -> int:
        """Return a number that changes at each boundary; below 0 once this is not the file."""
        return self._lines if _file is self else -1

    def _tell_waits(self, share: Optional[float]) -> None:
        """Report from now on which share of its time this rank waits for others."""
        self._waits = "" if share is None else ',"waits":%.2f' % share

    def close(self) -> None:
        """Write no more; the file stays until another process's file takes its place."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Delete the file: a line that is no longer true must not remain. Raises ``OSError``."""
        if self._descriptor >= 0 and self.of_this_process:
            with suppress(FileNotFoundError):
                os.unlink(self._path)
            # Only now: as long as the line is there, it can be written over or deleted.
            os.close(self._descriptor)
            self._descriptor = -1

    def _create(self, line: bytes) -> None:
        try:
            os.makedirs(self.directory)
        except FileExistsError:
            pass  # the sidecar has made it
        else:
            os.chmod(self.directory, 0o1777)
        try:
            self._replace(line)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._take_over(line):
                raise

    def _replace(self, line: bytes) -> None:
        temporary = os.path.join(self.directory, ".%d.%d.tmp" % (self.rank.local_rank, os.getpid()))
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.fchmod(descriptor, 0o644)  # the sidecar is another user, whatever the umask is
            if os.write(descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), temporary)
            os.replace(temporary, self._path)
        except OSError:
            os.close(descriptor)
            os.unlink(temporary)
            raise
        self._descriptor = descriptor

    def _take_over(self, line: bytes) -> bool:
        """Write over the line of the process before, which has ended; return False if that fails.

        On a full disk there is no space for another file.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        found = os.fstat(descriptor)
        ours = found.st_uid == os.geteuid() and found.st_size == len(line)
        if not ours or os.pwrite(descriptor, line, 0) != len(line):
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True


_file: Optional[ProgressFile] = None
_looked = False


def own_file() -> Optional[ProgressFile]:
    """Return this process's file; None without ``MUSTER_RUN_DIR``, that is, without a sidecar.

    In a process that was forked from a rank that has written, such as a worker of a data loader, it
    is that rank's file, and writes nothing.
    """
    global _file, _looked
    if _file is not None and not _file.has_spoken and not _file.of_this_process:
        _looked = False  # a launcher that forks its ranks
    if not _looked:
        _looked = True
        run_dir = os.environ.get("MUSTER_RUN_DIR")
        if run_dir:
            _file = ProgressFile(os.path.join(run_dir, DIRECTORY_NAME), os.environ)
    return _file


def _be(rank: int, world_size: int) -> None:
    """Let this process report as this rank from now on: that of a central launcher changes."""
    global _file
    file = own_file()
    if file is not None and (file.rank.rank, file.rank.world_size) != (rank, world_size):
        local_rank = os.environ.get(process.CENTRAL_LOCAL_RANK, "0")
        place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": local_rank}
        place[process.CENTRAL_RANK] = str(rank)  # not every launcher gives it
        file.close()
        _file = ProgressFile(file.directory, {**os.environ, **place})
        # A reset makes the process another rank, but what it has saved stays saved.
        _file.saver, _file.answered = file.saver and file.rank.rank == rank, file.answered


def report_step(step: int, rank: Optional[int] = None, world_size: Optional[int] = None) -> None:
    """Report that this rank is at ``step``; call it at each step boundary.

    Takes a few microseconds. It does nothing without ``MUSTER_RUN_DIR`` (no sidecar), and within
    ``muster.drain()``, which reports the steps itself. Under Horovod give ``hvd.rank()`` and
    ``hvd.size()``, which change while a process lives; torchrun gives them in the environment.
    """
    step = index(step)  # raises TypeError without a sidecar, too
    if rank is not None and world_size is not None:
        _be(rank, world_size)
    file = own_file()
    if file is None or file.mute or file.of_drain:
        return
    try:
        file.write(step)
    except OSError as error:
        # Training goes on without it: a full disk must not stop a job over a progress file.
        log.warning("progress is no longer written: %s", error)
        file.mute = True
