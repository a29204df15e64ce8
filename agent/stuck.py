# SPDX-License-Identifier: Apache-2.0
"""Ranks that stand still: how it is noticed, what stacks say, and the watch that has them taken.

A rank reports each step or each few steps, and the sidecar looks more seldom. So the usual time
between two reports is the time between two looks, divided by the reports in it. Of a stack the
innermost call that is not of Python's own library tells whether the rank waits for others. A save,
an evaluation and a compilation are known by any of its calls: they may take minutes, and calls of
other names are within them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import gcd

from agent.rundir.files import RunDir
from launcher_shim.pod.launchers import LAUNCHERS
from launcher_shim.rundir import layout
from launcher_shim.rundir.rank_reports import StackFrame
from rdzv.dataclass import dataclass
from rdzv.drain.inputs import LiveRound
from rdzv.records.progress import TEXT_MAX, Doing, RankProgress, StillRank

log = logging.getLogger(__name__)

_PYTHONS = re.compile(r"/lib(64)?/python3[^/]*/(?!site-packages|dist-packages)|^<(?!stdin|string)")
"""Python's own library, of which no call says what is waited for."""
_INSTALLED = re.compile(r"/(site|dist)-packages/")

_COLLECTIVES = re.compile("|".join(one.waits_in for one in LAUNCHERS if one.waits_in))
"""Places in which a rank waits for others; DistributedDataParallel does in the backward pass."""
_BACKWARD = ("_engine_run_backward", "backward")
_LOADERS = re.compile(r"/torch/utils/data/|/muster/data/")
_MUSTER = re.compile(r"/muster/[a-z_]+\.py$")
_COMPILERS = re.compile(
    r"/torch/_dynamo/convert_frame\.py$|/torch/_inductor/(compile_fx|async_compile|codecache)\.py$"
    r"|/triton/compiler/"
)
_SAVERS = re.compile(r"/torch/serialization\.py$|/torch/distributed/checkpoint/|/safetensors/")
_SAVING = re.compile(r"(?i)(^|_)(save|saves|saving|checkpoint|ckpt)|savecheckpoint|dump_model")
_EVALUATING = re.compile(
    r"(?i)(^|_)(eval|valid|infer|predict|generate|sanity)|(^|_)test(_|$|ing)|evaluat|validat"
)

TIMES = 10.0
"""Factor by which a silence must exceed the usual time between two reports."""
STARTS = 10
STARTS_LOOKS = 3
"""Reports, or looks that found new ones, after which a world is no longer one that starts: the
first steps compile. Few looks do not show how many steps a report is."""
KEPT = 9
"""The newest times between reports that are kept: their median is the usual one."""

ANSWER_S = 10.0
"""Time for an answer, after which ranks count as giving no stack; an older ``muster-run`` gives
none."""

ENDS_S = 30.0
"""Time for which a rank must keep its world from training before its process is ended."""

ENDED: tuple[Doing, ...] = ("stopped", "loader", "script", "collective")
"""Activities of a rank that may be ended: one without a stack may be at work as others."""

AGAIN_S = 30.0
"""Interval at which ranks that still stand are asked again: what they do may have changed."""


def stance(rank: int, state: str, frames: Sequence[StackFrame]) -> StillRank:
    """Return what a rank does; ``state``: its process's letter; ``frames``: the innermost first.

    The innermost call that is not of Python's own library tells whether the rank waits for
    others.
    """
    where, *via = _lines(frames) or [""]
    if state in ("T", "t"):
        return StillRank(rank, "stopped")
    if state == "X":
        return StillRank(rank, "ended")
    if not frames:
        return StillRank(rank, "unknown")
    doing = _doing(frames)
    call = _operation(frames) if doing == "collective" else ""
    return StillRank(rank, doing, call, where[:TEXT_MAX], ", ".join(via)[:TEXT_MAX])


def _doing(frames: Sequence[StackFrame]) -> Doing:
    inner = next((one for one in frames if not _PYTHONS.search(one.path)), frames[0])
    scripts = [one for one in frames if not _INSTALLED.search(one.path)]
    if any(_COMPILERS.search(one.path) for one in frames):
        return "compiles"
    if _COLLECTIVES.search(inner.path) and not _SAVERS.search(inner.path):
        return "collective"
    if any(_SAVERS.search(one.path) for one in frames) or _named(_SAVING, frames):
        return "saves"
    if _named(_EVALUATING, frames):
        return "evaluates"
    if any(_LOADERS.search(one.path) for one in frames):
        return "loader"
    if _MUSTER.search(inner.path) and inner not in scripts[-1:]:
        return "muster"
    return "script"


