# SPDX-License-Identifier: Apache-2.0
"""One torch rendezvous in one sidecar: carries out what ``rounds`` decides and ``views`` shows.

Reads come from the mirror and never wait for the store, so that a store that is away stops no
healthy job. Writes are guarded by compares on all they rest on, and wait.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from launcher_shim.c10d.rounds.claim import Claim, Ending
from launcher_shim.c10d.rounds.decision import decide
from launcher_shim.c10d.rounds.drain_view import live_round
from launcher_shim.c10d.rounds.hanging import Signs
from launcher_shim.c10d.rounds.hanging import decide as look_after
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.mirrored_run import MirroredRun
from launcher_shim.c10d.rounds.observations import RoundObservations, Standings, observe, stand
from launcher_shim.c10d.rounds.own_node import Handing, OwnNode
from launcher_shim.c10d.rounds.records import ClosedWhy, LeftReason, Node, Round, Seat
from launcher_shim.c10d.rounds.round_key import RoundKey
from launcher_shim.c10d.rounds.turns import delay_s, order
from launcher_shim.c10d.rounds.views import (
    View,
    hand,
    must_form_again,
    somebody_goes_on,
    trains_no_more,
    view,
)
from rdzv.diary import Diary
from rdzv.drain.inputs import LiveRound
from rdzv.job import JobClient
from rdzv.keys import RunKeys
from rdzv.members.guard import Registered
from rdzv.store import WatchEvent

log = logging.getLogger(__name__)

COALESCE_S = 0.02
COALESCE_PER_NODE_S = 0.0005
"""A burst of joins is looked at this often, so that hundreds of them stay cheap."""

DUE_RETRY_S = 0.1
"""Before a decision that is due, and is not in the store yet, is looked at again."""

LATE_S = 1.0
"""A sidecar that wakes later than planned by more was stopped, or starved, itself."""

SEE_OWN_WRITE_S = 5.0
"""Longest wait for the watch to show a write of our own before an answer is given without."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of the run."""

    own: Node | None
    """This sidecar's node as it should be."""
    stored: RunSnapshot
    """The run as the mirror has it."""
    snapshot: RunSnapshot
    """The same, with this sidecar's node as it should be."""
    standings: Standings


