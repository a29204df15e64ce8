# SPDX-License-Identifier: Apache-2.0
"""The loop that decides on one run whenever something has changed, and writes the decision.

It also watches its own pod's torchrun: only the sidecar that serves a silent one can tell that it
hangs, as it alone sees its requests. One that is given up and goes on after all is in no world: it
asks for the next.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from time import time
from typing import Literal

from launcher_shim.c10d.rounds import decision as forming
from launcher_shim.c10d.rounds.decision import BackOff
from launcher_shim.c10d.rounds.inputs import RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.mirrored_run import MirroredRun
from launcher_shim.c10d.rounds.own_node import Evaluation, Evaluator
from launcher_shim.c10d.rounds.place import Place
from launcher_shim.c10d.rounds.records import Round, Seat
from rdzv.dataclass import dataclass
from rdzv.errors import RecordError, StoreError, StoreFull
from rdzv.job import Registered
from rdzv.keys import RunKeys
from rdzv.reconcile import DueWrite, Kernel, Outlook, Reconciler, Turn
from rdzv.records.job import HistoryEntry
from rdzv.sentences import Diary
from rdzv.store import Compare, GuardedWrites, KeyValue, Put, Range, Store

log = logging.getLogger(__name__)

WELL_S = 10.0
"""A rank that has come to a boundary this long after the last request of its torchrun trains on
without it. Longer than a request and a look at the ranks may take; shorter than ``hung_s``."""

ASK_S = 15.0
"""Time within which the save that is asked for must begin."""

Save = Literal["none", "asked", "agreed", "over"]
"""The state of the save before which a torchrun is not given up. ``none``: no save is asked for.
``agreed``: its ranks are held, or save. ``over``: they have saved, or the attempt has failed."""


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of life of one torchrun; times are of its sidecar's monotonic clock, in seconds."""

    seen_s: float
    """Time of its last request, or of the answer to it."""
    pending: bool = False
    """Whether a request waits for its answer."""
    stays: bool = False
    """Whether it has not left a world that must form again, for too long (``Standing``)."""
    stepped_s: float = -math.inf
    """Time at which the newest boundary of its ranks was first seen, if its world trains on."""
    save: Save = "none"
    asked_s: float = math.inf
    """Time since which the save is asked for."""


@dataclass(frozen=True, slots=True)
class HangDecision:
    """The decision on whether a torchrun hangs."""

    hangs: bool = False
    reason: str = ""
    """One sentence; empty if it shows signs of life."""
    wake_at_s: float = math.inf
    """The time at which the decision may change by time alone."""
    saves_first: bool = False
    """Whether its world is to save before it is given up."""


def decide_on_hang(now: float, signs: Signs, policy: RoundPolicy) -> HangDecision:
    """Decide whether a torchrun that has not left hangs."""
    silent_s = now - signs.seen_s
    if not signs.pending and silent_s >= policy.hung_s:
        return _silent(now, signs, f"it has sent no request for {silent_s:.0f} s")
    if signs.stays:
        # Its keep-alive thread goes on asking while its main thread waits for workers that do not
        # end.
        return HangDecision(True, f"it has not left its lost world for {policy.leave_s:.0f} s")
    return HangDecision(wake_at_s=(now if signs.pending else signs.seen_s) + policy.hung_s)


def _silent(now: float, signs: Signs, reason: str) -> HangDecision:
    """Decide on a torchrun that is silent: its ranks may be well, and are to save first."""
    if signs.save == "none" and signs.stepped_s >= signs.seen_s + WELL_S:
        return HangDecision(reason=reason, wake_at_s=now + ASK_S, saves_first=True)
    if signs.save == "asked" and now < signs.asked_s + ASK_S:
        return HangDecision(reason=reason, wake_at_s=signs.asked_s + ASK_S, saves_first=True)
    if signs.save == "agreed":
        return HangDecision(reason=reason, saves_first=True)
    return HangDecision(True, reason)


