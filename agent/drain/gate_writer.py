# SPDX-License-Identifier: Apache-2.0
"""The link between the store and the ranks of this pod: shows the gate, votes, acknowledges.

It takes one step at a time, and each is on disk or in the store before the next is decided:
``rdzv.drain.gate`` relies on that order.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from agent.drain.decisions import DrainView
from agent.drain.own import OwnDrain
from agent.rundir.files import RunDir
from launcher_shim.rundir import layout
from rdzv.drain.gate import WAITS, Gate, Here, held_on_cut, local
from rdzv.drain.inputs import DrainingSnapshot
from rdzv.drain.standing import ask_of, asked
from rdzv.drain.transactions import vote_transaction
from rdzv.errors import RecordError, StoreError
from rdzv.members.registrar import Registrar
from rdzv.reconcile import DueWrite, Kernel, Outlook, Reconciler, first_of
from rdzv.records.drain import Vote
from rdzv.store import Compare, Put

log = logging.getLogger(__name__)

POLL_S = (0.015, 0.25)
"""Poll interval of the ranks' progress during a save (shortest, longest): the standard library has
no file notification. The longer the save takes, the longer the interval."""

POLL_SHARE = 0.02
"""The interval is this fraction of the save's time so far, which bounds the error of its measured
duration to 2 %."""

LOOK_S = 0.5
"""Poll interval for an outage of the store, and retry interval of a failed write to the disk."""

PROBE_S = 5.0
"""While ranks wait, the longest time without a write: a sidecar that has none probes the store."""

CUT_S = 30.0
"""Ranks wait for a store that answers no write for so long, and then train on."""


class GateWriter(Reconciler):
    """The keeper of one pod's gate."""

    def __init__(
        self,
        kernel: Kernel,
        run_dir: RunDir,
        registrar: Registrar,
        view: DrainView,
        own: OwnDrain,
        *,
        on_cut_s: float,
    ) -> None:
        super().__init__(kernel, "gate")
        self.shown: Gate | None = None
        self._run_dir = run_dir
        self._view = view
        self._client = kernel.client
        self._own = own
        self._on_cut_s = on_cut_s
        self._registrar = registrar
        self._identity = registrar.identity
        self._began_s = self._probed_s = self._shown_since_s = kernel.clock()
        self._refused = False
        self._page_alone = False

    def restore(self) -> None:
        """Read the gate and the ranks' answers; may block for as long as the disk does."""
        try:
            content = self._run_dir.gate()
            if content is not None:
                shown = Gate.from_json(layout.GATE_PAGE, content)
                # The sidecar before may have died between the two files, or know no page.
                self._run_dir.put_gate(content)
                self._page_alone = self._run_dir.content(layout.GATE) != content
                self.shown = shown
        except (OSError, RecordError) as error:
            log.warning(
                "writing a new gate, the old one is unreadable: %s",
                error,
                extra={"event": "gate_unreadable"},
            )
        ranks = self._run_dir.ranks()
        answers = [mark for rank in ranks for mark in (rank.acked, rank.failed) if mark is not None]
        self._view.seen = max([self.shown.epoch if self.shown else 0, *(e for e, _ in answers)])

    async def wait_for_store(self) -> None:
        """Leave the gate as it lies until the store is read for the first time, but for cuts."""
        mirror = self._client.mirror
        while mirror.sequence == 0:
            await self._probe()
            if (shown := self.shown) is not None:
                wanted = replace(shown, cut=self._is_cut())
                wanted = held_on_cut(wanted, shown, self._leaseless_s, self._on_cut_s)
                if wanted != shown:
                    await self._show(wanted)
            await first_of(mirror.changed_after(0), timeout_s=self._look_in_s)

    async def step(self) -> Outlook:
        """Follow the store and the ranks."""
        await self._probe()
        snapshot = await self._view.snapshot()
        if self._page_alone and self.shown is not None:
            await self._show(self.shown)
        move = local(
            await asyncio.to_thread(self._here),
            commit=snapshot.commit_in_force,
            # Ranks of another run train on during the commit of the run that counts.
            round=snapshot.own_round or snapshot.round,
            drain=snapshot.membership.drains.get(self._identity.pod_uid),
            vote=snapshot.votes.get(self._identity.member),
            last_commit=snapshot.membership.commit_to_start_from,
            of_former_life=snapshot.membership.commit_is_of_former_life,
            on_cut_s=self._on_cut_s,
            ask=ask_of(asked(snapshot.membership)),
        )
        changed, write = partial(self._view.changed_from, snapshot), None
        if move.gate is not None:
            if await self._show(move.gate):
                return Outlook(again=True)
        elif move.vote is not None:
            self.diary.say(move.reason)
            write = self._write_of(move.vote, snapshot)
        return Outlook(changed, self.kernel.clock() + self._pause_s(snapshot), write)

    def _here(self) -> Here:
        return Here(
            member=self._identity.member,
            pod_uid=self._identity.pod_uid,
            shown=self.shown,
            ranks=self._run_dir.ranks(),
            cut=self._is_cut(),
            leaseless_s=self._leaseless_s,
            deadline_boot_s=self._own.due_boot_s,
            page_alone=self._page_alone,
            refused=self._refused,
        )

    @property
    def _leaseless_s(self) -> float:
        return max(0.0, self.kernel.clock() - self._lease_ends_s)

    @property
    def _lease_ends_s(self) -> float:
        """Until when the pod has a lease, as far as this sidecar knows of one."""
        return max(self._began_s, self._registrar.lease_valid_until_s)

    async def _show(self, gate: Gate) -> bool:
        content = gate.to_json()
        # Ranks of 0.1 need a file of its own for each change.
        put = partial(self._run_dir.put, layout.GATE, content)
        self._page_alone = not await self._is_put(layout.GATE, put)
        if not await self._is_put(layout.GATE_PAGE, partial(self._run_dir.put_gate, content)):
            return False
        former, self.shown = self.shown or Gate(), gate
        if gate.reason and (gate.phase, gate.reason) != (former.phase, former.reason):
            log.info(
                "the gate is %s: %s",
                gate.phase,
                gate.reason,
                extra={"event": "gate", "phase": gate.phase, "epoch": gate.epoch},
            )
        if gate.cut and not former.cut:
            log.warning(
                "the store has taken no writes for %.0f s: ranks that wait for it train on, and"
                " nothing counts that they have saved for epoch %d",
                CUT_S,
                gate.epoch,
                extra={"event": "gate_cut", "epoch": gate.epoch},
            )
        if gate.phase != former.phase:
            self._shown_since_s = self.kernel.clock()
        return True

    @property
    def _ranks_wait(self) -> bool:
        shown = self.shown
        return shown is not None and shown.phase in WAITS and not shown.on_cut

    async def _probe(self) -> None:
        """Ask whether the store takes writes, if ranks wait and nothing else has shown it.

        A transaction that could put something needs the right, the space and the quorum for that,
        also where its compares never hold. It makes no revision, so that no watch hears of it.
        """
        now = self.kernel.clock()
        known_s = max(self.answered_s, self._probed_s, self._shown_since_s)
        if not self._ranks_wait or now - known_s < PROBE_S:
            return
        key = self._client.keys.probe(self._identity.member)
        try:
            await self._client.store.txn([Compare(key, "version", "<", 0)], [Put(key, b"")])
        except StoreError as error:
            self.diary.say(f"the store takes no writes: {error}")
        else:
            self.answered_s = self.kernel.clock()
        self._probed_s = self.kernel.clock()

    def _is_cut(self) -> bool:
        """Return whether ranks have waited for long enough for a store that answers no write."""
        if self.shown is None or not self._ranks_wait:
            return False
        answered_s = self.answered_s
        if self.shown.cut and answered_s == -math.inf:
            return True  # by the sidecar before
        return self.kernel.clock() - max(answered_s, self._shown_since_s) >= CUT_S

    async def _is_put(self, name: str, put: Callable[[], object]) -> bool:
        def complain(error: OSError) -> None:
            self.diary.say(f"{name} cannot be written, retrying: {error.strerror}")

        self._refused = not await self.put(put, complain, retry_s=LOOK_S)
        return not self._refused

    def _write_of(self, vote: Vote, snapshot: DrainingSnapshot) -> DueWrite | None:
        job, commit = snapshot.membership.job, snapshot.membership.commit
        if job is None or commit is None:
            return None
        keys = self._client.keys.in_generation(job.generation)
        drain = snapshot.membership.drains.get(self._identity.pod_uid)
        me = self._identity.member
        return DueWrite(lambda: vote_transaction(keys, me, vote, commit, drain))

    def _pause_s(self, snapshot: DrainingSnapshot) -> float:
        phase = self.shown.phase if self.shown is not None else "idle"
        vote = snapshot.votes.get(self._identity.member)
        # Its ranks save, and nothing has come of that yet.
        if phase == "commit" and vote is not None and vote.acked is None and not vote.failed:
            least, most = POLL_S
            return min(most, max(least, POLL_SHARE * (self.kernel.clock() - self._shown_since_s)))
        # No event tells that the store takes no writes, or takes them again: poll.
        return LOOK_S if self._refused or self._page_alone else self._look_in_s

    @property
    def _look_in_s(self) -> float:
        """Seconds until the gate may have to change though nothing has happened."""
        if self._ranks_wait or (self.shown is not None and self.shown.on_cut):
            return LOOK_S
        if self._on_cut_s == math.inf:
            return math.inf
        return max(LOOK_S, self._lease_ends_s + self._on_cut_s - self.kernel.clock())
