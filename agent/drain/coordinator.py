# SPDX-License-Identifier: Apache-2.0
"""Carries out what ``rdzv.drain.decision`` decides.

Any sidecar may write a decision, one does, and the others see it in the store.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import time

from agent.drain.own import OwnDrain
from agent.drain.view import DrainView
from agent.drain.writer import DrainWriter
from rdzv.diary import Diary
from rdzv.drain import decision as draining
from rdzv.drain.decision import DrainDecision
from rdzv.drain.inputs import DrainingSnapshot, DrainObservations, DrainPolicy, observe
from rdzv.drain.phases import phase_of
from rdzv.drain.transactions import transaction
from rdzv.job import JobClient
from rdzv.members.registrar import Registrar
from rdzv.records.commit import LastCommit
from rdzv.records.drain import Drain
from rdzv.records.history import HistoryEntry
from rdzv.snapshot import Snapshot

log = logging.getLogger(__name__)

STAGGER_S = (0.1, 0.4)
"""Jitter: the first member of the round writes a decision at once, the others after this long, if
it is still due."""

COMMANDS_LOOK_S = 0.1
"""Poll interval of the commands of a pod that drains; the standard library has no file
notification."""

LOOK_S = (0.05, 0.5)
"""Poll interval: the shortest, and that of a sidecar that is not registered, in seconds."""

STANDS_S = 2.0
"""Log a blocking reason after it has persisted for this long."""

ENDS_AT_ONCE = 25
"""Drains that end in one transaction, each with its record, its vote and history: etcd takes 128
operations, and as many compares. The others follow in the next."""


class Chronicle:
    """The times at which each drain was first seen in each phase, for the history.

    Monotonic, in seconds.
    """

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, float]] = {}

    def see(self, now: float, snapshot: Snapshot) -> None:
        """Record the phases in one snapshot; forget drains that are no longer stored."""
        for pod_uid in self._seen.keys() - snapshot.drains.keys():
            del self._seen[pod_uid]
        for pod_uid, drain in snapshot.drains.items():
            self._seen.setdefault(pod_uid, {}).setdefault(phase_of(snapshot, drain).name, now)

    def phases_s(self, now: float, pod_uid: str) -> Mapping[str, float]:
        """Return the seconds from a drain's first sight to each phase, and to ``now``, its end."""
        seen = self._seen.get(pod_uid, {})
        if not seen:
            return {}
        began = min(seen.values())
        phases = {
            f"{name}_after_s": round(at - began, 3) for name, at in seen.items() if at > began
        }
        return {**phases, "took_s": round(now - began, 3)}


class Coordinator:
    """The writer of due changes to commit and drains. ``clock`` is monotonic, in seconds."""

    def __init__(
        self,
        client: JobClient,
        registrar: Registrar,
        sight: DrainView,
        writing: DrainWriter,
        own: OwnDrain,
        policy: DrainPolicy,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._registrar = registrar
        self._sight = sight
        self._writing = writing
        self._own = own
        self._policy = policy
        self._clock = clock
        self._observations = DrainObservations()
        self._chronicle = Chronicle()
        self._reason = ""
        self._reason_since_s = 0.0
        self._diary = Diary(log)

    async def run(self) -> None:
        """Carry out decisions as the store changes, until cancelled."""
        while True:
            snapshot = await self._sight.snapshot()
            self._own.see_round(snapshot.own_round or snapshot.round)
            now = self._clock()
            due_in_s = self._own.due_in_s
            due_s = {} if due_in_s is None else {snapshot.pod_uid: now + due_in_s}
            self._observations = observe(now, self._observations, snapshot, due_s)
            self._chronicle.see(now, snapshot.membership)
            decision = draining.decide(now, snapshot, self._observations, self._policy)
            wait_s = min(decision.wake_at_s - now, self._standing_s(now, snapshot, decision))
            if decision.commit or decision.last_commit or decision.drains:
                wait_s = LOOK_S[1]
                if self._registrar.registered.is_set():
                    wait_s = self._writing.turn_in_s(snapshot.round, STAGGER_S)
                if wait_s <= 0:
                    await self._carry_out(now, snapshot, decision)
                    continue
            else:
                self._writing.turn_over()
            if snapshot.commands and self._own.active:
                wait_s = min(wait_s, COMMANDS_LOOK_S)
            await self._sight.changed_from(snapshot, max(LOOK_S[0], wait_s))

    def _standing_s(self, now: float, snapshot: DrainingSnapshot, decision: DrainDecision) -> float:
        """Log the blocking reason once it has persisted; return the seconds until that is due.

        Returns infinity if nothing is to be logged any more. Nothing is logged if no drain is
        unfinished and no node waits to join.
        """
        drains = snapshot.membership.drains.values()
        joins = snapshot.round is not None and bool(snapshot.round.reforms)
        if decision.reason != self._reason:
            self._reason, self._reason_since_s = decision.reason, now
        if not joins and all(drain.outcome for drain in drains):
            return math.inf
        left_s = self._reason_since_s + STANDS_S - now
        if left_s > 0:
            return left_s
        self._diary.say(decision.reason)
        return math.inf

    async def _carry_out(
        self, now: float, snapshot: DrainingSnapshot, decision: DrainDecision
    ) -> None:
        drains = _at_once(decision.drains)
        written = decision.last_commit and replace(decision.last_commit, at_unix_s=time())
        decision = replace(decision, last_commit=written, drains=drains)
        compares, operations = transaction(self._client.keys, snapshot, decision)
        commit, last = decision.commit, snapshot.membership.last_commit
        entries = [self._entry(now, drain, last) for drain in drains.values()]
        if commit is not None and commit.refused and commit.mute:
            me = self._registrar.identity.member
            details = {"run_id": commit.run, "round": commit.round, "mute": list(commit.mute)}
            entries.append(HistoryEntry("round", me, commit.reason, time(), details))
        operations += self._client.history(*entries)
        if await self._writing.txn(compares, operations):
            self._writing.turn_over()
            if commit is None:
                # Every pod logs a commit when it shows the gate.
                self._diary.say(decision.reason)

    def _entry(self, now: float, drain: Drain, last: LastCommit | None) -> HistoryEntry:
        committed = drain.outcome == "committed" and last is not None and last.step == drain.step
        details: dict[str, object] = {
            "outcome": drain.outcome,
            "step": drain.step,
            "source": drain.source,
            "requested_by": drain.requested_by,
            "pod_uid": drain.pod_uid,
            **({"cause": drain.cause} if drain.cause else {}),
            **self._chronicle.phases_s(now, drain.pod_uid),
            "samples": last.samples if committed and last is not None else "",
        }
        return HistoryEntry("drain", drain.member, drain.reason, time(), details)


def _at_once(drains: Mapping[str, Drain]) -> dict[str, Drain]:
    """Return the drains to end in one transaction, by pod UID; the others follow.

    One for each member, as each writes the same key of the history: two pods may have had a name.
    """
    of_members: dict[str, str] = {}
    for uid, drain in drains.items():
        of_members.setdefault(drain.member, uid)
    return {uid: drains[uid] for uid in list(of_members.values())[:ENDS_AT_ONCE]}
