# SPDX-License-Identifier: Apache-2.0
"""The node of this sidecar's torchrun: its desired record, the writes towards it, and what it sees.

Only this sidecar writes the key, and only while its registration guard holds: a write of a stale
incarnation changes nothing. After an outage, an expired lease or a lost answer, the key gets the
value desired *now*: lost tombstones would make ghosts that hold a round until all time out.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.mirrored_run import MirroredRun
from launcher_shim.c10d.rounds.observations import (
    RanksSeen,
    RoundObservations,
    Standings,
    observe,
    stand,
)
from launcher_shim.c10d.rounds.records import Node, Round
from launcher_shim.c10d.rounds.world import Reform, reform
from rdzv.dataclass import dataclass
from rdzv.errors import LeaseLost, StoreError
from rdzv.job import JobClient, Registered
from rdzv.reconcile import Loop, Outlook
from rdzv.sentences import Diary
from rdzv.store import Compare, KeyValue, Operation, Put, Range, Store, WatchEvent

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Maximum retry interval in seconds; a change ends it earlier."""


@dataclass(frozen=True, slots=True)
class Handing:
    """A change of the own record that depends on the round key's being at ``round_revision``."""

    node: Node
    round_revision: int


class OwnNode(Loop):
    """The node key of this sidecar's member, kept at its desired value as long as ``run`` runs.

    ``handing`` may propose a change if none is due; ``handed`` is called when it has been written.
    """

    def __init__(
        self,
        *,
        key: str,
        round_key: str,
        store: Store,
        registered: Registered,
        random: Random,
        handing: Callable[[], Handing | None] = lambda: None,
        handed: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._key = key
        self._round_key = round_key
        self._store = store
        self._registered = registered
        self._random = random
        self._handing = handing
        self._handed = handed
        self._diary = Diary(log)
        self._node: Node | None = None
        self._value = b""
        self._was_written = False
        self._was_lost = False
        self._stored: KeyValue | None = None
        self._stored_as_of = 0
        self._restores = 0
        self._settled = asyncio.Event()

    @property
    def node(self) -> Node | None:
        """The desired record; None before an agent has first asked."""
        return self._node

    def take_loss(self) -> bool:
        """Return whether the store lacks the record, or has lacked it since the last call."""
        lost, self._was_lost = self._was_lost, self._was_written and self._stored is None
        return lost or self._was_lost

    def aim(self, node: Node) -> None:
        """Set the desired record."""
        self._become(node)
        self.stir()

    def stir(self) -> None:
        """Look again: an input of the next write may have changed."""
        self.wake()
        self._settle()

    def see(self, event: WatchEvent) -> None:
        """Apply an event of the watch for the key."""
        kv = event.kv
        if kv.mod_revision >= self._stored_as_of:
            self._note_stored(kv if event.kind == "put" else None, kv.mod_revision)
            self.wake()

    def agree(self, shown: KeyValue | None, revision: int) -> None:
        """Believe the watch, which shows ``shown`` at ``revision``, once it has come to the answer.

        If the store has lost an own write that the watch had not shown, no event says so.
        """
        stored = self._stored
        if (shown and shown.mod_revision) != (stored and stored.mod_revision):
            self._note_stored(shown, revision)
            self.wake()

    def forget(self) -> None:
        """Accept any revision again: the store was restored or emptied."""
        self._restores += 1
        self._stored_as_of = 0
        self.stir()

    def retire(self) -> None:
        """Desire no record any more, as the run is of a former generation; wake all waiters."""
        self._node = None
        self._settle()

    async def written(self, node: Node) -> int:
        """Wait until the store has ``node``, or it is no longer desired; return the revision."""
        while self._node is node and not self._holds():
            settled = self._settled
            await settled.wait()
        return self._stored_as_of

    async def step(self) -> Outlook:
        """Write what is due; without a lease or after a lost race, soon again."""
        try:
            if await self._write():
                return Outlook(again=True)
        except LeaseLost:
            self._diary.say(
                "the lease is lost: the node is written once its member is registered again"
            )
        except StoreError as error:
            self._diary.say(f"retrying to write the node record: {error}")
            await asyncio.sleep(self._random.uniform(0.2, 1.0) * RETRY_S)
            return Outlook(again=True)
        return Outlook(look_at_s=self.clock() + RETRY_S if self._due() else math.inf)

    def _holds(self) -> bool:
        return (
            self._node is not None
            and self._stored is not None
            and self._stored.value == self._value
        )

    def _due(self) -> bool:
        stored = self._stored
        on_lease = stored is not None and stored.lease == self._registered.lease()
        return self._node is not None and not (self._holds() and on_lease)

    async def _write(self) -> bool:
        """Write once if something is due; return whether to check again at once."""
        now, lease = self._node, self._registered.lease()
        if now is None or lease is None:
            return False
        compares = [self._registered.holds()]
        proposal = None
        if self._due():
            wanted = now
        else:
            proposal = self._handing()
            if proposal is None:
                return False
            wanted = proposal.node
            compares.append(Compare(self._round_key, "mod", "=", proposal.round_revision))
        stored_revision = self._stored.mod_revision if self._stored else 0
        put = Put(self._key, wanted.to_json(), lease)
        reads: list[Operation] = [Range(self._key)]
        restores = self._restores
        result = await self._store.txn(
            [Compare(self._key, "mod", "=", stored_revision), *compares], [put], reads
        )
        if restores != self._restores:
            return True  # the answer may be that of the store that was lost
        if result.succeeded:
            # Only the value, the revision and the lease of the stored key are read here.
            kv = KeyValue(self._key, put.value, result.revision, result.revision, 1, lease)
            if proposal is not None and self._node is now:
                self._become(wanted)
                # The watch may have shown this write before its result came.
                self._handed()
            self._was_written = True
            self._diary.say(f"the node is {wanted.state} in the store")
            self._note_stored(kv, result.revision)
            return True
        response = result.responses[0]
        kvs = response if isinstance(response, tuple) else ()
        self._note_stored(kvs[0] if kvs else None, result.revision)
        # The answer of a restored store counts only once the watch shows that it was restored.
        return (self._stored.mod_revision if self._stored else 0) != stored_revision

    def _note_stored(self, kv: KeyValue | None, revision: int) -> None:
        # The watch may have shown a later revision before the store's answer came.
        if revision >= self._stored_as_of:
            self._stored = kv
            self._stored_as_of = revision
        self._was_lost |= self._was_written and self._stored is None
        self._settle()

    def _become(self, node: Node) -> None:
        self._node = node
        self._value = node.to_json()

    def _settle(self) -> None:
        settled, self._settled = self._settled, asyncio.Event()
        settled.set()


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
    reform: Reform
    """The cause for which the stored world is to form again, if there is one."""

    @property
    def wake_at_s(self) -> float:
        """The time at which it would change by time alone."""
        return min(self.standings.wake_at_s, self.reform.wake_at_s)


class Evaluator:
    """The evaluator of one run; evaluates again whenever an input has changed.

    ``membership`` (called with the current round) and ``policy`` must be cheap. ``life_since_s``:
    as in ``RoundObservations``.
    """

    def __init__(
        self,
        run: MirroredRun,
        own: OwnNode,
        client: JobClient,
        *,
        member: str,
        policy: Callable[[], RoundPolicy],
        membership: Callable[[Round], RoundMembers],
        clock: Callable[[], float],
        life_since_s: float = -math.inf,
    ) -> None:
        self.observations = RoundObservations(life_since_s=life_since_s)
        self.cut_off = False
        """Whether other nodes' keys may be away for no fault of theirs: since the last evaluation,
        the store was restored or emptied, or has refused a write for want of space."""
        self.ranks = RanksSeen(-1)
        """The newest reports of the ranks of this pod."""
        self._run = run
        self._own = own
        self._mirror = client.mirror
        self.member = member
        self.policy = policy
        self.clock = clock
        self._membership = membership
        self._evaluation: Evaluation | None = None

    def members(self) -> RoundMembers:
        """Return the membership that the current round depends on."""
        return self._membership(self._run.round)

    def stored(self) -> RunSnapshot:
        """Return the run as the mirror has it."""
        return self._run.snapshot(self._mirror.certain_revision, self.members())

    def outdate(self) -> None:
        """Drop the last evaluation."""
        self._evaluation = None

    def evaluate(self) -> Evaluation:
        """Return the present evaluation, the basis of views and decisions; evaluate if needed."""
        now, own, membership = self.clock(), self._own.node, self.members()
        evaluation = self._evaluation
        if (
            evaluation is None
            or evaluation.own is not own
            or evaluation.snapshot.membership != membership
            or now >= evaluation.wake_at_s
        ):
            policy = self.policy()
            stored = self.stored()
            frozen = stored.round.frozen
            self.observations = observe(
                now,
                self.observations,
                stored,
                policy,
                healthy_s=self._mirror.healthy_for_s(now),
                cut_off=self._own.take_loss() or self.cut_off,
                ranks=self.ranks if frozen and frozen[0].member == self.member else None,
            )
            self.cut_off = False
            shown = stored
            if own is not None:
                shown = replace(stored, nodes={**stored.nodes, self.member: own})
            standings = stand(now, shown, self.observations, policy)
            reforms = reform(now, stored, self.observations, policy)
            evaluation = self._evaluation = Evaluation(own, stored, shown, standings, reforms)
        return evaluation