class HangWatch:
    """The watch over the torchrun that holds ``place``.

    Only the sidecar that serves a silent torchrun can tell: it alone sees its requests. A
    torchrun that is given up and goes on after all is in no world: it asks for the next.
    """

    def __init__(self, place: Place, evaluator: Evaluator) -> None:
        self._place = place
        self._evaluator = evaluator
        self._asked: tuple[Seat, float] | None = None
        self._agreed = False

    def leave_if_hung(self, evaluation: Evaluation, now: float) -> float:
        """Put a tombstone on the node of a torchrun that hangs; return when to check again."""
        claim = self._place.holder
        node = self._place.own_node(claim) if claim is not None else None
        if claim is None or node is None or node.state == "left":
            self._asked = None
            return math.inf
        stays = evaluation.standings.of.get(node.seat) == "hung"
        current, ranks = evaluation.snapshot.round, self._evaluator.ranks
        trains = current.is_world_of(node) and not node.finished and not current.finishing
        trains = trains and not current.is_ending and ranks.round == current.number
        signs = Signs(
            claim.seen_s,
            claim.pending > 0,
            stays,
            ranks.stepped_s if trains else -math.inf,
            self._save(evaluation, node.seat) if not current.is_ending else "over",
            self._asked[1] if self._asked else math.inf,
        )
        decision = decide_on_hang(now, signs, self._evaluator.policy())
        if not decision.saves_first:
            self._asked, self._agreed = None, False
        elif self._asked is None:
            self._asked = node.seat, now
            log.warning("the torchrun here is silent, all ranks save first: %s", decision.reason)
        self._place.call_silent(claim, silent=decision.saves_first)
        if decision.hangs:
            log.warning("the torchrun here hangs: %s", decision.reason)
            self._place.leave(claim, "done" if node.finished else "hung")
        return decision.wake_at_s

    def _save(self, evaluation: Evaluation, seat: Seat) -> Save:
        """Return what has become of the save that this node asks for."""
        if self._asked is None or self._asked[0] != seat:
            return "none"
        members = evaluation.stored.membership
        # Granted, after a save or without one; or the attempt has failed.
        granted = members.ends_round or not members.joins_wait
        if granted or (self._agreed and not members.join_agreed):
            return "over"
        self._agreed = members.join_agreed
        return "agreed" if self._agreed else "asked"

    def excuse(self, now: float) -> None:
        """Count from ``now`` on, after a stop of this sidecar itself."""
        seen = self._evaluator.observations
        since_s = max(seen.ending_since_s, now)
        self._evaluator.observations = replace(seen, ending_since_s=since_s)
        if self._place.holder is not None:
            self._place.holder.seen_s = now


PAUSE_S = (0.2, 0.5)


class RoundKey:
    """The round key of one run, written while its sidecar is registered.

    ``drains``: prefix of the drains of the run's generation.
    """

    def __init__(
        self,
        keys: RunKeys,
        drains: str,
        store: Store,
        registered: Registered,
        random: Random,
    ) -> None:
        self._keys = keys
        self._drains = drains
        self._store = store
        self._registered = registered
        self._random = random
        self._diary = Diary(log)

    def decision(self, wanted: Round, stored: RunSnapshot) -> GuardedWrites:
        """Build the write of ``wanted``, if nothing that it depends on changed since ``stored``."""
        return [
            self._is(stored.round),
            # One compare for all nodes: one for each would pass etcd's limit of 128.
            Compare(self._keys.nodes, "mod", "<", stored.revision + 1, prefix=True),
            # A member whose drain has begun meanwhile must not be frozen.
            Compare(self._drains, "mod", "<", stored.revision + 1, prefix=True),
        ], [Put(self._keys.round, wanted.to_json())]

    async def edit(self, current: Round, edit: Callable[[Round], Round | None]) -> int | None:
        """Write ``edit`` of the round; return the revision, or None if there was nothing to change.

        Retries for as long as the store is away and the caller waits.
        """
        while (wanted := edit(current)) is not None:
            try:
                result = await self._store.txn(
                    [self._is(current), self._registered.holds()],
                    [Put(self._keys.round, wanted.to_json())],
                    [Range(self._keys.round)],
                )
            except StoreError as error:
                self._diary.say(f"cannot write the round, retrying: {error}")
                await self._pause()
                continue
            if result.succeeded:
                self._diary.say(f"round {wanted.number} is {stage(wanted)} in the store")
                return result.revision
            read = _parse(result.responses[0])
            if read is None or read.mod_revision == current.mod_revision:
                # The registration guard does not hold; retry until the member is registered again.
                await self._pause()
            current = read or current
        return None

    def _is(self, current: Round) -> Compare:
        return Compare(self._keys.round, "mod", "=", current.mod_revision)

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.uniform(*PAUSE_S))


def stage(current: Round) -> str:
    """Return how far a round is, for the log."""
    if current.closed:
        return f"closed by {current.closed}"
    if current.finishing:
        return "finishing"
    if current.ends:
        return "to form again"
    return "complete" if current.complete else "open"


def _parse(kvs: tuple[KeyValue, ...] | int | None) -> Round | None:
    if not isinstance(kvs, tuple) or not kvs:
        return None
    try:
        return Round.from_kv(kvs[0])
    except RecordError as error:
        log.warning("ignoring an unreadable round record: %s", error)
        return None


COALESCE_S = 0.02
COALESCE_PER_NODE_S = 0.0005
"""Minimum time between two evaluations in seconds, and the addition to it per node: a burst of
hundreds of joins then costs few."""

