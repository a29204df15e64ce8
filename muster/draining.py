# SPDX-License-Identifier: Apache-2.0
"""``with muster.drain()``: every rank saves the same step before one of them has to go.

At each step boundary a rank publishes its step, *then* reads the gate: in this order no sidecar can
agree on a step that a rank has passed. ``muster.boundary`` decides what follows; it is done here.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from operator import index
from types import TracebackType
from typing import Any, Deque, Optional, Tuple, Type

from muster import boundary, saved_steps
from muster.boundary import ENTERED_STEP
from muster.gate import POLL_S, GateFile, LongWait, Reading, own_gate
from muster.process import Lineage, end_well, end_without_torchrun, report_imports, sigterm_ends
from muster.progress import ProgressFile, own_file
from muster.resuming import begins_late, check_start
from muster.saved_steps import CommittedStep, encode

log = logging.getLogger(__name__)


class Drain:
    """One training loop's part in drains, as made by ``muster.drain()``.

    Not for use by two threads at once, except ``committed``. Without a sidecar no save is ever due,
    no pod leaves and nothing is written, but wrong calls raise all the same.
    """

    def __init__(self, file: Optional[ProgressFile], gate: Optional[GateFile]) -> None:
        self._file = file
        self._gate = gate
        self._rank = boundary.Rank(file.rank.master if file else "", ENTERED_STEP)
        self._entered = self._ahead = False
        self._committed: Optional[CommittedStep] = None
        self._wait = LongWait()
        self._thread = 0
        self._later: Deque[Tuple[int, str]] = deque()
        of_torchrun = file is not None and file.rank.of_torchrun
        self._lineage = Lineage(os.environ) if of_torchrun else None

    def __enter__(self) -> Drain:
        global _inside
        self._require_own_process("muster.drain()")
        if self._entered or (self._file.of_drain if self._file is not None else _inside != 0):
            raise RuntimeError("muster.drain() is entered already: a process has one at a time")
        if self._file is None:
            _inside = os.getpid()
        self._entered = True
        report_imports()
        self._boundary = ENTERED_STEP
        self._thread = threading.get_ident()
        if self._file is not None and self._gate is not None:
            if self._file.left is not None:
                self._rank = boundary.enter_again(self._file.left())
            if not self._rank.matched:
                matched = self._gate.wait_for_own(self._file.rank)
                self._rank = self._rank._replace(matched=matched)
            self._file.of_drain = True
            self._committed = None
            self._write_progress(self._rank)
            atexit.register(self._leave, "the process ended before it was saved")
            try:
                self._wait_to_begin()
            except BaseException as error:  # of a signal's handler
                self.__exit__(type(error), error, error.__traceback__)
                raise
            reading = self._own_reading()
            if reading is not None and self._rank.step == ENTERED_STEP:  # the process's first loop
                self._committed = reading.last_commit
                self._boundary = ENTERED_STEP if self._committed is None else int(self._committed)
                self._file.saved.go_on_from(self._committed)
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        global _inside
        if error is None:
            self._note_later()
            self._leave("the loop ended before drain.committed() was called", away=True)
        else:
            self._leave("%s: %s" % (type(error).__name__, error))
        self._entered = False
        if self._file is None and self._is_own_process:
            _inside = 0

    def commit_due(self, step: int) -> bool:
        """Come to the boundary after ``step``; True: save now, then call ``committed(step)``.

        Every rank must call it at the same boundaries, where an optimizer step is complete. It
        takes a few microseconds. While the ranks agree on a commit step it blocks, as a rule for
        less than a second; it does not block a rank that may train on to a later commit step.

        Raises ``RuntimeError`` outside of the ``with`` block, or in a process that was forked from
        the rank, ``TypeError`` if ``step`` is no integer, ``ValueError`` if it is not above the one
        before, and ``CheckpointMissing`` if the process's first ``step`` is below the last commit:
        what all ranks saved would be trained again. If a former life of the job made that commit,
        it logs a warning instead.
        """
        if not self._entered:
            raise RuntimeError("drain.commit_due() belongs into `with muster.drain() as drain`")
        file = self._file  # no call and no text is made where none is needed: each step does this
        if not (self._is_own_process if file is None else file.of_this_process):
            self._require_own_process("drain.commit_due(%d)" % step)
        step = index(step)
        if step <= self._boundary:
            if self._committed is None or self._rank.step != ENTERED_STEP:
                raise ValueError(
                    "drain.commit_due(%d) comes after step %d: steps must grow"
                    % (step, self._boundary)
                )
            begins_late(step, self._committed)
        self._boundary = step
        saved_steps.boundaries += 1
        if file is None:
            return False
        if self._rank.saving:
            why = "the script trained on without calling drain.committed(%d)" % self._rank.step
            log.error("step %d does not count as saved: %s", self._rank.step, why)
            self._rank = boundary.fail(self._rank, why)
        self._rank = boundary.arrive(self._rank, step)
        # A call that has nothing to do is left out: this is all that a step costs.
        if file.saved.named:
            file.saved.come_to(step)
        if saved_steps.listeners:
            saved_steps.at_boundary(step)
        if self._later:
            self._note_later()
        self._write_progress(self._rank)
        return self._follow()

    def committed(self, step: int, cursor: Any = None) -> None:
        """Report that all of this rank's save of ``step`` is on disk, where others can read it.

        If ``commit_due`` asked for this save, returns when training goes on. After a grant it does
        so only if the store takes no writes for 30 s: else the round ends here, by the launcher's
        SIGTERM, which ends the process even if a handler is installed for it.

        Any other save, such as a periodic checkpoint, is put on record, in a few microseconds: a
        step that every rank has reported becomes ``last_commit()``. It may be an earlier step, if a
        save goes on in the background; a report from another thread is published at the next
        boundary. Raises ``ValueError`` for a step after the one that is due, ``TypeError`` if
        ``step`` is no integer, and ``RuntimeError`` outside of the ``with`` block (another thread's
        report is left out then), or if one is due and the process was forked from the rank.

        ``cursor``: the place in the data where training goes on from this step, which
        ``last_commit().cursor`` returns: JSON of 1 KiB at most. A rank that gives none leaves it to
        the others; if two differ, the save counts for no rank. Raises ``ValueError`` if it is no
        such JSON.
        """
        step = index(step)
        text = encode(cursor, step)
        if not self._entered:
            self._refuse_outside(step)
            return
        earlier = self._rank.saving and step < self._rank.step
        if earlier or not self._is_due(step, "committed"):
            self._tell_saved(step, text)
            return
        why = saved_steps.at_save(step)
        if why:
            self.failed(step, why)
            return
        with sigterm_ends():
            self._note_saved(step, text)
            due = True
            while due:  # again where a later attempt agrees on the very step that is saved already
                self._rank = boundary.acknowledge(self._rank)
                self._write_progress(self._rank)
                due = self._follow(parked=True)

    def failed(self, step: int, why: str) -> None:
        """Report that the save of ``step`` failed, if the script itself goes on after the failure.

        An exception that leaves the ``with`` block needs no such call. Returns when all ranks are
        told to train on. Does nothing if no save is due; raises as ``committed`` does.
        """
        due = self._is_due(step, "failed")
        while due:  # again where a later attempt agrees on the very step that could not be saved
            self._rank = boundary.fail(self._rank, why)
            self._write_progress(self._rank)
            due = self._follow()

    @property
    def leaving(self) -> bool:
        """Whether this pod is the one that has to go."""
        reading = self._own_reading()
        return reading is not None and reading.leaving

    @property
    def reason(self) -> str:
        """The reason for the drain, in one sentence; empty without one."""
        reading = self._own_reading()
        return reading.reason if reading is not None else ""

    @property
    def seconds_left(self) -> Optional[float]:
        """Seconds until this pod's processes get SIGTERM at the latest; None without a deadline."""
        reading = self._own_reading()
        if reading is None or reading.deadline_boot_s is None:
            return None
        return max(0.0, reading.deadline_boot_s - time.clock_gettime(time.CLOCK_BOOTTIME))

    def repeat(self) -> None:
        """Publish this rank's state again, as something else in its line has changed."""
        if self._entered and self._file is not None and self._file.of_this_process:
            self._write_progress(self._rank)

    def _refuse_outside(self, step: int) -> None:
        """Refuse a save that is reported outside of the block; a late background save is logged."""
        if self._thread in (0, threading.get_ident()):
            raise RuntimeError("drain.committed() belongs into `with muster.drain() as drain`")
        log.warning(
            "drain.committed(%d) of a background save came after its loop had ended: ignoring it;"
            " wait for the save before the `with` block ends",
            step,
        )

    def _is_due(self, step: int, call: str) -> bool:
        if self._rank.saving and step != self._rank.step:
            raise ValueError(
                "drain.%s(%d): the save of step %d is due" % (call, step, self._rank.step)
            )
        if self._rank.saving:
            self._require_own_process("drain.%s(%d)" % (call, step))
        return self._rank.saving != 0

    def _tell_saved(self, step: int, cursor: str) -> None:
        """Report a save that no drain asked for."""
        # A write by another thread could undo what the training thread has published since.
        if self._note_saved(step, cursor) and threading.get_ident() == self._thread:
            assert self._file is not None
            if step == self._boundary and step == self._file.saved.named[0]:
                self._file.time_save()
            self._write_progress(self._rank)

    def _note_saved(self, step: int, cursor: str) -> bool:
        """Record a save at a boundary that this rank has reached; return whether it is."""
        began = self._file is None or self._rank.step != ENTERED_STEP
        if step > self._boundary or not began:
            if not self._ahead:
                self._ahead = True
                log.warning(
                    "drain.committed(%d) was called before drain.commit_due(%d): ignoring this"
                    " save; call drain.committed after the drain.commit_due of the same step",
                    step,
                    step,
                )
            return False
        if self._file is None or not self._file.of_this_process:
            return False
        if saved_steps.listeners and threading.get_ident() != self._thread:
            self._later.append((step, cursor))
            return False
        why = saved_steps.at_save(step)
        if why:
            log.warning("cannot record the save of step %d: %s", step, why)
            return False
        self._file.saved.add(step, cursor)
        return True

    def _note_later(self) -> None:
        """Record the saves that another thread has reported meanwhile."""
        while self._later:
            self._note_saved(*self._later.popleft())

    @property
    def _is_own_process(self) -> bool:
        """Whether this is the rank's process, and not one that was forked from it in its block."""
        if self._file is None:
            return _inside in (0, os.getpid())
        return self._file.of_this_process

    def _require_own_process(self, call: str) -> None:
        if not self._is_own_process:
            raise RuntimeError(
                "%s in a process that was forked from the rank: call it in the rank's own" % call
            )

    def _own_reading(self) -> Optional[Reading]:
        reading = self._gate.read() if self._gate is not None else None
        if reading is None or reading.gate.master != self._rank.master:
            return None
        return reading

    def _wait_to_begin(self, parked: bool = False) -> None:
        """Wait while the ranks of this round are held."""
        assert self._gate is not None
        while True:
            reading = self._gate.read()
            verdict, self._rank = boundary.begin(self._rank, reading.gate if reading else None)
            if verdict == boundary.PUBLISH:
                self._write_progress(self._rank)
            elif verdict == boundary.GO and not self._is_unsafe(reading):
                return
            else:
                if reading is not None and reading.ending and not parked:
                    with sigterm_ends():
                        return self._wait_to_begin(parked=True)
                self._pause(reading)

    def _follow(self, parked: bool = False) -> bool:
        """Obey the gate until the rank may go on; return whether it has to save now."""
        assert self._gate is not None
        while True:
            reading = self._gate.read()
            verdict, rank = boundary.decide(self._rank, reading.gate if reading else None)
            self._rank = rank
            if verdict == boundary.PUBLISH:
                self._write_progress(rank)
            elif verdict == boundary.WAIT or (verdict == boundary.GO and self._is_unsafe(reading)):
                if reading is not None:
                    over = reading.gate.master != rank.master
                    if over and reading.ended:
                        end_well(
                            "this pod is drained and its run has succeeded: this rank exits with"
                            " status 0"
                        )
                    if (over or reading.ending) and not parked:
                        with sigterm_ends():  # its round is over, or about to be
                            return self._follow(parked=True)
                self._pause(reading)
            else:
                return verdict == boundary.SAVE

    def _is_unsafe(self, reading: Optional[Reading]) -> bool:
        """Return whether the sidecar may still acknowledge an epoch that this rank has given up."""
        outdated = self._file is not None and self._file.outdated
        return outdated and reading is not None and reading.gate.cut

    def _pause(self, reading: Optional[Reading]) -> None:
        """Pause before the gate is read again; log once what a long wait at a step is for."""
        self._wait.look(self._rank, reading)
        if self._file is not None and self._file.unwritten:
            self._write_progress(self._rank)
        if self._lineage is not None and self._lineage.broken:
            end_without_torchrun()
        time.sleep(POLL_S)

    def _write_progress(self, rank: boundary.Rank, inside: bool = True, away: bool = False) -> None:
        assert self._file is not None
        assert self._gate is not None
        self._file.page = self._gate.by_page
        self._file.publish(rank, inside, away)

    def _leave(self, why: str, away: bool = False) -> None:
        """Stop taking part, for good or (``away``) until the next loop; fail a save that is due.

        Does nothing in a forked child that ends: only the rank takes part.
        """
        if self._file is None or not self._file.of_this_process:
            return
        if self._rank.saving:
            self._rank = boundary.fail(self._rank, why)
        self._write_progress(self._rank, inside=False, away=away)
        self._file.of_drain = False
        self._file.left = self._pass_on
        if not away:
            atexit.unregister(self._leave)

    def _pass_on(self) -> boundary.Rank:
        """Hand the state to the next loop, which publishes the rank's progress from now on."""
        atexit.unregister(self._leave)
        return self._rank


_inside = 0
"""The process that is within a ``with muster.drain()`` without a sidecar; 0: none."""


def drain(start: Optional[int] = None, where: object = "the directory") -> Drain:
    """Return the ``Drain`` of a training loop, for ``with muster.drain() as drain``.

    ``start``: the step of the checkpoint that was loaded, the newest in ``where``, 0 without one.
    Raises ``CheckpointMissing`` if all ranks have saved a later one in this life of the job: what
    they saved would be trained again. If a former life made it, it logs a warning.

    On entering it, a rank of torchrun waits until its sidecar knows of its round, at most 5 s, and
    as long as the ranks of its round are held. A process that is not the rank, such as a script
    that the rank starts, takes no part, as without a sidecar.
    """
    if start is not None:
        check_start(start, where)
    file = own_file()
    if file is not None and file.is_foreign:
        return Drain(None, None)
    return Drain(file, own_gate())
