# SPDX-License-Identifier: Apache-2.0
"""The loop that decides on one run whenever something has changed, and writes the decision."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from time import time

from launcher_shim.c10d.rounds import decision as forming
from launcher_shim.c10d.rounds.back_off import BackOff
from launcher_shim.c10d.rounds.evaluation import Evaluator
from launcher_shim.c10d.rounds.hanging import HangWatch
from launcher_shim.c10d.rounds.inputs import RunSnapshot
from launcher_shim.c10d.rounds.mirrored_run import MirroredRun
from launcher_shim.c10d.rounds.records import Round
from launcher_shim.c10d.rounds.round_key import RoundKey
from rdzv.diary import Diary
from rdzv.errors import StoreFull
from rdzv.job import JobClient
from rdzv.members.guard import Registered
from rdzv.race import first_of
from rdzv.records.history import HistoryEntry

log = logging.getLogger(__name__)

COALESCE_S = 0.02
COALESCE_PER_NODE_S = 0.0005
"""Minimum time between two evaluations in seconds, and the addition to it per node: a burst of
hundreds of joins then costs few."""

DUE_RETRY_S = 0.1
"""Retry interval of a decision that is due and not in the store yet, in seconds."""

LATE_S = 1.0
"""A wake-up that is later than this, in seconds, means that this sidecar itself was stopped."""


TURN_S = 0.5
"""Seconds between two turns. Longer than the usual delay of a watch on a busy store."""

SPREAD = 0.2
"""Jitter: the largest random delay of a turn, as a fraction of ``TURN_S``."""


class DecisionLoop:
    """The decisions on one run. ``changed`` is called if a standing or the membership changes."""

    def __init__(
        self,
        run: MirroredRun,
        evaluator: Evaluator,
        round_key: RoundKey,
        hang_watch: HangWatch,
        client: JobClient,
        *,
        registered: Registered,
        random: Random,
        changed: Callable[[], None],
    ) -> None:
        self._run = run
        self._evaluator = evaluator
        self._round_key = round_key
        self._hang_watch = hang_watch
        self._client = client
        self._registered = registered
        self._clock = evaluator.clock
        self._random = random
        self._changed = changed
        self.diary = Diary(log)
        self._woken = asyncio.Event()
        self._noted_wait = -1

    def wake(self) -> None:
        """Drop the last evaluation of the run, and decide again."""
        self._evaluator.outdate()
        self._woken.set()

    async def decide(self) -> None:
        """Decide whenever woken or due, until cancelled."""
        due: tuple[Round, float] | None = None
        published: tuple[object, ...] | None = None
        while True:
            self._woken.clear()
            self._evaluator.outdate()
            evaluation, now = self._evaluator.evaluate(), self._clock()
            stored = evaluation.stored
            done = self._evaluator.observations.done if stored.round.world else None
            news = (evaluation.standings, stored.membership, evaluation.reform.cause, done)
            if published != news:
                published = news
                self._changed()
            observations, reforms = self._evaluator.observations, evaluation.reform
            decision = forming.decide(now, stored, observations, self._evaluator.policy(), reforms)
            wanted = self._run.round if self._run.lacks_round else decision.round
            self.diary.say(evaluation.reform.reason or decision.reason)
            if decision.wait.member == self._evaluator.member:
                await self._note_wait(decision.wait, stored.round)
            hang_at_s = self._hang_watch.leave_if_hung(evaluation, now)
            wake_at_s = min(decision.wake_at_s, reforms.wake_at_s, hang_at_s)
            if wanted is None:
                due = None
            elif due is None or due[0] != wanted:
                turns = order(wanted, stored)
                due = (wanted, now + delay_s(self._evaluator.member, turns, self._random))
            registered = self._registered.lease() is not None
            if due is not None and (registered or now < due[1]):
                if now >= due[1]:
                    await self._write(due[0], stored)
                wake_at_s = min(wake_at_s, max(due[1], now + DUE_RETRY_S))
            left_s = wake_at_s - self._clock()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s if math.isfinite(left_s) else None):
                    if registered:
                        await self._woken.wait()
                    else:
                        await first_of(self._woken.wait(), self._registered.again())
            if self._clock() > wake_at_s + LATE_S:
                # This sidecar itself was stopped: requests of the agent may still wait to be read.
                self._hang_watch.excuse(self._clock())
            await asyncio.sleep(COALESCE_S + COALESCE_PER_NODE_S * self._run.node_count)

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

    async def _write(self, wanted: Round, stored: RunSnapshot) -> None:
        try:
            written = await self._round_key.decide(wanted, stored) or 0
        except StoreFull:
            # Who is away may only wait to be registered again.
            self._evaluator.cut_off = True
        else:
            # After a lost race, wait for the watch: before that, there is nothing new to decide by.
            await self._client.mirror.shown(written)


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


def delay_s(member: str, members: Sequence[str], random: Random) -> float:
    """Return for how many seconds ``member`` leaves a decision to those before it in ``members``.

    The number of members that may write doubles with each turn, so hundreds that are away at once
    cost a few turns. A member that is not in ``members`` comes last.
    """
    place = members.index(member) if member in members else len(members)
    return place.bit_length() * TURN_S * random.uniform(1, 1 + SPREAD)
