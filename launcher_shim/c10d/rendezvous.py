# SPDX-License-Identifier: Apache-2.0
"""One torch rendezvous in one sidecar: carries out what ``rounds`` decides and ``views`` shows.

Reads come from the mirror and never wait for the store, so that a store that is away stops no
healthy job. Writes are guarded by compares on all they rest on, and wait.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from launcher_shim.c10d.agents import Agent
from launcher_shim.c10d.nodes import ClosedWhy, LeftReason, Node, Round
from launcher_shim.c10d.observations import Observations, Standings, observe, stand
from launcher_shim.c10d.own_node import Handing, OwnNode
from launcher_shim.c10d.rounds import Decision, decide
from launcher_shim.c10d.runs import Membership, Policy, RunSnapshot
from launcher_shim.c10d.views import View, hand, must_form_again, view
from rdzv.errors import RecordError, StoreAmbiguous, StoreError
from rdzv.keys import RunKeys, last_name
from rdzv.store import Compare, KeyValue, Put, Range, Store, WatchEvent
from rdzv.watching import Mirror

log = logging.getLogger(__name__)

COALESCE_S = 0.02
COALESCE_PER_NODE_S = 0.0005
"""A burst of joins is looked at this often, so that hundreds of them stay cheap."""

STAGGER_S = (0.1, 0.4)
"""Whose write made a decision due takes it at once; the others after so long, if still due."""

SEE_OWN_WRITE_S = 5.0
"""Longest wait for the watch to show a write of our own before an answer is given without."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What was made of one look: ``word`` is the store's, ``snapshot`` has our own record right."""

    own: Node | None
    word: RunSnapshot
    snapshot: RunSnapshot
    standings: Standings


