# SPDX-License-Identifier: Apache-2.0
"""Stores what the ranks of this pod have saved, and the newest step that all ranks have saved.

Ranks of a central launcher save for themselves: of them it stores numbers and step. Both at a
limited rate: nothing waits for them, and a job of many pods may save often. For such a launcher
that drains, the save of this pod's rank is promised, and then reported, without delay.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from time import time

from agent.drain.decisions import DrainView, RoundSource, turn_of
from agent.rundir.files import RunDir
from agent.stuck import StillWatch
from agent.verdict.view import present_view
from launcher_shim.c10d.rounds.observations import NO_STEP
from launcher_shim.pod.hold import reserve_s
from rdzv.drain import saves
from rdzv.drain.gate import WAITS
from rdzv.drain.inputs import DrainingSnapshot, LiveRound
from rdzv.drain.saves import (
    DIFFER,
    differing,
    newest_transaction,
    of_central,
    saves_of,
    steady,
    timed,
)
from rdzv.drain.standing import answer, asked
from rdzv.drain.transactions import change
from rdzv.members.registrar import Registrar
from rdzv.reconcile import DueWrite, Kernel, Outlook, Reconciler
from rdzv.records.drain import Drain
from rdzv.records.job import HistoryEntry
from rdzv.records.progress import CENTRAL_RUN, PodSaves, RankProgress
from rdzv.store import Compare, GuardedWrites, Put

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Poll interval of the ranks' progress; the standard library has no file notification. With a
shorter one, less is lost of a job that vanishes right after a save."""

START_LOOK_S = 1.0
"""The same in rank 0's pod, from the import of Muster to the first step: newcomers wait for it."""

REPORT_PER_MEMBER_S = 0.03
"""Shortest interval between two reports of one pod, for each member of its round: together they
make at most 33 writes a second, each of which reaches every sidecar."""

STEP_S = 30.0
"""Interval at which the pod of rank 0 reports its step while that changes, in seconds."""

GROWN = 1.5
"""Factor by which a slow save must have grown to be reported again."""

TURN_S = LOOK_S
"""Time between two turns to store a common step, in seconds."""

LAUNCHER_LOOK_S = 0.05
"""Poll interval of the ranks while a save is to come: the standard library has no file
notification."""


