# SPDX-License-Identifier: Apache-2.0
"""One torch rendezvous in one sidecar: carries out ``decision``'s decisions and shows ``views``.

Reads come from the mirror and never wait for the store, so that a store that is away stops no
healthy job. Writes are guarded by compares on all records that they depend on, and wait for the
store.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from launcher_shim.c10d.rounds.decision import why_it_ends
from launcher_shim.c10d.rounds.decision_loop import DecisionLoop, HangWatch, RoundKey
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.mirrored_run import MirroredRun, live_round
from launcher_shim.c10d.rounds.observations import SilentMembers
from launcher_shim.c10d.rounds.own_node import Evaluation, Evaluator, Handing, OwnNode
from launcher_shim.c10d.rounds.place import Claim, Place
from launcher_shim.c10d.rounds.records import ClosedWhy, Node, Round
from launcher_shim.c10d.rounds.views import View, hand, held_for, somebody_goes_on, view
from rdzv.drain.inputs import LiveRound
from rdzv.job import Registered
from rdzv.keys import RunKeys
from rdzv.reconcile import Kernel
from rdzv.records.policy import JobPolicy
from rdzv.records.quarantine import FormedWorld, Stay
from rdzv.store import WatchEvent

log = logging.getLogger(__name__)


class Rendezvous:
    """One run in one generation.

    Every write requires ``registered``, so that a stale incarnation changes nothing. ``drains``:
    prefix of the drains' keys. ``launched``: the sizes that torchruns of this pod are started with
    (``--nnodes``), whatever the job's are by now. ``membership`` (called with the current round)
    and ``policy`` must be cheap. ``life_since_s``: time since which the member has been in this
    generation. ``came``, ``entered``, ``died``: as for ``Place``. ``last_seen``: the round that
    this sidecar has seen before; it counts if the store has lost it.
    """

    def __init__(
        self,
        kernel: Kernel,
        registered: Registered,
        *,
        member: str,
        drains: str,
        keys: RunKeys,
        run_id: str,
        launched: JobPolicy,
        policy: Callable[[], RoundPolicy],
        membership: Callable[[Round], RoundMembers],
        life_since_s: float = -math.inf,
        came: Callable[[str], None] = lambda nonce: None,
        entered: Callable[[str, FormedWorld], None] = lambda nonce, world: None,
        died: Callable[[Stay], None] = lambda stay: None,
        last_seen: Round | None = None,
    ) -> None:
        self.member, self.run_id = member, run_id
        self.launched, self.policy = launched, policy
        client, self.clock, random = kernel.client, kernel.clock, kernel.random
        self._registered, self._mirror = registered, client.mirror
        self._runs, self._own_key = keys.runs, keys.node(member)
        self._ended, self._news = False, asyncio.Event()
        self._live: tuple[Evaluation, str, LiveRound] | None = None
        self._own = OwnNode(
            key=self._own_key,
            round_key=keys.round,
            store=client.store,
            registered=registered,
            random=random,
            handing=self._handing,
            handed=self._handed,
        )
        self._round_key = RoundKey(keys, drains, client.store, registered, random)
        self._run = MirroredRun(keys)
        self._silences = SilentMembers()
        self._evaluator = Evaluator(
            self._run,
            self._own,
            client,
            member=member,
            policy=policy,
            membership=membership,
            clock=self.clock,
            life_since_s=life_since_s,
        )
        self.place = Place(
            self._run,
            self._own,
            client.mirror,
            self._evaluator,
            random=random,
            changed=self._own_node_changed,
            came=came,
            entered=entered,
            died=died,
        )
        self._decisions = DecisionLoop(
            replace(kernel, fence=registered.fence, registered=registered.again),
            self._run,
            self._evaluator,
            self._round_key,
            HangWatch(self.place, self._evaluator),
            self._tell,
        )
        self._unsubscribe = self._mirror.subscribe(self._apply)
        self._apply([WatchEvent("put", kv) for kv in self._mirror.under(keys.prefix)])
        if last_seen is not None:
            self.remember(last_seen)

    # --- for the owner ---

    async def run(self) -> None:
        """Follow the mirror and write what is due, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._own.run(), name=f"node of {self.run_id}")
            tasks.create_task(self._decisions.run(), name=f"rounds of {self.run_id}")

    def remember(self, last_seen: Round) -> None:
        """Keep a round that an earlier sidecar has seen, if the store has lost it."""
        if self._run.remember(last_seen):
            self._evaluator.cut_off = True
            self._own_node_changed()

    def end(self) -> None:
        """Stop all writes and wake all waiters: the run or its generation is over."""
        self._ended = True
        self._unsubscribe()
        self._own.retire()
        self._tell()

    @property
    def round(self) -> Round:
        """The present round."""
        return self._run.round

    @property
    def reason(self) -> str:
        """The newest decision, in one sentence."""
        return self._decisions.reasons.last

    def snapshot(self) -> RunSnapshot:
        """Return the run as the mirror has it."""
        return self._evaluator.stored()

    def live_round(self, master: str) -> LiveRound:
        """Return the round as drains see it; ``master``: as ``master_token`` returns it.

        It is the same object until it changes: drains ask for it after each change of the store.
        """
        evaluation = self._evaluator.evaluate()
        if self._live is None or self._live[0] is not evaluation or self._live[1] != master:
            stored, standings = evaluation.stored, evaluation.standings
            live = live_round(self.run_id, stored, standings, evaluation.reform.cause, master)
            self._live = (evaluation, master, live)
        return self._live[2]

    # --- for agents, each by its claim ---

    def view_of(self, claim: Claim) -> View:
        """Build the view of ``claim``."""
        node = self.place.own_node(claim)
        if node is None:
            # It does not hold the place (any more), or is new: it is on no list.
            full = claim is not self.place.holder
            return View("apart", Round(self._run.round.number), full=full)
        evaluation = self._evaluator.evaluate()
        return view(
            evaluation.snapshot,
            self.policy(),
            node,
            parked=claim.parked,
            parks=claim.parks,
            waited_s=self.clock() - claim.asked_s,
        )

    def held_for(self, claim: Claim, asked_s: float, drawn: View) -> float:
        """Return for how many seconds to hold back the answer to a look of ``claim``.

        ``asked_s``: when it looked. ``drawn``: what it was shown last. A store that is away brings
        no change.
        """
        now, node, shown = self.clock(), self.place.own_node(claim), self.view_of(claim)
        if node is None or shown != drawn or not self._mirror.healthy(now):
            return 0.0
        evaluation = self._evaluator.evaluate()
        snapshot, reform = evaluation.snapshot, evaluation.reform
        held_s, _ = held_for(
            *(now, asked_s, snapshot, reform, self.policy(), node, shown),
            ends=bool(why_it_ends(snapshot, evaluation.standings, reform)),
            evicts_s=self._silences.evicts_s({seat.member for seat in snapshot.round.frozen}),
        )
        return held_s

    def is_dead(self, round_number: int) -> bool:
        """Return whether no key of this round will be set any more."""
        current = self._run.round
        if round_number < current.number:
            return True
        if round_number > current.number or not current.complete:
            return False
        own = self._own.node
        if own is not None and own.finished and own.round == round_number:
            return False
        return current.is_ending or (own is not None and own.left_reason == "hung")

    @property
    def own_node(self) -> Node | None:
        """This pod's node as it should be."""
        return self._own.node

    @property
    def counts_apart(self) -> bool:
        """Whether the torchruns of the present world are in different rounds."""
        own = self._own.node
        return self._run.round.world > 0 or (own is not None and own.own)

    @property
    def all_are_done(self) -> bool:
        """Whether the workers of all nodes of the present world are done, whatever its rounds."""
        snapshot, done = self._evaluator.evaluate().snapshot, self._evaluator.observations.done
        current = snapshot.round
        if current.closed == "success":
            return True
        if not current.frozen or current.is_ending:
            return False
        nodes = (snapshot.nodes.get(seat.member) for seat in current.frozen)
        return all(
            seat in done or (node is not None and node.seat == seat and node.finished)
            for seat, node in zip(current.frozen, nodes, strict=True)
        )

    def evaluation(self) -> Evaluation:
        """Return the present evaluation."""
        return self._evaluator.evaluate()

    def vetoes_close(self, node: Node, closed: ClosedWhy) -> bool:
        """Return whether ``node`` may not close the run.

        An agent that fails, or one of torch 2.3 to 2.7 that is terminated, closes the whole run.
        The other nodes go on without it if they suffice, or are about to form again.
        """
        evaluation = self._evaluator.evaluate()
        snapshot, standings = evaluation.snapshot, evaluation.standings
        if closed == "success":
            # Its work is done, but it may not close the run for nodes that go on.
            return bool(snapshot.round.closed) or somebody_goes_on(snapshot, standings)
        if self.member in snapshot.membership.leaving:
            return True
        others = [
            seat
            for seat, standing in standings.of.items()
            if seat != node.seat and standing in ("here", "missing")
        ]
        again = snapshot.round.is_ending or why_it_ends(snapshot, standings, evaluation.reform)
        return len(others) >= self.policy().smallest or bool(again)

    def ranks_at(self, number: int, step: int) -> bool:
        """Note that this pod's ranks are at ``step``; return whether it is to report the first."""
        before, now = self._evaluator.ranks, self.clock()
        self._evaluator.ranks = after = before.at(now, number, step)
        if (before.round, before.began_s) != (after.round, after.began_s):
            self._decisions.wake()
        current = self._run.round
        first = bool(current.frozen) and current.frozen[0].member == self.member
        return first and current.progress in ("", "loads")

    async def edit_round(self, node: Node, edit: Callable[[Round], Round | None]) -> None:
        """Change the round that ``node`` is in, as long as it is the live one."""

        def edit_live(current: Round) -> Round | None:
            live = current.complete and (current.number == node.round or current.is_world_of(node))
            return edit(current) if live and not self._ended else None

        revision = await self._round_key.edit(self._run.round, edit_live)
        if revision is not None:
            await self._mirror.shown(revision)

    def news(self) -> Coroutine[Any, Any, object]:
        """Wait for a change of the round, the own node or a standing since this was called.

        Not since it was awaited: a task for it begins some turns of the event loop later.
        """
        return self._news.wait()

    # --- the mirror and the own node ---

    def _apply(self, events: Sequence[WatchEvent]) -> None:
        """Apply one batch; wake agents at once if it changes the round or the own node."""
        if self._run.went_back(self._mirror.revision, events):
            log.warning("the store was restored or emptied: writing what this sidecar knows again")
            self._evaluator.cut_off = True
            self._own.forget()
        news, looks = False, self._evaluator.cut_off
        member_key = self._registered.member_key
        for event in events:
            touched = self._run.apply(event)
            self._silences.note(event, self.clock())
            # Launchers' own keys change all the time and mean nothing here. Any other key may
            # belong to the membership, which is evaluated later: hundreds may come at once.
            looks = looks or bool(touched) or not event.kv.key.startswith(self._runs)
            if event.kv.key == self._own_key:
                self._own.see(event)
                if event.kind == "delete":
                    self.place.resume_next()
            if touched == "round":
                self.place.follow()
            if touched == "round" or event.kv.key in (self._own_key, member_key):
                self._own.stir()
                news = True
        self._own.agree(self._mirror.kvs.get(self._own_key), self._mirror.certain_revision)
        if looks:
            self._decisions.wake()
        if news:
            self._tell()

    def _handed(self) -> None:
        self.place.handed()
        self._own_node_changed()

    def _own_node_changed(self) -> None:
        self._decisions.wake()
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _handing(self) -> Handing | None:
        """Propose the change of the own node that is due once it is frozen."""
        evaluation, node = self._evaluator.evaluate(), self._own.node
        if node is None:
            return None
        handed = hand(evaluation.snapshot, node)
        if handed is None:
            return None
        return Handing(handed, evaluation.snapshot.round.mod_revision)
