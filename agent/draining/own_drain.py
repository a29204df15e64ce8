# SPDX-License-Identifier: Apache-2.0
"""The drain of this sidecar's own pod: from the first notice to its release, or its cancellation.

However often notice is given, and by whom, it is one drain, keyed by pod UID. What must outlive
this process is kept in the run directory; the drain itself is in the store.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from agent.draining.writing import Writing
from agent.notices.notice import TERMINAL, Notice
from agent.notices.socket import Phase
from agent.rundir import RunDir
from rdzv.errors import RecordError
from rdzv.membership import Membership
from rdzv.model import Drain, Snapshot, dump_record, load_record, take
from rdzv.phases import phase_of
from rdzv.store import Compare, Delete, Put

log = logging.getLogger(__name__)

NAME = "drain.json"
OUTLIVED_S = 5.0
"""A pod that lives on for this long past its deadline was not being ended after all."""


def reserve_of(grace_s: float) -> float:
    """Seconds of a grace that belong to the processes' own end, after the drain's."""
    return max(1.0, min(5.0, grace_s / 3))


@dataclass(frozen=True, slots=True)
class Notes:
    """What is known of the own drain. Times are of the boot clock, None where there is none.

    ``sources`` are those of all notices. ``generation`` is the one that the drain was last seen
    on record in, 0 for none.
    """

    sources: tuple[str, ...]
    reason: str
    deadline_boot_s: float | None
    reserve_s: float
    generation: int = 0

    @property
    def due_boot_s(self) -> float | None:
        """When SIGTERM passes at the latest."""
        return None if self.deadline_boot_s is None else self.deadline_boot_s - self.reserve_s

    def to_json(self) -> bytes:
        """Encode for the run directory."""
        return dump_record(
            {
                "sources": self.sources,
                "reason": self.reason,
                "deadline_boot_s": self.deadline_boot_s,
                "reserve_s": self.reserve_s,
                "generation": self.generation,
            }
        )

    @classmethod
    def from_json(cls, content: bytes) -> Notes:
        """Decode; raises ``RecordError``."""
        fields = load_record(NAME, content)
        deadline = fields.get("deadline_boot_s")
        return cls(
            tuple(str(source) for source in take(NAME, fields, "sources", list)),
            take(NAME, fields, "reason", str),
            None if deadline is None else take(NAME, fields, "deadline_boot_s", float),
            take(NAME, fields, "reserve_s", float),
            take(NAME, fields, "generation", int),
        )


class OwnDrain:
    """Keeps the drain of one pod on record, and tells where it stands.

    ``grace_s`` is the pod's, for notices that do not know how long there is. ``boot_s`` is the
    clock of ``agent.boot_clock``.
    """

    def __init__(
        self,
        run_dir: RunDir,
        membership: Membership,
        writing: Writing,
        *,
        grace_s: float,
        boot_s: Callable[[], float],
    ) -> None:
        self.notes: Notes | None = None
        self._run_dir = run_dir
        self._membership = membership
        self._writing = writing
        self._identity = writing.registrar.identity
        self._grace_s = grace_s
        self._boot_s = boot_s
        self._stirred = asyncio.Event()
        self._phase: Phase | None = None
        self._phase_changed = asyncio.Event()

    # -- for the sidecar's other parts

    def restore(self) -> None:
        """Find what the sidecar before this one kept; may block for as long as the disk does."""
        try:
            content = self._run_dir.content(NAME)
            self.notes = None if content is None else Notes.from_json(content)
        except (OSError, RecordError) as error:
            log.warning("a drain that was going on is looked up in the store alone: %s", error)

    @property
    def active(self) -> bool:
        """Whether this pod is draining, as far as anybody here knows."""
        return self.notes is not None or self._drain(self._membership.snapshot()) is not None

    @property
    def due_boot_s(self) -> float | None:
        """When SIGTERM passes at the latest; None without a drain, or without a deadline."""
        return self.notes.due_boot_s if self.notes else None

    def notify(self, notice: Notice) -> None:
        """Take a notice."""
        left_s = self._grace_s if notice.seconds_left is None else notice.seconds_left
        deadline_s = self._boot_s() + left_s
        former = self.notes
        if former is None:
            self._phase = None
            self.notes = Notes((notice.source,), notice.reason, deadline_s, reserve_of(left_s))
            log.info(
                "this pod is to go away within %.1f s (%s): %s",
                left_s,
                notice.source,
                notice.reason,
                extra={"event": "notice", "source": notice.source, "seconds_left": left_s},
            )
        else:
            known_s = math.inf if former.deadline_boot_s is None else former.deadline_boot_s
            self.notes = replace(
                former,
                sources=tuple(dict.fromkeys((*former.sources, notice.source))),
                deadline_boot_s=min(known_s, deadline_s),
                reserve_s=former.reserve_s or reserve_of(left_s),
            )
        self._stirred.set()

    async def phase_after(self, known: Phase | None) -> Phase:
        """Wait until the drain stands elsewhere than at ``known``; return where."""
        while self._phase is None or self._phase == known:
            await self._phase_changed.wait()
        return self._phase

    # -- how

    async def run(self) -> None:
        """See the drain through, for ever."""
        kept = self.notes
        while True:
            self._stirred.clear()
            snapshot = self._membership.snapshot()
            drain = self._drain(snapshot)
            await self._follow(snapshot, drain)
            if self.notes != kept:
                kept = self.notes
                await self._keep(kept)
            self._tell(snapshot, drain)
            await self._change_from(snapshot)

    def _drain(self, snapshot: Snapshot) -> Drain | None:
        return snapshot.drains.get(self._identity.pod_uid)

    async def _follow(self, snapshot: Snapshot, drain: Drain | None) -> None:
        """Bring the record and the notes into step."""
        notes, job = self.notes, snapshot.job
        if drain is not None and job is not None:
            if notes is None:
                notes = self._notes_of(drain)
            self.notes = replace(notes, generation=job.generation)
            await self._end_if_outlived(drain)
        elif notes is not None and job is not None:
            if notes.generation == job.generation:
                log.info("the drain of this pod was cancelled", extra={"event": "drain_cancelled"})
                self.notes = None
            else:
                await self._record(notes)

    def _notes_of(self, drain: Drain) -> Notes:
        """A drain that somebody else asked for: its time counts from when it is seen."""
        left_s = drain.seconds_left
        deadline_s = None if left_s is None else self._boot_s() + left_s
        log.info(
            "this pod is drained by %s: %s",
            drain.requested_by or drain.source,
            drain.reason,
            extra={"event": "notice", "source": drain.source, "seconds_left": left_s},
        )
        return Notes((drain.source,), drain.reason, deadline_s, drain.reserve_s)

    async def _record(self, notes: Notes) -> None:
        held = self._writing.registrar.held
        if held is None or not self._writing.registrar.registered.is_set():
            return
        key = self._membership.keys.in_generation(held.generation).drain(self._identity.pod_uid)
        left_s = None
        if notes.deadline_boot_s is not None:
            left_s = max(0.0, notes.deadline_boot_s - self._boot_s())
        drain = Drain(
            pod_uid=self._identity.pod_uid,
            member=self._identity.member,
            reason=notes.reason,
            source=notes.sources[0],
            seconds_left=left_s,
            reserve_s=notes.reserve_s,
            requested_by=self._identity.member,
        )
        await self._writing.txn([Compare(key, "create", "=", 0)], [Put(key, drain.to_json())])

    async def _end_if_outlived(self, drain: Drain) -> None:
        """Take a drain back behind which there was no end: only the sidecar was restarted."""
        notes = self.notes
        if notes is None or notes.deadline_boot_s is None or not drain.outcome:
            return
        if TERMINAL.intersection(notes.sources) or notes.sources[0] != "prestop":
            return
        if self._boot_s() < notes.deadline_boot_s + OUTLIVED_S:
            return
        keys = self._membership.keys.in_generation(notes.generation)
        key = keys.drain(drain.pod_uid)
        why = "the pod has outlived its grace: only its sidecar was stopped, and it may come back"
        await self._writing.txn(
            [Compare(key, "mod", "=", drain.mod_revision)],
            [Delete(key), *self._writing.history(drain.member, why, {"outcome": "cancelled"})],
        )

    def _tell(self, snapshot: Snapshot, drain: Drain | None) -> None:
        phase = self._phase_now(snapshot, drain)
        if phase is None or phase == self._phase:
            return
        self._phase = phase
        log.info("%s", phase.sentence, extra={"event": "drain", "phase": phase.name})
        changed, self._phase_changed = self._phase_changed, asyncio.Event()
        changed.set()

    def _phase_now(self, snapshot: Snapshot, drain: Drain | None) -> Phase | None:
        notes = self.notes
        if notes is None:
            was_going = self._phase is not None and not self._phase.last
            return Phase("cancelled", "the drain was cancelled") if was_going else None
        if drain is not None:
            stand = phase_of(snapshot, drain)
            if stand.name == "released":
                return Phase("released", stand.sentence, stand.outcome)
        if notes.due_boot_s is not None and self._boot_s() >= notes.due_boot_s:
            return Phase("released", "the time is over before all had saved", "expired")
        if drain is None:
            return Phase("noted", "the notice is not on record yet")
        return Phase(stand.name, stand.sentence)

    async def _keep(self, notes: Notes | None) -> None:
        """Keep the notes for the sidecar that starts here next."""
        try:
            if notes is None:
                await asyncio.to_thread((self._run_dir.path / NAME).unlink, missing_ok=True)
            else:
                await asyncio.to_thread(self._run_dir.put, NAME, notes.to_json())
        except OSError as error:
            log.error("%s cannot be written: %s", NAME, error, extra={"event": "drain_not_kept"})

    async def _change_from(self, snapshot: Snapshot) -> None:
        """Wait for a notice, a change in the store, or the moment at which time changes things."""
        stirred = asyncio.create_task(self._stirred.wait(), name="notice")
        changed = asyncio.create_task(self._membership.changed_from(snapshot), name="membership")
        try:
            await asyncio.wait(
                (stirred, changed),
                timeout=self._pause_s(),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for task in (stirred, changed):
                task.cancel()
            await asyncio.gather(stirred, changed, return_exceptions=True)

    def _pause_s(self) -> float | None:
        notes = self.notes
        if notes is None:
            return None
        registered = self._writing.registrar.registered.is_set()
        moments = [self._boot_s() + 0.1] if registered and not notes.generation else []
        if not registered:
            moments.append(self._boot_s() + 0.5)
        if notes.deadline_boot_s is not None:
            now = self._boot_s()
            ends = (notes.deadline_boot_s - notes.reserve_s, notes.deadline_boot_s + OUTLIVED_S)
            moments += [at for at in ends if at > now]
        return max(0.01, min(moments) - self._boot_s()) if moments else None
