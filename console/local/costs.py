# SPDX-License-Identifier: Apache-2.0
"""The cost of each thing that happened to a run: pause, steps trained again; and the sum. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from console.local.timeline import FINISHED, Moment, Timeline, World, again, in_place
from rdzv.sentences import counted

GOES_ON_S = 1.0
"""A world that makes steps for longer than this after an event was not stopped by it."""

BEFORE = "before the first step"
"""The cost of an event that came while no world had trained."""

AFTER = "after the last step"
"""The cost of a node that was added when nothing was left to train."""

_BY_HAND = ("pause", "resume", "set", "admit", "outage")
"""Moments of a membership by which people or the store change a job."""

_REASONS = ("join", "lost", "leave", "error")
"""Moments that explain a change which nothing above does."""

_HOW_TO_SEE_STEPS = (
    "No step was found in the script's output, so what a change costs is unknown. Print them, as in"
    ' print(f"step {step}"), or give --step REGEX, or call muster.report_step(step); to lose none,'
    " see docs/training.md#a-loop-of-your-own."
)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one change, or of an event that changed nothing.

    ``pause_s``: the time without a step; None if unknown or without an end. ``steps``: those
    trained again, in words.
    """

    causes: tuple[Moment, ...]
    pause_s: float | None
    steps: str

    @property
    def what(self) -> str:
        """The causes in words."""
        return ", ".join(dict.fromkeys(one.label for one in self.causes))

    @property
    def pause(self) -> str:
        """The pause in words."""
        if self.pause_s is None:
            return ""
        return "no pause" if self.pause_s == 0 else f"{self.pause_s:.1f} s pause"

    @property
    def short(self) -> str:
        """The pause, if there was one, and the steps, in words."""
        pause = self.pause.removesuffix(" pause") if self.pause_s else ""
        return ", ".join(filter(None, (pause, self.steps)))

    def to_json(self) -> dict[str, object]:
        """Return it for the report."""
        pause_s = None if self.pause_s is None else round(self.pause_s, 3)
        return {"what": self.what, "pause_s": pause_s, "steps": self.steps}


def interventions(timeline: Timeline) -> list[Moment]:
    """Return the moments at which somebody did something to the run, in order.

    A drain by hand has no event: its moment is its release.
    """
    events = [moment for moment in timeline.moments if moment.kind == "event" and moment.had_effect]
    drained = {moment.who for moment in events if moment.what == "drain"}
    by_hand = [
        moment
        for moment in timeline.moments
        if moment.kind == "membership"
        and (moment.what in _BY_HAND or (moment.what == "released" and moment.who not in drained))
    ]
    return sorted([*events, *by_hand], key=lambda moment: moment.at_s)


def costs(timeline: Timeline) -> list[Cost]:
    """Return the cost of each change of the world, and of each event that changed none, in order.

    Without steps, or with ones that do not count on, nothing is known of any.
    """
    done = interventions(timeline)
    if timeline.worlds.fault or not timeline.worlds.all:
        return [Cost((one,), None, "cost unknown: no steps") for one in done]
    began_s = timeline.worlds.all[0].began_s
    early = [one for one in done if one.at_s < began_s]
    found = [Cost((one,), None, BEFORE) for one in early]
    done = done[len(early) :]
    for before, after in pairwise(timeline.worlds.all):
        seen = [one for one in done if one.at_s <= after.began_s]
        causes = _causes(seen, before, after)
        idle = [one for one in seen if one not in causes and not _may_wait(one)]
        found += [Cost((one,), 0.0, "trained on") for one in idle]
        done = [one for one in done if one not in causes and one not in idle]
        causes = causes or _explained(timeline, before, after)
        pause_s = after.began_s - before.ended_s
        found.append(Cost(tuple(causes), pause_s, _steps(before, after)))
    return found + [_without_world(one, timeline) for one in done]


def beside(own: Sequence[Cost], others: Sequence[Cost], *, finished: bool) -> list[str]:
    """Return, for each of ``own``, the cost of the same events in a run on torchrun alone.

    ``finished``: that run's job did, so a change without a later world is not its death.
    """
    theirs = _occurrences(others)
    return [
        _beside(mine, zip(others, theirs, strict=True), finished=finished)
        for mine in _occurrences(own)
    ]


