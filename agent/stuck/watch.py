# SPDX-License-Identifier: Apache-2.0
"""The watch over the ranks of this pod: if they stand still, it has ``muster-run`` take stacks."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Sequence

from agent.rundir.files import RunDir
from agent.stuck.frames import stance
from agent.stuck.silence import Pulse
from launcher_shim.rundir import layout
from launcher_shim.rundir.rank_reports import StackFrame
from rdzv.dataclass import dataclass
from rdzv.drain.inputs import LiveRound
from rdzv.records.progress import Doing, RankProgress, StillRank

log = logging.getLogger(__name__)

ANSWER_S = 10.0
"""Time for an answer, after which ranks count as giving no stack; an older ``muster-run`` gives
none."""

ENDS_S = 30.0
"""Time for which a rank must keep its world from training before its process is ended."""

ENDED: tuple[Doing, ...] = ("stopped", "loader", "script", "collective")
"""Activities of a rank that may be ended: one without a stack may be at work as others."""

AGAIN_S = 30.0
"""Interval at which ranks that still stand are asked again: what they do may have changed."""


@dataclass(frozen=True, slots=True)
class AskedStacks:
    """A question to ``muster-run``: its number, and when it was asked, by a monotonic clock."""

    ask: str
    at_s: float
    ranks: tuple[RankProgress, ...]


class StillWatch:
    """The watch of one sidecar. ``clock`` is monotonic, in seconds.

    ``still``: what the ranks do, none while they move; ``since_unix_s``: their last report.
    """

    def __init__(self, run_dir: RunDir, clock: Callable[[], float], least_s: float) -> None:
        self.still: tuple[StillRank, ...] = ()
        self.since_unix_s = 0.0
        self._run_dir = run_dir
        self._clock = clock
        self._least_s = least_s
        self._pulse = Pulse()
        self._asked: AskedStacks | None = None
        self._asks = 0
        self._causes: tuple[int, ...] = ()
        self._causes_s = 0.0

    @property
    def waits(self) -> bool:
        """Whether an answer is due."""
        return self._asked is not None and self._asked.ask != ""

    async def look(
        self, ranks: Sequence[RankProgress], round: LiveRound | None, *, commits: bool
    ) -> None:
        """Look at the ranks' reports; ask, and take the answer in.

        ``commits``: all ranks save for a drain or a join, and wait for each other there.
        """
        now_s, master = self._clock(), "" if round is None or not round.live else round.master
        self._pulse = self._pulse.beat(master, ranks, now_s)
        if not master or commits or not self._pulse.stands(ranks, now_s, self._least_s):
            if self.still:
                log.info("the ranks of this pod move again", extra={"event": "ranks_move"})
            self.still, self.since_unix_s, self._asked, self._causes = (), 0.0, None, ()
            return
        if self._asked is None or now_s - self._asked.at_s >= AGAIN_S:
            own = tuple(rank for rank in ranks if rank.master == master)
            await self._ask(own, now_s)
        elif self.waits:
            await self._take(self._asked, now_s)

    async def end(self, causes: Collection[int]) -> None:
        """Have ``muster-run`` end the ranks ``causes``, once they have been that for ``ENDS_S``."""
        doing = {one.rank: one.doing for one in self.still}
        found = tuple(rank for rank in sorted(causes) if doing.get(rank) in ENDED)
        now_s = self._clock()
        if found != self._causes:
            self._causes, self._causes_s = found, now_s
        if not found or self._asked is None or self.waits or now_s - self._causes_s < ENDS_S:
            return
        self._causes_s = now_s
        log.warning(
            "the process of rank %s is ended, as it keeps its world from training",
            " and ".join(map(str, found)),
            extra={"event": "stuck_rank_ended", "ranks": list(found)},
        )
        await self._ask(self._asked.ranks, now_s, ends=found)

    async def _ask(
        self, ranks: tuple[RankProgress, ...], now_s: float, ends: Collection[int] = ()
    ) -> None:
        self._asks += 1
        self.since_unix_s = max(one.at_unix_s for one in ranks)
        ask = f"{self.since_unix_s:.3f}-{self._asks}"
        places = {one.rank: [one.local_rank, one.pid, one.started] for one in ranks}
        question: dict[str, object] = {"ask": ask, "ranks": list(places.values())}
        if ends:
            question["end"] = [places[rank] for rank in ends]
        content = json.dumps(question).encode()
        try:
            await asyncio.to_thread(self._run_dir.put, layout.STACKS_ASKED, content)
        except OSError as error:
            log.warning("cannot ask for the stacks of ranks that stand still: %s", error)
        self._asked = AskedStacks(ask, now_s, ranks)

    async def _take(self, asked: AskedStacks, now_s: float) -> None:
        found = await asyncio.to_thread(self._run_dir.stacks, asked.ask)
        if found is None and now_s - asked.at_s < ANSWER_S:
            return
        found = found or {}
        before = self.still
        nothing: tuple[str, list[StackFrame]] = ("", [])
        self.still = tuple(
            stance(one.rank, *found.get(one.pid, nothing))
            for one in sorted(asked.ranks, key=lambda one: one.rank)
        )
        self._asked = AskedStacks("", asked.at_s, asked.ranks)
        if self.still != before:
            for one in self.still:
                log.warning(
                    "no step for %.0f s: rank %d %s",
                    now_s - self._pulse.moved_s,
                    one.rank,
                    one.sentence,
                    extra={"event": "rank_still", "rank": one.rank, "doing": one.doing},
                )
