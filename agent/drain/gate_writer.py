# SPDX-License-Identifier: Apache-2.0
"""The link between the store and the ranks of this pod: shows the gate, votes, acknowledges.

It takes one step at a time, and each is on disk or in the store before the next is decided:
``rdzv.drain.gate`` relies on that order.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

from agent.drain.own import OwnDrain
from agent.drain.view import DrainView
from agent.drain.voted_epoch import VotedEpoch
from agent.drain.writer import DrainWriter
from agent.rundir.files import RunDir
from launcher_shim.rundir import layout
from rdzv.diary import Diary
from rdzv.drain.gate import Gate, Here, Move, local
from rdzv.drain.inputs import DrainingSnapshot, DrainPolicy
from rdzv.drain.launcher_save import ask_of, asked
from rdzv.errors import RecordError
from rdzv.job import JobClient
from rdzv.members.registrar import Registrar
from rdzv.records.commit import Vote, vote_transaction

log = logging.getLogger(__name__)

POLL_S = (0.015, 0.25)
"""Poll interval of the ranks' progress during a save (shortest, longest): the standard library has
no file notification. The longer the save takes, the longer the interval."""

POLL_SHARE = 0.02
"""The interval is this fraction of the save's time so far, which bounds the error of its measured
duration to 2 %."""

LOOK_S = 0.5
"""Poll interval for an outage of the store, and retry interval of a failed write to the disk."""


class GateWriter:
    """The keeper of one pod's gate. ``clock`` is monotonic, in seconds."""

    def __init__(
        self,
        run_dir: RunDir,
        client: JobClient,
        registrar: Registrar,
        sight: DrainView,
        voted: VotedEpoch,
        writing: DrainWriter,
        own: OwnDrain,
        policy: DrainPolicy,
        clock: Callable[[], float],
    ) -> None:
        self.shown: Gate | None = None
        self._run_dir = run_dir
        self._sight = sight
        self._client = client
        self._voted = voted
        self._writing = writing
        self._own = own
        self._policy = policy
        self._clock = clock
        self._registrar = registrar
        self._identity = registrar.identity
        self._began_s = clock()
        self._cut_since_s: float | None = None
        self._shown_since_s = clock()
        self._refused = False
        self._diary = Diary(log)

    def restore(self) -> None:
        """Read the gate and the note of the voted epoch; may block for as long as the disk does."""
        try:
            content = self._run_dir.content(layout.GATE)
            self.shown = None if content is None else Gate.from_json(layout.GATE, content)
        except (OSError, RecordError) as error:
            log.warning(
                "writing a new gate, the old one is unreadable: %s",
                error,
                extra={"event": "gate_unreadable"},
            )
        self._voted.restore(self.shown.epoch if self.shown else 0)

    async def run(self) -> None:
        """Follow the store and the ranks until cancelled."""
        while True:
            snapshot = await self._sight.snapshot()
            move = local(
                await asyncio.to_thread(self._here),
                commit=snapshot.commit_in_force,
                # Ranks of another run train on during the commit of the run that counts.
                round=snapshot.own_round or snapshot.round,
                drain=snapshot.membership.drains.get(self._identity.pod_uid),
                vote=self._own_vote(snapshot),
                last_commit=snapshot.membership.commit_to_start_from,
                of_former_life=snapshot.membership.commit_is_of_former_life,
                hold_s=self._policy.hold_s,
                cut_s=self._policy.cut_s,
                ask=ask_of(asked(snapshot.membership)),
            )
            if not await self._do(move, snapshot):
                await self._sight.changed_from(snapshot, self._pause_s(snapshot))

    def _here(self) -> Here:
        now = self._clock()
        if not self._client.mirror.loaded or self._client.mirror.healthy(now):
            self._cut_since_s = None
        elif self._cut_since_s is None:
            self._cut_since_s = now
        return Here(
            member=self._identity.member,
            pod_uid=self._identity.pod_uid,
            shown=self.shown,
            ranks=self._run_dir.ranks(),
            sent=self._voted.epoch,
            cut_for_s=0.0 if self._cut_since_s is None else now - self._cut_since_s,
            leaseless_s=max(0.0, now - self._lease_ends_s),
            deadline_boot_s=self._own.due_boot_s,
        )

    @property
    def _lease_ends_s(self) -> float:
        """Until when the pod has a lease, as far as this sidecar knows of one."""
        return max(self._began_s, self._registrar.lease_valid_until_s)

    def _own_vote(self, snapshot: DrainingSnapshot) -> Vote | None:
        return snapshot.votes.get(self._identity.member)

    async def _do(self, move: Move, snapshot: DrainingSnapshot) -> bool:
        """Carry out ``move``; return whether to decide again at once.

        False if the move is empty or has failed. A vote counts as done even if it was not written:
        the writer has waited for the mirror, or backed off.
        """
        if move.gate is not None:
            return await self._show(move.gate)
        if move.note is not None:
            return await self._note(move.note)
        if move.vote is not None:
            self._diary.say(move.reason)
            return await self._send(move.vote, snapshot)
        return False

    async def _show(self, gate: Gate) -> bool:
        putting = asyncio.to_thread(self._run_dir.put, layout.GATE, gate.to_json())
        if not await self._is_put(layout.GATE, putting):
            return False
        former, self.shown = self.shown or Gate(), gate
        if gate.reason and (gate.phase, gate.reason) != (former.phase, former.reason):
            log.info(
                "the gate is %s: %s",
                gate.phase,
                gate.reason,
                extra={"event": "gate", "phase": gate.phase, "epoch": gate.epoch},
            )
        if gate.phase != former.phase:
            self._shown_since_s = self._clock()
        return True

    async def _note(self, epoch: int) -> bool:
        return await self._is_put(layout.COMMIT, self._voted.note(epoch))

    async def _is_put(self, name: str, putting: Awaitable[None]) -> bool:
        try:
            await putting
        except OSError as error:
            self._diary.say(f"{name} cannot be written, retrying: {error.strerror}")
            self._refused = True
            return False
        self._refused = False
        return True

    async def _send(self, vote: Vote, snapshot: DrainingSnapshot) -> bool:
        job, commit = snapshot.membership.job, snapshot.membership.commit
        if job is None or commit is None:
            return False
        keys = self._client.keys.in_generation(job.generation)
        drain = snapshot.membership.drains.get(self._identity.pod_uid)
        compares, operations = vote_transaction(keys, self._identity.member, vote, commit, drain)
        await self._writing.txn(compares, operations)
        return True

    def _pause_s(self, snapshot: DrainingSnapshot) -> float | None:
        phase = self.shown.phase if self.shown is not None else "idle"
        if phase == "commit" and self._ranks_save(snapshot):
            least, most = POLL_S
            return min(most, max(least, POLL_SHARE * (self._clock() - self._shown_since_s)))
        # No event tells that the store has become unreachable, or reachable again: poll.
        if self._refused or phase in ("hold", "commit"):
            return LOOK_S
        if self._policy.cut_s == math.inf:
            return None
        return max(LOOK_S, self._lease_ends_s + self._policy.cut_s - self._clock())

    def _ranks_save(self, snapshot: DrainingSnapshot) -> bool:
        """Return whether this pod has voted and its save is neither acknowledged nor failed yet."""
        vote = self._own_vote(snapshot)
        return vote is not None and vote.acked is None and not vote.failed
