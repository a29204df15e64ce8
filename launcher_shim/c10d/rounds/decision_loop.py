# SPDX-License-Identifier: Apache-2.0
"""The loop that decides on one run whenever something has changed, and writes the decision."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from random import Random

from launcher_shim.c10d.rounds import decision as forming
from launcher_shim.c10d.rounds.evaluation import Evaluator
from launcher_shim.c10d.rounds.hang_watch import HangWatch
from launcher_shim.c10d.rounds.inputs import RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.mirrored_run import MirroredRun
from launcher_shim.c10d.rounds.own_write import shown
from launcher_shim.c10d.rounds.records import Round
from launcher_shim.c10d.rounds.round_key import RoundKey
from launcher_shim.c10d.rounds.turns import delay_s, order
from rdzv.diary import Diary
from rdzv.errors import StoreFull
from rdzv.job import JobClient
from rdzv.members.guard import Registered

log = logging.getLogger(__name__)

COALESCE_S = 0.02
COALESCE_PER_NODE_S = 0.0005
"""Minimum time between two evaluations in seconds, and the addition to it per node: a burst of
hundreds of joins then costs few."""

DUE_RETRY_S = 0.1
"""Retry interval of a decision that is due and not in the store yet, in seconds."""

LATE_S = 1.0
"""A wake-up that is later than this, in seconds, means that this sidecar itself was stopped."""


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
        member: str,
        registered: Registered,
        policy: Callable[[], RoundPolicy],
        clock: Callable[[], float],
        random: Random,
        changed: Callable[[], None],
    ) -> None:
        self._run = run
        self._evaluator = evaluator
        self._round_key = round_key
        self._hang_watch = hang_watch
        self._client = client
        self._member = member
        self._registered = registered
        self._policy = policy
        self._clock = clock
        self._random = random
        self._changed = changed
        self._diary = Diary(log)
        self._woken = asyncio.Event()

    @property
    def reason(self) -> str:
        """The newest decision, in one sentence."""
        return self._diary.last

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
            news = (evaluation.standings, stored.membership, evaluation.reform.cause)
            if published != news:
                published = news
                self._changed()
            observations, reforms = self._evaluator.observations, evaluation.reform
            decision = forming.decide(now, stored, observations, self._policy(), reforms)
            wanted = self._run.round if self._run.lacks_round else decision.round
            self._diary.say(evaluation.reform.reason or decision.reason)
            hang_at_s = self._hang_watch.leave_if_hung(evaluation, now)
            wake_at_s = min(decision.wake_at_s, reforms.wake_at_s, hang_at_s)
            if wanted is None:
                due = None
            elif due is None or due[0] != wanted:
                due = (wanted, now + delay_s(self._member, order(wanted, stored), self._random))
            registered = self._registered.lease() is not None
            if due is not None and (registered or now < due[1]):
                if now >= due[1]:
                    await self._write(due[0], stored)
                wake_at_s = min(wake_at_s, max(due[1], now + DUE_RETRY_S))
            await self._wait_for_news(wake_at_s, registered=registered)
            if self._clock() > wake_at_s + LATE_S:
                # This sidecar itself was stopped: requests of the agent may still wait to be read.
                self._hang_watch.excuse(self._clock())
                self._evaluator.excuse(self._clock())
            await asyncio.sleep(COALESCE_S + COALESCE_PER_NODE_S * self._run.node_count)

    async def _write(self, wanted: Round, stored: RunSnapshot) -> None:
        try:
            written = await self._round_key.decide(wanted, stored) or 0
        except StoreFull:
            # Who is away may only wait to be registered again.
            self._evaluator.cut_off = True
        else:
            # After a lost race, wait for the watch: before that, there is nothing new to decide by.
            await shown(self._client.mirror, written)

    async def _wait_for_news(self, wake_at_s: float, *, registered: bool) -> None:
        """Wait for news, ``wake_at_s`` or, if the registration is not in force, for that."""
        left_s = wake_at_s - self._clock()
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