class SaveReporter(Reconciler):
    """The reporter of one pod's saves. ``grace_s``: in seconds.

    ``ends_stuck``: a rank that keeps the world from training is ended.
    """

    def __init__(
        self,
        kernel: Kernel,
        run_dir: RunDir,
        registrar: Registrar,
        view: DrainView,
        rounds: RoundSource,
        *,
        watch: StillWatch,
        ends_stuck: bool,
        grace_s: float,
    ) -> None:
        super().__init__(kernel, "saves")
        self.own: PodSaves | None = None
        """The saves of this pod's ranks in their round, as of the last poll."""
        self._run_dir = run_dir
        self._client = kernel.client
        self._registrar = registrar
        self._view = view
        self._rounds = rounds
        self._grace_s = grace_s
        self._slow_s = 0.0
        self._reported_s = -math.inf
        self._slow: DueWrite | None = None
        self._differed = ""
        self._watch = watch
        self._ends_stuck = ends_stuck

    async def step(self) -> Outlook:
        """Poll the ranks and the store; return the first write that is due, as the next follows."""
        now, run_dir = self.kernel.clock(), self._run_dir
        snapshot = await self._view.snapshot()
        ranks, imported, commands = await asyncio.to_thread(
            lambda: (run_dir.ranks(), run_dir.imported(), run_dir.commands())
        )
        me = self._registrar.identity
        # Ranks of another run save for themselves: their round is not the one that counts.
        own = saves_of(ranks, snapshot.round, me.member, me.pod_uid)
        if own is not None:
            took_s, reserved_s = snapshot.commit.took_s, reserve_s(self._grace_s)
            own = timed(own, took_s, self._grace_s, reserved_s)
            commit, round = snapshot.commit, snapshot.round
            assert round is not None
            commits = commit.is_of(round.run, round.number) and commit.phase in WAITS
            await self._watch.look(ranks, round, commits=commits)
            own = replace(
                own,
                still=self._watch.still,
                still_since_unix_s=self._watch.since_unix_s if self._watch.still else 0.0,
            )
            self._warn_if_slow(own, snapshot.round)
        elif snapshot.round is None:
            own = of_central(ranks, commands, me.member, me.pod_uid)
        self.own = own
        self._warn(differing(ranks, snapshot.round, me.member))
        if self._ends_stuck and self._watch.still:
            await self._watch.end(self._causes())
        reports_start = self._pass_on(ranks, imported, snapshot.own_round)
        hurries = reports_start or self._watch.waits
        hurries |= own is not None and bool(commands) and own.step < 0
        look_at_s = now + (START_LOOK_S if hurries else LOOK_S)
        write = self._slow or self._report(now, snapshot) or self._conclusion(snapshot)
        return Outlook(look_at_s=look_at_s, write=write)

    def _causes(self) -> Collection[int]:
        """Return the ranks of this pod that keep the world from training, as all pods report."""
        found, me = present_view(self._client).standstill, self._registrar.identity.member
        return [] if found is None else [one.rank for pod, one in found.causes if pod == me]

    def _pass_on(
        self, ranks: Sequence[RankProgress], imported: str, round: LiveRound | None
    ) -> bool:
        """Pass the ranks' step on to the rendezvous; return whether it is to report the first."""
        if round is None or not round.master:
            return False
        steps = [rank.step for rank in ranks if rank.master == round.master]
        if not steps and imported != round.master:
            return False
        return self._rounds.ranks_at(round, max(steps, default=NO_STEP))

    def _warn(self, differ: str) -> None:
        """Log once per save that its ranks disagree on where in the data it is."""
        if differ and differ != self._differed:
            self._differed = differ
            log.warning(
                "this save cannot become the last commit: %s",
                differ,
                extra={"event": "cursors_differ"},
            )

    def _warn_if_slow(self, own: PodSaves, round: LiveRound | None) -> None:
        """Say that a save takes longer than a drain has: at the first one, and if it grows."""
        if own.save_s <= self._slow_s * GROWN:
            return
        self._slow_s = own.save_s
        log.warning("%s", own.too_slow, extra={"event": "slow_save", "save_s": own.save_s})
        if round is not None and round.members[:1] == (own.member,):
            details = {"save_s": own.save_s, "grace_s": own.grace_s, "reserve_s": own.reserve_s}
            entry = HistoryEntry("slow", own.member, own.too_slow, time(), dict(details))
            self._slow = DueWrite(partial(self._slow_writes, entry))

    def _slow_writes(self, entry: HistoryEntry) -> GuardedWrites:
        # Once: the log has it in any case.
        self._slow = None
        return [], list(self._client.history(entry))

    @property
    def steps_at_risk(self) -> int:
        """Steps of this pod since the last commit; -1 while its ranks are in no round."""
        if self.own is None or self.own.run == CENTRAL_RUN:
            return -1
        last = self._client.membership.snapshot().commit_to_start_from
        saved = last.step if last is not None and last.is_of(self.own.run) else 0
        return max(0, self.own.step - saved)

    def _report(self, now: float, snapshot: DrainingSnapshot) -> DueWrite | None:
        """Return the write of this pod's saves if the stored report differs and is old enough."""
        own, round, lease_id = self.own, snapshot.round, self._registrar.lease_id
        generation = self._registrar.generation
        if own is None or lease_id is None or generation is None:
            return None
        key = self._client.keys.in_generation(generation).pod_saves(own.member)
        kv = self._client.mirror.kvs.get(key)
        stored = self._client.membership.saves().get(own.member)
        if kv is None or stored is None or kv.lease != lease_id:
            stored = PodSaves(own.member, "", "", 0)
        own = steady(own, stored)
        same = own == replace(stored, step=own.step, at_unix_s=0.0, mod_revision=0)
        first = 0 in own.ranks if round is None else own.member == round.members[0]
        tells_step = first and own.step >= 0
        if same and (not tells_step or own.step == stored.step):
            return None
        unchanged = own.newest is None and not tells_step
        unchanged &= (own.still, own.waits) == (stored.still, stored.waits)
        if unchanged and round is not None:
            return None
        size = 1 if round is None else len(round.members)
        pause_s = STEP_S if same else max(LOOK_S, REPORT_PER_MEMBER_S * size)
        if now - self._reported_s < pause_s:
            return None
        put = Put(key, replace(own, at_unix_s=time()).to_json(), lease_id)
        compares = [Compare(key, "mod", "=", kv.mod_revision if kv is not None else 0)]
        return DueWrite(lambda: (compares, [put]), written=partial(self._note_report, now))

    def _note_report(self, now: float) -> None:
        self._reported_s = now

    def _conclusion(self, snapshot: DrainingSnapshot) -> DueWrite | None:
        """Return the write of the newest step that all ranks have saved; None if there is none."""
        saved, why = saves.newest_saved(snapshot, self._client.membership.saves())
        if saved is None:
            if why.startswith(DIFFER):
                self._warn(why)
            return None
        saved = replace(saved, at_unix_s=time())
        me = self._registrar.identity.member
        writes = partial(newest_transaction, self._client.keys, snapshot, saved)
        return DueWrite(writes, why, turn=turn_of(snapshot, me, TURN_S))


class LauncherSaves(Reconciler):
    """The follower of the launcher's drain, on behalf of the ranks of one pod."""

    def __init__(self, kernel: Kernel, run_dir: RunDir, me: str) -> None:
        super().__init__(kernel, "launcher-saves")
        self._run_dir = run_dir
        self._me = me

    async def step(self) -> Outlook:
        """Follow the store, and the ranks while a save is to come."""
        client = self.kernel.client
        snapshot = client.membership.snapshot()
        changed = partial(client.membership.changed_from, snapshot)
        drain = asked(snapshot)
        if drain is None or drain.outcome or drain.step is not None:
            return Outlook(changed)
        # A rank that ended has left its file behind.
        running = await asyncio.to_thread(self._run_dir.commands)
        ranks = await asyncio.to_thread(self._run_dir.ranks) if running else ()
        after = answer(
            drain,
            self._me,
            snapshot,
            saver=any(rank.saver for rank in ranks),
            answers=[rank.answered for rank in ranks if rank.answered],
        )
        write = None
        if after is not None:
            writes = partial(change, client.keys, snapshot, after)
            write = DueWrite(writes, written=partial(_log_save, after))
        return Outlook(changed, self.kernel.clock() + LAUNCHER_LOOK_S, write)


def _log_save(drain: Drain) -> None:
    log.info(
        "a rank of this pod %s before %s goes",
        "saves" if drain.step is None else f"has saved step {drain.step}",
        drain.member,
        extra={"event": "launcher_save", "step": drain.step},
    )
