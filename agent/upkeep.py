# SPDX-License-Identifier: Apache-2.0
"""A member's work for the whole job: deletes what gone pods have left, and reports the job's state.

The oldest listed member deletes. The state is a metric of every sidecar; the eldest also writes
each change of it into the history, of which the controller makes an Event, and goes on from the
newest entry there. Each sidecar logs whether the store's version is fit for a job, as ``muster
doctor`` says.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import time
from typing import cast

from agent.verdict.decision import JobVerdict, verdict
from agent.verdict.states import STATES, Level, State
from agent.verdict.view import present_view
from launcher_shim.c10d.rounds.records import Round
from launcher_shim.c10d.rounds.stages import SHARED_RUN
from rdzv.errors import RecordError, StoreError
from rdzv.job import JobClient
from rdzv.keys import GenerationKeys, last_name
from rdzv.members.gone import kept, leftovers, oldest
from rdzv.members.registrar import Registrar
from rdzv.reconcile import DueWrite, Kernel, Loop, Outlook, Reconciler
from rdzv.records.job import ROUNDS_PER_LIFE, HistoryEntry
from rdzv.sentences import Diary
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, Delete, KeyValue
from rdzv.store.etcd.answers import FLOOR, judge_version

log = logging.getLogger(__name__)

WORKERS = (b"/worker/attempt_", b"init/")
"""Prefixes of the keys of torch's workers there. Keys of other clients are left alone."""

_AUTHOR = re.compile(r"(?P<member>.+?)\.(?:[0-9a-f]{12}\.\d+|[0-9a-f]{32})(?::\d+)?")
"""Names that ``Endpoint`` gives its clients: one of its own, and one behind a relay."""

SWEEP_PAUSE_S = 5.0
"""Pause between two sweeps, in seconds: there is no hurry, and a burst of changes needs one
sweep."""

BATCH_MAX = 50
"""Keys dropped by one transaction, each with a compare: etcd takes 128 of either."""

VERSION_LOOK_S = 3600.0
"""Interval of the check, in seconds: members of a cluster are replaced while a job runs, also by
older ones, and no event tells of it."""

HELD_S: Mapping[Level, float] = {"fault": 30.0, "warning": 30.0, "note": 120.0, "ok": 30.0}
"""Time that a state has to last before it is reported, in seconds, by its level. Shorter: a world
that forms again after a failure would be reported as failing. Worlds may take minutes to gather."""

SETTLED_S = 30.0
"""Time for which the watch has to have worked, in seconds: what is read right after an outage is as
old as the outage, and looks stuck."""

STATE_LOOK_S = 5.0
LOOK_PER_MEMBER_S = 0.02
"""Interval of looks, in seconds, and its least for each member: a look costs O(members)."""

UNCHANGED_S = 60.0
"""Interval of looks at a job that has not changed, in seconds: only times can make it stuck."""

TRAINS: State = "training"
"""State of a job without an entry: nothing is reported of a job that gets on."""


def stale_worker_keys(keys: GenerationKeys, kvs: Iterable[KeyValue]) -> list[KeyValue]:
    """Find the keys that no worker has written since the world before the present one.

    That is the world of every run that goes on, as a worker does not say which run it belongs to.
    """
    kvs = tuple(kvs)
    shared = keys.run(SHARED_RUN)
    of_key: dict[bytes, list[KeyValue]] = {}
    for kv in kvs:
        if kv.key.startswith((shared.kv, shared.sums, shared.queues)):
            name = shared.split(kv.key)[1]
            if name.startswith(WORKERS):
                of_key.setdefault(name, []).append(kv)
    if not of_key:
        return []
    since = min(_formed_before(keys, kvs).values(), default=0)
    stale = [parts for parts in of_key.values() if max(part.mod_revision for part in parts) < since]
    return [kv for parts in stale for kv in parts]


def _formed_before(keys: GenerationKeys, kvs: Iterable[KeyValue]) -> Mapping[str, int]:
    """Return the revision of the world before the present one, by open run; 0 if unknown."""
    open_runs: set[str] = set()
    formed: dict[str, list[tuple[int, int]]] = {}
    for kv in kvs:
        try:
            if kv.key.startswith(keys.runs):
                run_id = keys.run_id_of(kv.key)
                if kv.key == keys.run(run_id).round and not Round.from_kv(kv).closed:
                    open_runs.add(run_id)
            elif kv.key.startswith(keys.job.history):
                details = HistoryEntry.from_kv(kv).details
                run_id, number = str(details.get("run_id", "")), details.get("round")
                if isinstance(number, int) and number // ROUNDS_PER_LIFE == keys.generation - 1:
                    formed.setdefault(run_id, []).append((number, kv.mod_revision))
        except RecordError:
            continue
    return {
        run_id: sorted(rounds)[-2][1] if len(rounds := formed.get(run_id, [])) > 1 else 0
        for run_id in open_runs
    }