class Rendezvous:
    """One run id in one generation. ``membership`` and ``policy`` must be cheap.

    ``membership`` is called with the round that it is looked at from.
    Every write requires ``registered``, so that a stale incarnation changes nothing. ``drains``
    is the prefix of the drains. ``life_since_s``: since when the member has been in
    this life of the job, on ``clock``. ``came`` is told the nonce of each torchrun here that
    asks, ``ended`` that of one that is gone, and how it has ended. ``last_seen``: the
    round as this sidecar has seen it before, for where the store has lost it.
    """

    def __init__(
        self,
        *,
        member: str,
        registered: Registered,
        drains: str,
        keys: RunKeys,
        run_id: str,
        client: JobClient,
        policy: Callable[[], RoundPolicy],
        membership: Callable[[Round], RoundMembers],
        clock: Callable[[], float],
        random: Random,
        life_since_s: float = -math.inf,
        came: Callable[[str], None] = lambda nonce: None,
        ended: Callable[[str, Ending], None] = lambda nonce, how: None,
        last_seen: Round | None = None,
    ) -> None:
        self.member = member
        self.run_id = run_id
        self.policy = policy
        self.clock = clock
        self._registered = registered
        self._client = client
        self._mirror = client.mirror
        self._membership = membership
        self._random = random
        self._came = came
        self._ended_by = ended
        self._own_key = keys.node(member)
        self._own = OwnNode(
            key=self._own_key,
            round_key=keys.round,
            store=client.store,
            registered=registered,
            random=random,
            handed=self._own_node_changed,
        )
        self._round_key = RoundKey(keys, drains, client.store, registered, random)
        self._run = MirroredRun(keys)
        self._claim: Claim | None = None
        self._next: tuple[Claim, Node] | None = None
        self._leave_shown: tuple[Seat, float] | None = None
        self._restored = False
        self._ended = False
        self._observations = RoundObservations(life_since_s=life_since_s)
        self._diary = Diary(log)
        self._woken = asyncio.Event()
        self._unconfirmed = asyncio.Event()
        self._news = asyncio.Event()
        self._evaluation: Evaluation | None = None
        self._runs = keys.runs
        self._unsubscribe = self._mirror.subscribe(self._apply)
        self._apply([WatchEvent("put", kv) for kv in self._mirror.under(keys.prefix)])
        if last_seen is not None:
            self.remember(last_seen)

    # --- for the owner ---

    async def run(self) -> None:
        """Follow the mirror and write what is due, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._own.run(self._handing), name=f"node of {self.run_id}")
            tasks.create_task(self._decide(), name=f"rounds of {self.run_id}")
            tasks.create_task(self._confirm(), name=f"absences in {self.run_id}")

    def claim(self, nonce: str | None = None, kept: Node | None = None) -> Claim:
        """Make the claim of a new client connection.

        ``nonce``: of a connection that may outlive the sidecar. ``kept``: its node as an earlier
        sidecar of this member had it, put back where the store has lost it with the lease, or has
        an older one, as after a restore from a backup.
        """
        now_s = self.clock()
        claim = Claim(nonce or f"{self._random.getrandbits(64):016x}", now_s, now_s)
        if kept is not None and (kept.member, kept.nonce) != (self.member, nonce):
            kept = None
        node = self._run.node(self.member)
        if node is None or (kept is not None and kept.is_later_than(node)):
            node = kept
        if node is not None and node.nonce == nonce:
            self._resume(claim, node)
        elif kept is not None:
            # Another torchrun of the pod counts, if it is still there to claim its record. That
            # hangs on a former lease, and is gone soon where nobody does.
            claim.resume(kept)
            self._next = (claim, kept)
        return claim

    def remember(self, last_seen: Round) -> None:
        """Hold on to a round that a sidecar before this one has seen, if the store has lost it."""
        if self._run.remember(last_seen):
            self._restored = True
            self._own_node_changed()

    def _resume(self, claim: Claim, node: Node) -> None:
        claim.resume(node)
        self._claim = claim
        self._came(claim.nonce)
        self._own.aim(node)

    def _resume_next(self) -> None:
        """Let a client have the place that nobody has claimed while its record was there."""
        if self._next is not None and self._claim is None:
            self._resume(*self._next)
            self._own_node_changed()
        self._next = None

    @property
    def has_node(self) -> bool:
        """Whether a node of this member is on record, or is to be."""
        return self._own.node is not None or self._run.node(self.member) is not None

    def end(self) -> None:
        """The run, or its life of the job, is over: nothing is written any more, nobody waits."""
        self._ended = True
        self._unsubscribe()
        self._own.retire()
        self._tell()

    def adopt(self, claim: Claim) -> None:
        """Take over a claim from a former life: its world is none here, so it asks again."""
        if claim.named:
            self._claim = claim
            node = claim.asking(self.member, 0)
            self._own.aim(replace(node, state="left", left_reason="hung"))
            self._own_node_changed()

    @property
    def closed(self) -> ClosedWhy:
        """Why the run is closed, or an empty string."""
        return self._run.round.closed

    @property
    def round(self) -> Round:
        """The round as it stands now."""
        return self._run.round

    @property
    def reason(self) -> str:
        """The newest decision, in one sentence."""
        return self._diary.last

    def snapshot(self) -> RunSnapshot:
        """The run as the mirror has it."""
        return self._run.snapshot(self._mirror.certain_revision, self._members())

    def live_round(self, master: str) -> LiveRound:
        """The round as drains look at it; ``master`` names it to its ranks."""
        evaluation = self._evaluate()
        return live_round(
            self.run_id, evaluation.stored, evaluation.standings, self.policy(), master
        )

    # --- for agents, each by its claim ---

    def own_node(self, claim: Claim) -> Node | None:
        """What the record of ``claim`` should be, if it is the one that counts."""
        node = self._own.node
        return node if claim is self._claim and node and node.nonce == claim.nonce else None

    def live_node(self, claim: Claim) -> Node | None:
        """The record of ``claim`` if it takes part in the live round."""
        node = self.own_node(claim)
        return node if node is not None and self._run.round.is_world_of(node) else None

    def take_over(self, claim: Claim) -> None:
        """Let ``claim`` be the one that counts; the one before is gone."""
        if self._claim is not claim and (node := self._own.node) and node.state != "left":
            self._own.aim(replace(node, state="left", left_reason="closed", round=0))
        self._claim = claim

    async def join(self, claim: Claim) -> bool:
        """Write that ``claim`` asks, unless it does already; return whether it may."""
        if claim is not self._claim:
            return False
        node = self._own.node
        if node is None or node.nonce != claim.nonce or node.state != "asking":
            self._came(claim.nonce)
            await self._write(claim.asking(self.member, node.ask + 1 if node else 1))
        return True

    async def leave_written(self, claim: Claim) -> bool:
        """Write that ``claim`` took itself off; return whether it was there."""
        node = self.own_node(claim)
        if node is None:
            return False
        if node.state != "left":
            await self._write(replace(node, state="left", left_reason="exit", round=0))
        return True

    def finish(self, claim: Claim) -> None:
        """Take note that the workers of ``claim`` are done: it stands in the exit barrier."""
        node = self.live_node(claim)
        if node is not None and not node.finished:
            self._own.aim(replace(node, finished=True))
            self._own_node_changed()

    async def finish_written(self, claim: Claim) -> None:
        """Write it, before the others hear of it: who closes the run looks at all the records."""
        node = self.live_node(claim)
        if node is not None and not node.finished:
            await self._write(replace(node, finished=True))

    def leave(self, claim: Claim, reason: LeftReason) -> None:
        """Leave a tombstone for ``claim``; it is written as soon as the store lets us."""
        node = self.own_node(claim)
        if node is not None and node.state != "left":
            self._own.aim(replace(node, state="left", left_reason=reason, round=0))
            ordered = self.member in self._members().leaving or self._run.round.closed
            died = reason in ("closed", "hung") and not ordered
            self._ended_by(node.nonce, "gave up" if claim.gave_up else "died" if died else "other")
            self._own_node_changed()
        elif node is not None and claim.gave_up:
            self._ended_by(node.nonce, "gave up")
        elif self._next is not None and self._next[0] is claim:
            self._next = None

    def view_of(self, claim: Claim) -> View:
        """Make the view of ``claim``."""
        node = self.own_node(claim)
        if node is None:
            # Not the one that counts (any more), or new: it is in nothing.
            return View("apart", Round(self._run.round.number), full=claim is not self._claim)
        evaluation = self._evaluate()
        return view(
            evaluation.snapshot,
            evaluation.standings,
            self.policy(),
            node,
            parked=claim.parked,
            parks=claim.parks,
            filled_round=claim.filled_round,
            waited_s=self.clock() - claim.asked_s,
        )

    def is_dead(self, round_number: int) -> bool:
        """Whether keys that are not set in this round never will be."""
        current = self._run.round
        if round_number < current.number:
            return True
        if round_number > current.number or not current.complete:
            return False
        own = self._own.node
        if own is not None and own.finished and own.round == round_number:
            return False
        return current.closed == "failure" or self._evaluate().standings.lost

    def vetoes_close(self, node: Node, closed: ClosedWhy) -> bool:
        """Whether ``node`` may not close the run.

        An agent that fails, or one of torch 2.3 to 2.7 that is terminated, closes the whole run.
        Others that are enough, or that are about to form again, go on without it.
        """
        evaluation = self._evaluate()
        snapshot, standings = evaluation.snapshot, evaluation.standings
        if self.member in snapshot.membership.leaving:
            return True
        if closed == "success":
            # It is done, and speaks for none that is to go on.
            return bool(snapshot.round.closed) or somebody_goes_on(snapshot, standings)
        others = [
            seat
            for seat, standing in standings.of.items()
            if seat != node.seat and standing in ("here", "missing")
        ]
        return len(others) >= self.policy().min_nodes or must_form_again(
            snapshot, standings, self.policy()
        )

    async def edit_round(self, node: Node, edit: Callable[[Round], Round | None]) -> None:
        """Change the round that ``node`` is in, for as long as it is the live one."""

        def edit_live(current: Round) -> Round | None:
            live = current.complete and current.number == node.round
            return edit(current) if live and not self._ended else None

        revision = await self._round_key.edit(self._run.round, edit_live)
        if revision is not None:
            await self._reach(revision)

    def news(self) -> Coroutine[Any, Any, object]:
        """Wait until the round, the own node or who is gone has changed since this was called.

        Since then, and not since it was awaited: a task for it begins some turns later.
        """
        return self._news.wait()

    # --- the mirror ---

    def _apply(self, events: Sequence[WatchEvent]) -> None:
        """Take in one batch; what is no news to agents is looked at when its turn comes."""
        if self._run.went_back(self._mirror.revision, events):
            log.warning("the store was restored or emptied: writing what this sidecar knows again")
            self._restored = True
            self._own.forget()
        news, looks = False, self._restored
        member_key = self._registered.member_key
        for event in events:
            touched = self._run.apply(event)
            # Launchers' own keys change all the time and mean nothing here. What else changes may
            # be of the membership, which is looked at later: hundreds may come at once.
            looks = looks or bool(touched) or not event.kv.key.startswith(self._runs)
            if event.kv.key == self._own_key:
                self._own.see(event)
                if event.kind == "delete":
                    self._resume_next()
            if touched == "round" or event.kv.key in (self._own_key, member_key):
                self._own.stir()
                news = True
        if looks:
            self._evaluation = None
            self._woken.set()
        if news:
            self._tell()

    # --- looking and deciding ---

    def _members(self) -> RoundMembers:
        return self._membership(self._run.round)

    def _own_node_changed(self) -> None:
        self._evaluation = None
        self._woken.set()
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _evaluate(self) -> Evaluation:
        """What agents are shown rests on this: the run, with our own record as it should be."""
        now, own, membership = self.clock(), self._own.node, self._members()
        evaluation = self._evaluation
        if (
            evaluation is None
            or evaluation.own is not own
            or evaluation.snapshot.membership != membership
            or now >= evaluation.standings.wake_at_s
        ):
            policy = self.policy()
            stored = self.snapshot()
            self._observations = observe(
                now,
                self._observations,
                stored,
                policy,
                healthy_s=self._mirror.healthy_for_s(now),
                heard_s=self._client.confirmed_s,
                cut_off=self._own.take_loss() or self._restored,
            )
            self._restored = False
            shown = stored
            if own is not None:
                shown = replace(stored, nodes={**stored.nodes, self.member: own})
            standings = stand(now, shown, self._observations, policy)
            if standings.unheard:
                self._unconfirmed.set()
            evaluation = self._evaluation = Evaluation(own, stored, shown, standings)
        return evaluation

    async def _decide(self) -> None:
        due: tuple[Round, float] | None = None
        published = None
        while True:
            self._woken.clear()
            self._evaluation = None
            evaluation, now = self._evaluate(), self.clock()
            stored = evaluation.stored
            if published != (evaluation.standings, stored.membership):
                published = (evaluation.standings, stored.membership)
                self._tell()
            decision = decide(now, stored, self._observations, self.policy())
            wanted = self._run.round if self._run.lacks_round else decision.round
            self._diary.say(decision.reason)
            if decision.unheard:
                self._unconfirmed.set()
            wake_at_s = min(decision.wake_at_s, self._leave_if_hung(evaluation, now))
            if wanted is None:
                due = None
            elif due is None or due[0] != wanted:
                due = (wanted, now + delay_s(self.member, order(wanted, stored), self._random))
            registered = self._registered.lease() is not None
            if due is not None and (registered or now < due[1]):
                if now >= due[1]:
                    # Only once the watch has passed a lost race is there anything new to decide by.
                    await self._reach(await self._round_key.decide(due[0], stored) or 0)
                wake_at_s = min(wake_at_s, max(due[1], now + DUE_RETRY_S))
            await self._wait_for_news(wake_at_s, registered=registered)
            if self._claim is not None and self.clock() > wake_at_s + LATE_S:
                # It was this sidecar that stood still: what the agent asked may still wait.
                self._claim.excuse(self.clock())
                self._leave_shown = None
            await asyncio.sleep(COALESCE_S + COALESCE_PER_NODE_S * self._run.node_count)

    async def _confirm(self) -> None:
        """Confirm the mirror whenever a node has been away for long enough to count as gone."""
        while True:
            await self._unconfirmed.wait()
            await self._client.confirm()
            self._unconfirmed.clear()
            self._evaluation = None
            self._woken.set()

    async def _wait_for_news(self, wake_at_s: float, *, registered: bool) -> None:
        """Wait for news, ``wake_at_s`` or, where it is not in force, the registration."""
        left_s = wake_at_s - self.clock()
        try:
            async with asyncio.timeout(left_s if math.isfinite(left_s) else None):
                if registered:
                    await self._woken.wait()
                else:
                    await self._woken_or_registered()
        except TimeoutError:
            return

    async def _woken_or_registered(self) -> None:
        waits = [
            asyncio.ensure_future(self._woken.wait()),
            asyncio.ensure_future(self._registered.again()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in waits:
                waiting.cancel()

    def _leave_if_hung(self, evaluation: Evaluation, now: float) -> float:
        """Leave a tombstone for an agent that hangs; return when to look again."""
        claim = self._claim
        node = self.own_node(claim) if claim is not None else None
        if claim is None or node is None or node.state == "left":
            self._leave_shown = None
            return math.inf
        if not trains_no_more(evaluation.snapshot, evaluation.standings, node, claim.filled_round):
            self._leave_shown = None
        elif self._leave_shown is None or self._leave_shown[0] != node.seat:
            self._leave_shown = (node.seat, now)
        signs = Signs(
            claim.seen_s, claim.pending > 0, self._leave_shown[1] if self._leave_shown else None
        )
        decision = look_after(now, signs, self.policy())
        if decision.hangs:
            log.warning("the torchrun here hangs: %s", decision.reason)
            self.leave(claim, "done" if node.finished else "hung")
        return decision.wake_at_s

    def _handing(self) -> Handing | None:
        """Propose what becomes of our own node once it is frozen."""
        evaluation, node = self._evaluate(), self._own.node
        if node is None:
            return None
        handed = hand(evaluation.snapshot, evaluation.standings, node)
        if handed is None:
            return None
        return Handing(handed, evaluation.snapshot.round.mod_revision)

    # --- writing ---

    async def _write(self, node: Node) -> None:
        self._own.aim(node)
        self._own_node_changed()
        await self._reach(await self._own.written(node))

    async def _reach(self, revision: int) -> None:
        try:
            async with asyncio.timeout(SEE_OWN_WRITE_S):
                await self._mirror.reached(revision)
        except TimeoutError:
            log.info("the watch is stale, more than %.0f s behind the store", SEE_OWN_WRITE_S)
