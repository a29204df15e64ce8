# SPDX-License-Identifier: Apache-2.0
"""Reports that a job is not getting on: a metric of every sidecar, and an entry in the history.

The eldest member writes the entry, once for each change of the state; the controller makes an Event
of it. The newest entry says what was reported last: the next writer goes on from it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from time import time
from typing import cast

from agent.verdict.decision import JobVerdict, verdict
from agent.verdict.states import STATES, Level, State
from agent.verdict.view import present_view
from rdzv.members.registrar import Registrar
from rdzv.reconcile import DueWrite, Kernel, Outlook, Reconciler
from rdzv.records.history import HistoryEntry
from rdzv.snapshot import Snapshot

log = logging.getLogger(__name__)

HELD_S: Mapping[Level, float] = {"fault": 30.0, "warning": 30.0, "note": 120.0, "ok": 30.0}
"""Time that a state has to last before it is reported, in seconds, by its level. Shorter: a world
that forms again after a failure would be reported as failing. Worlds may take minutes to gather."""

SETTLED_S = 30.0
"""Time for which the watch has to have worked, in seconds: what is read right after an outage is as
old as the outage, and looks stuck."""

LOOK_S = 5.0
LOOK_PER_MEMBER_S = 0.02
"""Interval of looks, in seconds, and its least for each member: a look costs O(members)."""

UNCHANGED_S = 60.0
"""Interval of looks at a job that has not changed, in seconds: only times can make it stuck."""

TRAINS: State = "training"
"""State of a job without an entry: nothing is reported of a job that gets on."""


def due(told: State, now: State, held_s: float) -> bool:
    """Return whether to report a state that has lasted for ``held_s``, after ``told``."""
    level = STATES[now].level
    news = STATES[told].level != "ok" if level == "ok" else now != told
    return news and held_s >= HELD_S[level]


def told_last(history: Sequence[HistoryEntry]) -> State:
    """Return the state in the newest entry on states."""
    for entry in reversed(history):
        if entry.what == "state" and (state := entry.details.get("state")) in STATES:
            return cast(State, state)
    return TRAINS


class StateTeller(Reconciler):
    """One sidecar's view of the job's state."""

    def __init__(self, kernel: Kernel, registrar: Registrar) -> None:
        super().__init__(kernel, "states")
        self._client = kernel.client
        self._registrar = registrar
        self._seen: JobVerdict | None = None
        self._told: State = TRAINS
        self._since_s = 0.0
        self._looked = (-1, 0.0)
        """The mirror's sequence at the last look, and the time of that look."""
        self._defect = ""

    async def step(self) -> Outlook:
        """Report each change of the state, as the eldest."""
        snapshot = self._client.membership.snapshot()
        look_in_s = max(LOOK_S, LOOK_PER_MEMBER_S * len(snapshot.members))
        write = self._due() if self._is_eldest(snapshot) else None
        return Outlook(look_at_s=self.clock() + look_in_s, write=write)

    def by_state(self) -> dict[str, float]:
        """Return 1 for the present state and 0 for the others; 0 for all if it is unknown."""
        found = self._judged()
        now = found[0].state if found is not None else None
        return {state: float(state == now) for state in STATES}

    def stuck_ranks(self) -> dict[str, float]:
        """Return 1 for each rank that keeps the world from training; nothing for any other."""
        if not any(one.still for one in self._client.membership.saves().values()):
            return {}
        found = self._judged()
        still = present_view(self._client).standstill if found is not None else None
        return {} if still is None else {str(one.rank): 1.0 for _, one in still.causes}

    def _is_eldest(self, snapshot: Snapshot) -> bool:
        """Return whether this pod is the eldest of those whose sidecars do the same."""
        me, members = self._registrar.identity.member, snapshot.members
        if me not in members:
            return False
        alike = [one for one in members.values() if one.version == members[me].version]
        return min(alike, key=lambda one: one.age_order).name == me

    def _judged(self) -> tuple[JobVerdict, Sequence[HistoryEntry]] | None:
        """Return the verdict and the history; None if the mirror may be old."""
        if self._client.mirror.healthy_for_s(self.clock()) < SETTLED_S:
            return None
        try:
            view = present_view(self._client)
            return verdict(view, time()), view.history
        except Exception as error:  # what is for people alone must not end the sidecar
            if repr(error) != self._defect:
                sentence = "a defect of muster: cannot tell the state of the job: %s"
                log.critical(sentence, error, exc_info=error, extra={"event": "defect"})
            self._defect = repr(error)
            return None

    def _due(self) -> DueWrite | None:
        """Look at the state, as often as it may have changed; return the entry that is due."""
        now_s, (sequence, looked_s) = self.clock(), self._looked
        changed = self._client.mirror.sequence != sequence
        if self._seen is None or changed or now_s - looked_s >= UNCHANGED_S:
            self._looked = (self._client.mirror.sequence, now_s)
            if (found := self._judged()) is None:
                self._seen = None
                return None
            before, (self._seen, history) = self._seen, found
            self._told = told_last(history)
            if before is None or before.state != self._seen.state:
                self._since_s = now_s
        if due(self._told, self._seen.state, now_s - self._since_s):
            return self._write_of(self._seen)
        return None

    def _write_of(self, now: JobVerdict) -> DueWrite:
        level = STATES[now.state].level
        sentence = ": ".join(filter(None, (now.state, now.why or STATES[now.state].meaning)))
        me = self._registrar.identity.member
        details: dict[str, object] = {"state": now.state}
        if now.causes:
            details["ranks"] = [list(one) for one in now.causes]
        entry = HistoryEntry("state", me, sentence, time(), dict(details))
        return DueWrite(
            lambda: ([], list(self._client.history(entry))),
            f"the job is {sentence}",
            {"event": "state", **details},
            logging.INFO if level in ("ok", "note") else logging.WARNING,
            written=partial(setattr, self, "_told", now.state),
        )