def _named(pattern: re.Pattern[str], frames: Sequence[StackFrame]) -> bool:
    """Return whether a function of the script, or of a trainer, has such a name."""
    return any(
        pattern.search(one.function)
        for one in frames
        if not _PYTHONS.search(one.path) and "/torch/" not in one.path
    )


def _operation(frames: Sequence[StackFrame]) -> str:
    inner = next(one for one in frames if not _PYTHONS.search(one.path))
    if inner.function in _BACKWARD:
        return "the backward pass"
    # Of the calls within the library the outermost is the one that the script has made.
    name = inner.function
    for one in frames:
        if _PYTHONS.search(one.path):
            continue
        if not _COLLECTIVES.search(one.path):
            break
        if one.function not in ("wrapper", "__torch_function__"):
            name = one.function
    return name[:TEXT_MAX]


def _lines(frames: Sequence[StackFrame]) -> list[str]:
    """Return the script's lines, the innermost first; if it has none, that of what is installed."""
    kept = [one for one in frames if not _PYTHONS.search(one.path)]
    own = [one for one in kept if not _INSTALLED.search(one.path)]
    own = [one for one in own if not _MUSTER.search(one.path)]
    return [f"{one.path.rpartition('/')[2]}:{one.line}" for one in own or kept[:1]]


@dataclass(frozen=True, slots=True)
class Pulse:
    """The steps of a pod's ranks in one round, as far as known.

    ``mark``: all that they reported last, which they did before ``moved_s``, by a monotonic clock.
    ``stride``: the steps of one report. ``gaps_s``: seconds a step. ``made``: how many steps it was
    seen to make.

    So the usual time between two reports is the time between two looks, divided by the reports
    in it; how many steps a report is follows from the numbers of the steps.
    """

    master: str = ""
    mark: tuple[object, ...] = ()
    moved_s: float = 0.0
    step: int = -1
    at_unix_s: float = 0.0
    stride: int = 0
    gaps_s: tuple[float, ...] = ()
    made: int = 0

    @property
    def starts(self) -> bool:
        """Whether it has not made enough steps yet to have a usual time."""
        return len(self.gaps_s) < STARTS_LOOKS and self.made < STARTS * max(1, self.stride)

    def term_s(self, least_s: float) -> float:
        """Return how long a silence must last to be one."""
        # ``statistics`` would cost every sidecar half a MiB.
        usual_s = sorted(self.gaps_s)[len(self.gaps_s) // 2] * self.stride if self.gaps_s else 0.0
        return max(least_s, TIMES * usual_s)

    def beat(self, master: str, ranks: Sequence[RankProgress], now_s: float) -> Pulse:
        """Return the pulse after the ranks of round ``master`` were looked at."""
        own = [rank for rank in ranks if rank.master == master]
        mark = tuple(
            (one.local_rank, one.pid, one.step, one.at_unix_s, one.held, one.epoch, one.away)
            for one in own
        )
        if master != self.master:
            return Pulse(master, mark, now_s)
        if mark == self.mark:
            return self
        moved = replace(self, mark=mark, moved_s=now_s)
        furthest = max(own, key=lambda one: one.step, default=None)
        if furthest is None or furthest.step < 0 or furthest.step == self.step:
            return moved
        steps, took_s = furthest.step - self.step, furthest.at_unix_s - self.at_unix_s
        moved = replace(moved, step=furthest.step, at_unix_s=furthest.at_unix_s)
        if self.step < 0 or steps < 0:
            return moved
        return replace(
            moved,
            made=self.made + steps,
            stride=gcd(self.stride, steps),
            gaps_s=(*self.gaps_s, max(0.0, took_s) / steps)[-KEPT:],
        )

    def stands(self, ranks: Sequence[RankProgress], now_s: float, least_s: float) -> bool:
        """Return whether ranks that should make steps make none.

        They need not while they start, save, wait at the gate, or are between two loops.
        """
        own = [rank for rank in ranks if rank.master == self.master]
        if self.starts or not own or now_s - self.moved_s < self.term_s(least_s):
            return False
        return not any(one.held or one.epoch or one.away or one.step < 0 for one in own)


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