def orphans(keys: GenerationKeys, snapshot: Snapshot, kvs: Iterable[KeyValue]) -> list[KeyValue]:
    """Return the connection records of members that are gone, but for the newest ones."""
    of_gone = [
        kv
        for kv in kvs
        if kv.key.startswith(keys.runs)
        and kv.key.startswith(keys.run(keys.run_id_of(kv.key)).operations)
        and (author := _AUTHOR.fullmatch(last_name(kv.key))) is not None
        and author["member"] not in snapshot.members
    ]
    return oldest(of_gone, kept(snapshot))


class Sweeper(Reconciler):
    """The sweeper: it keeps the store's size independent of how many pods a job has ever had."""

    def __init__(
        self, kernel: Kernel, me: str, pod_uid: str, *, pause_s: float = SWEEP_PAUSE_S
    ) -> None:
        super().__init__(kernel, "sweeper")
        self._me = me
        self._pod_uid = pod_uid
        self._pause_s = pause_s

    async def step(self) -> Outlook:
        """Sweep after each change of the membership."""
        membership = self.kernel.client.membership
        snapshot = membership.snapshot()
        surplus = self._surplus(snapshot) if self._is_mine(snapshot) else []
        return Outlook(
            partial(membership.changed_from, snapshot),
            write=_deletion(surplus[:BATCH_MAX]) if surplus else None,
            burst_s=self._pause_s,
        )

    def _is_mine(self, snapshot: Snapshot) -> bool:
        # By age, and not by who trains: a sidecar can sweep without a launcher beside it.
        listed = self.kernel.client.membership.listing().listed
        # The name of a fenced pod is still listed, but another pod holds it.
        return bool(listed) and (listed[0].name, listed[0].pod_uid) == (self._me, self._pod_uid)

    def _surplus(self, snapshot: Snapshot) -> list[KeyValue]:
        assert snapshot.job is not None
        keys = self.kernel.client.keys
        kvs = tuple(self.kernel.client.mirror.kvs.values())
        here = keys.in_generation(snapshot.job.generation)
        return [
            *leftovers(keys, snapshot, kvs),
            *orphans(here, snapshot, kvs),
            *stale_worker_keys(here, kvs),
        ]


def _deletion(kvs: list[KeyValue]) -> DueWrite:
    # A key that was written since then is in use: the whole batch is decided again.
    unchanged = [Compare(kv.key, "mod", "=", kv.mod_revision) for kv in kvs]
    return DueWrite(lambda: (unchanged, [Delete(kv.key) for kv in kvs]))


class StoreVersion(Loop):
    """The check of the store member that this sidecar talks to, at start and every ``repeat_s``.

    An unfit version causes a warning and no more: the operator of the job may have no other.
    """

    def __init__(
        self, client: JobClient, clock: Callable[[], float], *, repeat_s: float = VERSION_LOOK_S
    ) -> None:
        super().__init__(clock)
        self._client = client
        self._repeat_s = repeat_s
        self._diary = Diary(log)

    async def step(self) -> Outlook:
        """Check once the store can be read, then every ``repeat_s``."""
        if not self._client.mirror.loaded:
            return Outlook(partial(self._client.mirror.changed_after, 0))
        try:
            status = await self._client.store.status()
        except StoreError as error:
            log.info("cannot read the version of the store: %s", error)
        else:
            self._log_change(status.endpoint, status.version)
        return Outlook(look_at_s=self.clock() + self._repeat_s)

    def _log_change(self, endpoint: str, version: str) -> None:
        level, why = judge_version(version)
        fault = level == "fault"
        sentence = f"the store at {endpoint}: {why}" + (f": use {FLOOR}, or later" if fault else "")
        extra = {"event": "store_version", "version": version}
        severity = logging.WARNING if fault else logging.INFO
        self._diary.say(sentence, level=severity, extra=extra, topic=why)


def is_news(reported: State, now: State, held_s: float) -> bool:
    """Return whether to report a state that has lasted for ``held_s``, after ``reported``."""
    level = STATES[now].level
    news = STATES[reported].level != "ok" if level == "ok" else now != reported
    return news and held_s >= HELD_S[level]


def last_reported(history: Sequence[HistoryEntry]) -> State:
    """Return the state in the newest entry on states."""
    for entry in reversed(history):
        if entry.what == "state" and (state := entry.details.get("state")) in STATES:
            return cast(State, state)
    return TRAINS


class StateReporter(Reconciler):
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
        look_in_s = max(STATE_LOOK_S, LOOK_PER_MEMBER_S * len(snapshot.members))
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
            self._told = last_reported(history)
            if before is None or before.state != self._seen.state:
                self._since_s = now_s
        if is_news(self._told, self._seen.state, now_s - self._since_s):
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