class Rendezvous:
    """One run id in one generation. ``membership``, ``policy`` and ``lease`` must be cheap.

    ``member_key`` is the key of this sidecar's own member record: every write requires it to hang
    on ``lease()``, so that a stale incarnation changes nothing.
    """

    def __init__(
        self,
        *,
        member: str,
        member_key: str,
        keys: RunKeys,
        run_id: str,
        mirror: Mirror,
        store: Store,
        policy: Callable[[], Policy],
        membership: Callable[[], Membership],
        lease: Callable[[], int | None],
        clock: Callable[[], float],
        random: Random,
    ) -> None:
        self.member = member
        self.run_id = run_id
        self.policy = policy
        self.clock = clock
        self._keys = keys
        self._member_key = member_key
        self._mirror = mirror
        self._store = store
        self._membership = membership
        self._lease = lease
        self._random = random
        self._own_key = keys.node(member)
        self._own = OwnNode(
            key=self._own_key,
            member_key=member_key,
            round_key=keys.round,
            store=store,
            lease=lease,
            random=random,
        )
        self._agent: Agent | None = None
        self._nodes: dict[str, Node] = {}
        self._round = Round()
        self._remembered: Round | None = None
        self._seen_revision = 0
        self._restored = False
        self._observations = Observations()
        self._reason = ""
        self._stirred = asyncio.Event()
        self._news = asyncio.Event()
        self._scene: Scene | None = None
        self._unsubscribe = mirror.subscribe(self._apply)
        self._apply([WatchEvent("put", kv) for kv in mirror.under(keys.prefix)])

    # --- for the owner ---

    async def run(self) -> None:
        """Follow the mirror and write what is due, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._own.run(self._handing), name=f"node of {self.run_id}")
                tasks.create_task(self._decide(), name=f"rounds of {self.run_id}")
        finally:
            self._unsubscribe()

    def connect(self, nonce: str | None = None) -> Agent:
        """Make the agent behind a new client connection.

        ``nonce``: of a connection that outlived the sidecar before this one, if it did.
        """
        agent = Agent(self, nonce or f"{self._random.getrandbits(64):016x}")
        node = self._nodes.get(self.member)
        if nonce is not None and node is not None and node.nonce == nonce:
            agent.resume(node)
            self._agent = agent
            self._own.aim(node)
        return agent

    @property
    def closed(self) -> ClosedWhy:
        """Why the run is closed, or an empty string."""
        return self._current().closed

    @property
    def round(self) -> Round:
        """The round as it stands now."""
        return self._current()

    @property
    def reason(self) -> str:
        """The newest decision, in one sentence."""
        return self._reason

    def snapshot(self) -> RunSnapshot:
        """The run as the store's word has it."""
        return RunSnapshot(
            self._mirror.revision, self._current(), dict(self._nodes), self._membership()
        )

    # --- for agents ---

    def own_node(self, agent: Agent) -> Node | None:
        """What the record of ``agent`` should be, if it is the one that counts."""
        node = self._own.node
        return node if agent is self._agent and node and node.nonce == agent.nonce else None

    def live_node(self, agent: Agent) -> Node | None:
        """The record of ``agent`` if it takes part in the live round."""
        node, current = self.own_node(agent), self._current()
        live = node and node.state == "in" and current.complete and node.round == current.number
        return node if live else None

    def take_over(self, agent: Agent) -> None:
        """Let ``agent`` be the one that counts; the one before is gone."""
        if self._agent is not agent and (node := self._own.node) and node.state != "left":
            self._own.aim(replace(node, state="left", left_reason="closed", round=0))
        self._agent = agent

    async def join(self, agent: Agent) -> bool:
        """Write that ``agent`` asks, unless it does already; return whether it may."""
        if agent is not self._agent:
            return False
        node = self._own.node
        if node is None or node.nonce != agent.nonce or node.state != "asking":
            await self._write(agent.record(node.ask + 1 if node else 1))
        return True

    async def leave_written(self, agent: Agent) -> bool:
        """Write that ``agent`` took itself off; return whether it was there."""
        node = self.own_node(agent)
        if node is None:
            return False
        if node.state != "left":
            await self._write(replace(node, state="left", left_reason="exit", round=0))
        return True

    def leave(self, agent: Agent, reason: LeftReason) -> None:
        """Leave a tombstone for ``agent``; it is written as soon as the store lets us."""
        node = self.own_node(agent)
        if node is not None and node.state != "left":
            self._own.aim(replace(node, state="left", left_reason=reason, round=0))
            self._moved()

    def view_of(self, agent: Agent) -> View:
        """Make the view of ``agent``."""
        node = self.own_node(agent)
        if node is None:
            # Not the one that counts (any more), or new: it is in nothing.
            return View("apart", Round(self._current().number), full=agent is not self._agent)
        scene = self._look()
        return view(
            scene.snapshot,
            scene.standings,
            self.policy(),
            node,
            parked=agent.parked,
            parks=agent.parks,
        )

    def is_dead(self, round_number: int) -> bool:
        """Whether keys that are not set in this round never will be."""
        current = self._current()
        if round_number < current.number:
            return True
        if round_number > current.number or not current.complete or current.finishing:
            return False
        return self._look().standings.lost

    def vetoes_close(self, node: Node, closed: ClosedWhy) -> bool:
        """Whether ``node`` may not close the run.

        An agent that fails, or one of torch 2.3 to 2.7 that is terminated, closes the whole run.
        Others that are enough, or that are about to form again, go on without it.
        """
        scene = self._look()
        snapshot, standings = scene.snapshot, scene.standings
        if self.member in snapshot.membership.leaving:
            return True
        if closed == "success":
            return False
        others = [
            seat
            for seat, standing in standings.of.items()
            if seat != node.seat and standing in ("here", "missing")
        ]
        return len(others) >= self.policy().min_nodes or must_form_again(
            snapshot, standings, self.policy()
        )

    async def edit_round(self, node: Node, why: str, edit: Callable[[Round], Round | None]) -> None:
        """Change the round that ``node`` is in, for as long as it is the live one."""
        current = self._current()
        while current.complete and current.number == node.round:
            wanted = edit(current)
            if wanted is None:
                return
            try:
                result = await self._store.txn(
                    [self._round_is(current), *self._own.registered],
                    [Put(self._keys.round, wanted.to_json())],
                    [Range(self._keys.round)],
                )
            except StoreAmbiguous:
                current = await self._reread(current)
                continue
            except StoreError as error:
                log.info("the round waits for the store: %s", error)
                await asyncio.sleep(self._random.uniform(0.2, 0.5))
                continue
            if result.succeeded:
                log.info("round %d: %s", current.number, why)
                await self._reach(result.revision)
                return
            found = self._parse_round(result.responses[0])
            if found is None or found.mod_revision == current.mod_revision:
                await asyncio.sleep(self._random.uniform(0.2, 0.5))
            current = found or current

    async def news(self) -> None:
        """Wait until something of this run has changed."""
        await self._news.wait()

    # --- the mirror ---

    def _apply(self, events: Sequence[WatchEvent]) -> None:
        """Take in one batch; only keys that changed are parsed."""
        if self._mirror.revision < self._seen_revision:
            self._restore()
        self._seen_revision = self._mirror.revision
        touched = False
        for event in events:
            key = event.kv.key
            if key.startswith(self._keys.nodes):
                touched = True
                self._apply_node(event)
                if key == self._own_key:
                    self._own.see(event)
            elif key == self._keys.round:
                touched = True
                self._apply_round(event)
                self._own.stir()
            elif key == self._member_key:
                self._own.stir()
        if touched:
            self._moved()
        else:
            # The membership may have changed.
            self._stirred.set()

    def _apply_node(self, event: WatchEvent) -> None:
        try:
            node = Node.from_kv(event.kv) if event.kind == "put" else None
        except RecordError as error:
            log.warning("a node's record is ignored: %s", error)
            node = None
        if node is not None:
            self._nodes[node.member] = node
        else:
            self._nodes.pop(last_name(event.kv.key), None)

    def _apply_round(self, event: WatchEvent) -> None:
        if event.kind == "delete":
            self._remember(self._round)
            self._round = Round()
            return
        try:
            self._round = Round.from_kv(event.kv)
        except RecordError as error:
            log.warning("the round's record is ignored: %s", error)
            self._remember(self._round)
            self._round = Round(mod_revision=event.kv.mod_revision)

    def _restore(self) -> None:
        log.warning("the store was restored or emptied: what this sidecar knows is put back")
        self._restored = True
        self._remember(self._round)
        self._own.forget()

    def _remember(self, known: Round) -> None:
        if self._remembered is None or known.age > self._remembered.age:
            self._remembered = known

    def _current(self) -> Round:
        """The round: the store's word, or a later one that the store has lost."""
        lost = self._remembered
        if lost is None or lost.age <= self._round.age:
            return self._round
        return replace(lost, mod_revision=self._round.mod_revision)

    # --- looking and deciding ---

    def _moved(self) -> None:
        self._scene = None
        self._stirred.set()
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _look(self) -> Scene:
        """What agents are shown rests on this: the run, with our own record as it should be."""
        now, own, membership = self.clock(), self._own.node, self._membership()
        scene = self._scene
        if (
            scene is None
            or scene.own is not own
            or scene.snapshot.membership != membership
            or now >= scene.standings.wake_at_s
        ):
            policy = self.policy()
            word = self.snapshot()
            self._observations = observe(
                now,
                self._observations,
                word,
                policy,
                healthy_s=self._mirror.healthy_for_s(now),
                cut_off=self._restored or self._own.vanished,
            )
            self._restored = False
            shown = word
            if own is not None:
                shown = replace(word, nodes={**word.nodes, self.member: own})
            standings = stand(now, shown, self._observations, policy)
            scene = self._scene = Scene(own, word, shown, standings)
        return scene

    async def _decide(self) -> None:
        due: tuple[Round, float] | None = None
        while True:
            self._stirred.clear()
            self._scene = None
            word, now = self._look().word, self.clock()
            decision = decide(now, word, self._observations, self.policy())
            wanted = decision.round
            if self._remembered is not None and self._current().age > self._round.age:
                wanted = self._current()
            self._say(decision)
            wake_at_s = min(decision.wake_at_s, self._bury_hung(now))
            if wanted is None:
                due = None
            elif due is None or due[0] != wanted:
                due = (wanted, now + self._stagger(word))
            if due is not None:
                if now >= due[1] and self._lease() is not None:
                    await self._carry_out(due[0], decision.reason, word)
                wake_at_s = min(wake_at_s, max(due[1], now + STAGGER_S[0]))
            await self._stirred_by(wake_at_s)
            await asyncio.sleep(COALESCE_S + COALESCE_PER_NODE_S * len(self._nodes))

    async def _stirred_by(self, wake_at_s: float) -> None:
        left_s = wake_at_s - self.clock()
        try:
            async with asyncio.timeout(left_s if math.isfinite(left_s) else None):
                await self._stirred.wait()
        except TimeoutError:
            return

    def _say(self, decision: Decision) -> None:
        if decision.reason != self._reason:
            self._reason = decision.reason
            log.info("%s", decision.reason)

    def _stagger(self, word: RunSnapshot) -> float:
        """For how long to leave a decision to whoever made it due by its own write."""
        nodes = word.nodes.values()
        newest = max(nodes, key=lambda node: node.mod_revision, default=None)
        if newest is not None and newest.member == self.member:
            return 0.0
        return self._random.uniform(*STAGGER_S)

    def _bury_hung(self, now: float) -> float:
        """Leave a tombstone for an agent that has been silent too long; when to look again."""
        agent, hung_s = self._agent, self.policy().hung_s
        node = self.own_node(agent) if agent is not None else None
        if agent is None or node is None or node.state == "left":
            return math.inf
        if agent.pending:
            return now + hung_s
        if now - agent.seen_s >= hung_s:
            log.warning("the torchrun here has asked for nothing for %.0f s: it hangs", hung_s)
            self.leave(agent, "hung")
            return math.inf
        return agent.seen_s + hung_s

    def _handing(self) -> Handing | None:
        """Propose what becomes of our own node once it is frozen."""
        scene, node = self._look(), self._own.node
        if node is None:
            return None
        handed = hand(scene.snapshot, scene.standings, node)
        if handed is None:
            return None
        return Handing(handed, scene.snapshot.round.mod_revision)

    # --- writing ---

    async def _carry_out(self, wanted: Round, reason: str, word: RunSnapshot) -> None:
        """Write the round, provided that nothing it rests on has changed since ``word``."""
        try:
            result = await self._store.txn(
                [
                    self._round_is(word.round),
                    # One compare for all nodes: one for each would pass etcd's limit of 128.
                    Compare(self._keys.nodes, "mod", "<", word.revision + 1, prefix=True),
                    *self._own.registered,
                ],
                [Put(self._keys.round, wanted.to_json())],
            )
        except StoreError as error:
            # What became of it, the watch will tell; the compares make a repetition harmless.
            log.info("the round waits for the store: %s", error)
            await asyncio.sleep(self._random.uniform(0.2, 0.5))
            return
        if result.succeeded:
            log.info("wrote: %s", reason)
        # Only once the watch has passed a lost race is there something new to decide by.
        await self._reach(result.revision)

    async def _write(self, node: Node) -> None:
        self._own.aim(node)
        self._moved()
        await self._reach(await self._own.written(node))

    async def _reach(self, revision: int) -> None:
        try:
            async with asyncio.timeout(SEE_OWN_WRITE_S):
                await self._mirror.reached(revision)
        except TimeoutError:
            log.info("the watch is more than %.0f s behind the store", SEE_OWN_WRITE_S)

    def _round_is(self, current: Round) -> Compare:
        return Compare(self._keys.round, "mod", "=", current.mod_revision)

    async def _reread(self, known: Round) -> Round:
        try:
            result = await self._store.range(self._keys.round)
        except StoreError as error:
            log.info("whether the round was written is not known yet: %s", error)
            await asyncio.sleep(self._random.uniform(0.2, 0.5))
            return known
        return self._parse_round(result.kvs) or known

    def _parse_round(self, kvs: tuple[KeyValue, ...] | int | None) -> Round | None:
        if not isinstance(kvs, tuple) or not kvs:
            return None
        try:
            return Round.from_kv(kvs[0])
        except RecordError as error:
            log.warning("the round's record is ignored: %s", error)
            return None
