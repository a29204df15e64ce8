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
from dataclasses import replace
from functools import partial
from time import time

from agent.drain.notice import SAME_DEADLINE_S, Notice, OwnDrainRecord, Phase
from agent.rundir.files import RunDir
from launcher_shim.pod.hold import FAREWELL_S
from launcher_shim.rundir import layout
from rdzv.drain.inputs import LiveRound
from rdzv.drain.standing import phase_of
from rdzv.drain.transactions import change, first_write, lift
from rdzv.errors import RecordError
from rdzv.members.registration import Identity
from rdzv.reconcile import DueWrite, Kernel, Outlook, Reconciler
from rdzv.records.drain import CONTROLLER, Drain
from rdzv.records.job import HistoryEntry
from rdzv.snapshot import Snapshot
from rdzv.store import GuardedWrites

log = logging.getLogger(__name__)


class OwnDrain(Reconciler):
    """The drain of this pod: keeps it in the store, and publishes its phase.

    ``grace_s``: the pod's grace, for notices without a deadline. ``boot_s``: the clock of
    ``agent.process``.
    """

    def __init__(
        self,
        kernel: Kernel,
        run_dir: RunDir,
        identity: Identity,
        *,
        grace_s: float,
        boot_s: Callable[[], float],
    ) -> None:
        super().__init__(kernel, "own-drain")
        self.notes: OwnDrainRecord | None = None
        self._run_dir = run_dir
        self._client = kernel.client
        self._identity = identity
        self._grace_s = grace_s
        self._boot_s = boot_s
        self._kept: OwnDrainRecord | None = None
        self._recorded: tuple[float | None, float | None] = (None, None)
        self._finishing = False
        self._phase: Phase | None = None
        self._phase_changed = asyncio.Event()

    # -- for the sidecar's other parts

    def restore(self) -> None:
        """Read what the previous sidecar kept; may block for as long as the disk does."""
        try:
            content = self._run_dir.content(layout.DRAIN)
            kept = None if content is None else OwnDrainRecord.from_json(content)
        except (OSError, RecordError) as error:
            log.warning(
                "resuming a drain from the store alone, %s is unreadable: %s", layout.DRAIN, error
            )
            return
        # A directory may outlive its pod: the notes of another pod do not count.
        if kept is not None and kept.pod_uid == self._identity.pod_uid:
            self.notes = self._kept = kept

    @property
    def active(self) -> bool:
        """Whether this pod is draining, by its own notes or by the store."""
        return self.notes is not None or self._drain(self._client.membership.snapshot()) is not None

    @property
    def due_boot_s(self) -> float | None:
        """The latest moment to pass SIGTERM; None without a drain, or without a deadline."""
        notes = self.notes
        if notes is None or notes.deadline_boot_s is None:
            return None
        reserve_s = min(notes.reserve_s, FAREWELL_S) if self._finishing else notes.reserve_s
        return notes.deadline_boot_s - reserve_s

    @property
    def due_in_s(self) -> float | None:
        """The seconds until then, negative once it has passed; None likewise."""
        due_boot_s = self.due_boot_s
        return None if due_boot_s is None else due_boot_s - self._boot_s()

    def see_round(self, round: LiveRound | None) -> None:
        """Take in the round that this pod's ranks are in, or were in last: whether it ends well."""
        finishing = round is not None and round.ends_well(self._identity.member)
        if finishing != self._finishing:
            self._finishing = finishing
            self.wake()

    def notify(self, notice: Notice) -> None:
        """Take a notice: begin the drain, or add the notice to the one that is there."""
        now_s, uid = self._boot_s(), self._identity.pod_uid
        noted = OwnDrainRecord.of_notice(uid, notice, now_s, self._grace_s)
        if self.notes is None:
            self._phase, self.notes = None, noted
            assert noted.deadline_boot_s is not None
            left_s = round(noted.deadline_boot_s - now_s, 1)
            log.info(
                "draining, this pod has to go within %.1f s (%s): %s",
                left_s,
                notice.source,
                notice.reason,
                extra={"event": "notice", "source": notice.source, "seconds_left": left_s},
            )
        else:
            self.notes = self.notes.joined(noted)
        self.wake()

    async def phase_after(self, before: Phase | None) -> Phase:
        """Wait until the phase of the drain differs from ``before``; return it."""
        while self._phase is None or self._phase == before:
            await self._phase_changed.wait()
        return self._phase

    # -- the loop

    async def step(self) -> Outlook:
        """Keep the notes, the disk, the store and the phase in step."""
        snapshot = self._client.membership.snapshot()
        drain = self._drain(snapshot)
        self._take_in(snapshot, drain)
        await self._keep()
        changed_from = partial(self._client.membership.changed_from, snapshot)
        if self._drain(self._client.membership.snapshot()) != drain:
            # A release that was cancelled meanwhile must not be published: look again at once.
            return Outlook(changed_from)
        self._publish_phase(snapshot, drain)
        now = self.kernel.clock()
        outlived_s = self.notes.outlived_boot_s if self.notes else None
        outlived_in_s = None if outlived_s is None else outlived_s - self._boot_s()
        moments_s = [one for one in (self.due_in_s, outlived_in_s) if one is not None and one > 0]
        due_in_s = self.due_in_s
        write = None
        if (writes := self._writes(snapshot, drain)) is not None:
            # Stop at the deadline: clients that wait here must learn in time that it has passed.
            until_s = math.inf if due_in_s is None else now + due_in_s
            write = DueWrite(lambda: writes, until_s=until_s)
        look_at_s = now + min(moments_s, default=math.inf)
        return Outlook(changed_from, look_at_s, write)

    def _drain(self, snapshot: Snapshot) -> Drain | None:
        return snapshot.drains.get(self._identity.pod_uid)

    def _take_in(self, snapshot: Snapshot, drain: Drain | None) -> None:
        """Update the notes from the stored record: begin, refresh or end them."""
        notes, job = self.notes, snapshot.job
        if job is None:
            return
        if drain is not None:
            now_s = self._boot_s()
            if notes is None:
                self._phase = None
                notes = OwnDrainRecord.of_drain(drain, now_s)
                log.info(
                    "draining, as asked for by %s: %s",
                    drain.requested_by or drain.source,
                    drain.reason,
                    extra={
                        "event": "notice",
                        "source": drain.source,
                        "seconds_left": drain.seconds_left,
                    },
                )
            if drain.seconds_left != self._recorded[0] or drain.source not in notes.sources:
                left_s = drain.seconds_left
                self._recorded = (left_s, None if left_s is None else now_s + left_s)
                notes = notes.joined(OwnDrainRecord.of_drain(drain, now_s))
            self.notes = replace(
                notes,
                generation=job.generation,
                revision=drain.mod_revision,
                outcome=drain.outcome,
                step=drain.step,
            )
        elif notes is not None and notes.generation == job.generation:
            if not self._is_cancelled(snapshot, notes):
                # A store that was emptied or restored has lost the drain: store it again.
                self.notes = replace(notes, generation=0)
                return
            outlived_s = notes.outlived_boot_s
            taken_back = outlived_s is not None and self._boot_s() >= outlived_s
            self.notes = None if taken_back else notes.after_cancellation()
            goes_on = ", and goes on, as the pod is being ended" if self.notes else ""
            log.info(
                "the drain of this pod was cancelled%s",
                goes_on,
                extra={"event": "drain_cancelled"},
            )

    def _is_cancelled(self, snapshot: Snapshot, notes: OwnDrainRecord) -> bool:
        """Return whether the drain was cancelled since it was last seen.

        A cancellation writes the member's incarnation too, and its revision tells. The store's
        revision does not: a restored store may have reached the same one again, or a later one. It
        is compared only if there is no incarnation.
        """
        holder = snapshot.incarnations.get(self._identity.member)
        if holder is None:
            return snapshot.revision >= notes.revision
        return holder.mod_revision > notes.revision

    async def _keep(self) -> None:
        """Write the notes to disk for the next sidecar here."""
        notes = self.notes
        if notes == self._kept:
            return
        if notes is None:
            putting = partial(self._run_dir.remove, layout.DRAIN)
        else:
            putting = partial(self._run_dir.put, layout.DRAIN, notes.to_json())
        if await self.put(putting, self._complain):
            self._kept = notes

    def _complain(self, error: OSError) -> None:
        self.diary.say(f"{layout.DRAIN} cannot be written, retrying: {error.strerror}")

    def _writes(self, snapshot: Snapshot, drain: Drain | None) -> GuardedWrites | None:
        notes, job, now_s = self.notes, snapshot.job, self._boot_s()
        if notes is None or job is None:
            return None
        keys = self._client.keys
        if drain is None:
            record = replace(notes.record(self._identity.member, now_s), at_unix_s=time())
            self._recorded = (record.seconds_left, notes.deadline_boot_s)
            return first_write(keys, snapshot, record)
        after = replace(drain, ending=drain.ending or (notes.ending and not drain.ends))
        if drain.outcome:
            outlived_s = notes.outlived_boot_s
            if outlived_s is None or now_s < outlived_s:
                return None if after == drain else change(keys, snapshot, after)
            why = "the pod outlives its deadline, and is not being ended: it may come back"
            details: dict[str, object] = {"outcome": "cancelled"}
            entry = HistoryEntry("drain", drain.member, why, time(), details)
            compares, operations = lift(keys, snapshot, drain)
            return compares, [*operations, *self._client.history(entry)]
        if drain.source == CONTROLLER and notes.other_source:
            # The controller's reason may go away, and this notice stays valid.
            after = replace(after, source=notes.other_source, requested_by=drain.member)
        if notes.deadline_boot_s is not None and (
            self._recorded[1] is None or self._recorded[1] > notes.deadline_boot_s + SAME_DEADLINE_S
        ):
            sooner = notes.record(drain.member, now_s)
            # Note our own deadline: one computed when the record is seen would be too late again if
            # the store is slow.
            self._recorded = (sooner.seconds_left, notes.deadline_boot_s)
            after = replace(
                after,
                seconds_left=sooner.seconds_left,
                reserve_s=sooner.reserve_s,
                at_unix_s=time(),
            )
        return None if after == drain else change(keys, snapshot, after)

    # -- the phase

    def _publish_phase(self, snapshot: Snapshot, drain: Drain | None) -> None:
        phase = self._phase_now(snapshot, drain)
        if phase is None or phase == self._phase:
            return
        self._phase = phase
        if phase.last:
            # Earlier phases are logged with the gate.
            log.info("%s", phase.sentence, extra={"event": "drain", "phase": phase.name})
        changed, self._phase_changed = self._phase_changed, asyncio.Event()
        changed.set()

    def _phase_now(self, snapshot: Snapshot, drain: Drain | None) -> Phase | None:
        notes = self.notes
        if notes is None:
            was_going = self._phase is not None and not self._phase.last
            return Phase("cancelled", "the drain was cancelled") if was_going else None
        stand = phase_of(snapshot, drain, finishing=self._finishing) if drain else None
        if stand is not None and stand.outcome:
            saved = stand.step if stand.outcome == "committed" else None
            return Phase("released", stand.sentence, stand.outcome, saved)
        if (left_s := self.due_in_s) is not None and left_s <= 0:
            if stand is None or stand.name not in ("saved", "finishing"):
                why = "the deadline has passed before all ranks had saved"
                return Phase("released", why, "expired")
            outcome = "committed" if stand.name == "saved" else "uncommitted"
            why = f"the deadline has passed: {stand.sentence}"
            return Phase("released", why, outcome, stand.step)
        if stand is None:
            return Phase("noted", "the notice is not in the store yet")
        return Phase(stand.name, stand.sentence)