LATE_S = 1.0
"""A wake-up that is later than this, in seconds, means that this sidecar itself was stopped."""

TURN_S = 0.5
"""Seconds between two turns. Longer than the usual delay of a watch on a busy store."""


class DecisionLoop(Reconciler):
    """The decisions on one run. ``changed`` is called if a standing or the membership changes."""

    def __init__(
        self,
        kernel: Kernel,
        run: MirroredRun,
        evaluator: Evaluator,
        round_key: RoundKey,
        hang_watch: HangWatch,
        changed: Callable[[], None],
    ) -> None:
        super().__init__(kernel, "rounds")
        self._client = kernel.client
        self._run = run
        self._evaluator = evaluator
        self._round_key = round_key
        self._hang_watch = hang_watch
        self._changed = changed
        self._published: tuple[object, ...] | None = None
        self._wake_at_s = math.inf
        self._noted_wait = -1
        self.reasons = Diary(log)

    def wake(self) -> None:
        """Drop the last evaluation of the run, and decide again."""
        self._evaluator.outdate()
        super().wake()

    async def step(self) -> Outlook:
        """Decide on the run, and whether its torchrun here hangs."""
        now = self.clock()
        if now > self._wake_at_s + LATE_S:
            # This sidecar itself was stopped: requests of the agent may still wait to be read.
            self._hang_watch.excuse(now)
        self._evaluator.outdate()
        evaluation = self._evaluator.evaluate()
        stored = evaluation.stored
        done = self._evaluator.observations.done if stored.round.world else None
        news = (evaluation.standings, stored.membership, evaluation.reform.cause, done)
        if self._published != news:
            self._published = news
            self._changed()
        observations, reforms = self._evaluator.observations, evaluation.reform
        decision = forming.decide(now, stored, observations, self._evaluator.policy(), reforms)
        wanted = self._run.round if self._run.lacks_round else decision.round
        self.reasons.say(evaluation.reform.reason or decision.reason)
        if decision.wait.member == self._evaluator.member:
            await self._note_wait(decision.wait, stored.round)
        hang_at_s = self._hang_watch.leave_if_hung(evaluation, now)
        self._wake_at_s = min(decision.wake_at_s, reforms.wake_at_s, hang_at_s)
        return Outlook(
            look_at_s=self._wake_at_s,
            write=None if wanted is None else self._write_of(wanted, stored),
            burst_s=COALESCE_S + COALESCE_PER_NODE_S * self._run.node_count,
        )

    def _write_of(self, wanted: Round, stored: RunSnapshot) -> DueWrite:
        turn = Turn(self._evaluator.member, order(wanted, stored), TURN_S, of=wanted)
        return DueWrite(
            partial(self._round_key.decision, wanted, stored),
            f"round {wanted.number} is {stage(wanted)} in the store",
            turn=turn,
            failed=self._note_failure,
        )

    def _note_failure(self, error: StoreError) -> None:
        # Who is away may only wait to be registered again.
        self._evaluator.cut_off |= isinstance(error, StoreFull)

    async def _note_wait(self, wait: BackOff, current: Round) -> None:
        """Write a wait before ``current`` to the history, once."""
        if self._noted_wait == current.number:
            return
        self._noted_wait = current.number
        details: dict[str, object] = {
            "round": current.number,
            "failed_starts": current.failed_starts,
            "wait_s": wait.wait_s,
        }
        entry = HistoryEntry("wait", wait.member, wait.reason, time(), details)
        keys = self._client.keys
        present = {kv.key for kv in self._client.mirror.under(keys.history)}
        others = (keys.history_entry(current.mod_revision, name, "wait") for name in current.former)
        # One of them is there if another node's failure was the newest when it was written.
        if present.isdisjoint(others):
            await self._client.note(entry, current.mod_revision)


def order(wanted: Round, stored: RunSnapshot) -> list[str]:
    """Return all members with a stored node, in the order in which they may write ``wanted``.

    One write is enough, as each carries the whole round. The sidecar whose write made the decision
    due goes first; the others follow in an order that all compute alike, so one that is away costs
    a turn. The number of writes depends on the watch's delay, and not on the number of sidecars.
    Members that are not listed go last: one that was evicted has the newest record, by another's
    write.
    """
    nodes = stored.nodes
    newest = max(nodes.values(), key=lambda node: node.mod_revision, default=None)
    first = [] if newest is None else [newest.member]
    frozen = [seat.member for seat in wanted.frozen or stored.round.frozen]
    members = dict.fromkeys([*first, *frozen, *sorted(nodes)])
    listed = stored.membership.listed
    return sorted((one for one in members if one in nodes), key=lambda one: one not in listed)