def _occurrences(found: Sequence[Cost]) -> list[set[tuple[str, int]]]:
    """Return the events of each cost as the user wrote them, each numbered among its equals."""
    seen: Counter[str] = Counter()
    numbered = []
    for one in found:
        mine = set()
        for asked in filter(None, (cause.asked for cause in one.causes)):
            mine.add((asked, seen[asked]))
            seen[asked] += 1
        numbered.append(mine)
    return numbered


def _beside(
    mine: set[tuple[str, int]],
    others: Iterable[tuple[Cost, set[tuple[str, int]]]],
    *,
    finished: bool,
) -> str:
    if not mine:
        return "-"
    for other, theirs in others:
        if mine & theirs:
            if other.pause_s is None and other.steps != BEFORE and not finished:
                return "the job is dead"
            return other.short
    return "it did not come" if finished else "the job was dead by then"


def _causes(seen: Sequence[Moment], before: World, after: World) -> list[Moment]:
    """Choose what has caused the change; an added node that is not in the new world is left."""
    losses = [one for one in seen if not _may_wait(one) and one.what != "kill-sidecar"]
    grows = after.size > before.size or (bool(losses) and after.size == before.size)
    return [one for one in seen if one in losses or (grows and _may_wait(one))]


def _may_wait(one: Moment) -> bool:
    return one.what in ("add", "cont", "resume", "set", "admit")


def _explained(timeline: Timeline, before: World, after: World) -> list[Moment]:
    reasons = [
        moment
        for moment in timeline.moments
        if moment.what in _REASONS and before.began_s < moment.at_s <= after.began_s
    ]
    return reasons[-1:]


def _steps(before: World, after: World) -> str:
    steps, exact = again(before, after), before.every == after.every == 1
    how = ", in place" if in_place(before, after) else ""
    if steps <= 0:
        return f"{'no step lost' if exact else 'no printed step again'}{how}"
    return f"{'' if exact else 'about '}{counted(steps, 'step')} again{how}"


def _without_world(one: Moment, timeline: Timeline) -> Cost:
    last = timeline.worlds.all[-1]
    if last.ended_s - one.at_s > GOES_ON_S:
        return Cost((one,), 0.0, "trained on")
    ended = any(
        moment.what == "closed" and moment.detail == FINISHED for moment in timeline.moments
    )
    if ended and one.what == "add":
        return Cost((one,), 0.0, AFTER)
    return Cost((one,), None, "training did not go on")


def facts(timeline: Timeline, *, finished: bool) -> str:
    """Return the duration, and the number of rounds and steps.

    It is known that no step is lost only if the job has ``finished``: one that was ended may have
    made steps that no checkpoint contains.
    """
    rounds, worlds = _rounds(timeline), timeline.worlds
    found = [f"{timeline.moments[-1].at_s:.1f} s", *([counted(rounds, "round")] if rounds else [])]
    if worlds.all and not worlds.fault:
        found.append(f"{worlds.all[-1].last_step} steps in {counted(len(worlds.all), 'world')}")
        again = worlds.steps_trained_again
        if again:
            about = "" if worlds.exact else "about "
            found.append(f"{about}{counted(again, 'step')} trained again")
        elif finished:
            found.append("no step lost" if worlds.exact else "no printed step trained again")
    return "; ".join(found)


def closing_lines(timeline: Timeline) -> list[str]:
    """Return lines with what is not known of the steps, and the events that did nothing."""
    lines = []
    worlds = timeline.worlds
    if worlds.fault:
        lines.append(f"warning: {worlds.fault}.")
    failed = any(moment.what == "error" for moment in timeline.moments)
    if _rounds(timeline) and not worlds.all and not failed:
        lines.append(_HOW_TO_SEE_STEPS)
    events = [moment for moment in timeline.moments if moment.kind == "event"]
    if idle := timeline.events_without_effect:
        lines.append(f"warning: {len(idle)} of {counted(len(events), 'event')} did nothing:")
        lines += [f"  {f'{moment.what} {moment.who}'.rstrip()}: {moment.detail}" for moment in idle]
    return lines


def _rounds(timeline: Timeline) -> int:
    return sum(moment.what == "round" for moment in timeline.moments)
