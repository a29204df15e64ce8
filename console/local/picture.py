# SPDX-License-Identifier: Apache-2.0
"""World size and steps over time, as an SVG that needs nothing but a viewer.

Its title is the result of the run, and each event has its cost beside it. It plays once, and stands
still for readers who prefer reduced motion. Colours follow the viewer's light or dark scheme. Text
is text, so that it can be searched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest

from console.local.costs import beside, costs, facts, interventions
from console.local.timeline import Timeline, World, again
from rdzv.sentences import counted

WIDTH = 900
_LEFT, _RIGHT = 64, 876
_LABEL_ROW, _LABEL_LINE = 17, 14
_CHARACTER = 6.9
"""Approximate width of a label's character; only to keep labels from overlapping."""

_SIZE_HEIGHT, _STEP_HEIGHT, _BETWEEN = 150, 190, 34
_PLAY_S = 12

_STYLE = """
text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #3c4450 }
.title { font-size: 15px; font-weight: 600; fill: #1d232b }
.quiet { fill: #6a7380 }
.back { fill: #ffffff }
.size { font-weight: 600; paint-order: stroke; stroke: #ffffff; stroke-width: 4 }
.grid { stroke: #e3e7ec; stroke-width: 1 }
.axis { stroke: #8d96a3; stroke-width: 1 }
.world { fill: #4c8fd6; fill-opacity: .32; stroke: none }
.unknown { fill: #8d96a3; fill-opacity: .22; stroke: #8d96a3; stroke-dasharray: 2 4 }
.top { stroke: #2f6fb3; stroke-width: 2; fill: none }
.agreed { stroke: #6a7380; stroke-width: 1.2; stroke-dasharray: 2 3; fill: none }
.step { stroke: #2f6fb3; stroke-width: 2; fill: none; stroke-linejoin: round }
.native { stroke: #98a2b0; stroke-width: 2; fill: none; stroke-linejoin: round }
.gap { stroke: #98a2b0; stroke-width: 1.2; stroke-dasharray: 3 3 }
.alone { fill: #8d96a3; fill-opacity: .28 }
.grey { fill: #6a7380; font-weight: 400 }
.dead { fill: #6a7380; font-weight: 600 }
.now { stroke: #8d96a3; stroke-width: 1.5; opacity: 0 }
.again { stroke: #c2562d; stroke-width: 1.2; stroke-dasharray: 3 3; fill: none }
.event { stroke: #c2562d; stroke-width: 1; stroke-dasharray: 4 3 }
.mark { fill: #c2562d }
.named { fill: #a8431d; font-weight: 600 }
.cost { fill: #3c4450; font-weight: 400 }
@keyframes play { from { transform: scaleX(_FROM) } }
@keyframes move { from { transform: translateX(_BACK); opacity: 1 } 99% { opacity: 1 } }
@media (prefers-reduced-motion: no-preference) {
  #played rect { animation: play _PLAYs linear both }
  .now { animation: move _PLAYs linear both }
}
@media (prefers-color-scheme: dark) {
  text { fill: #c3cad3 }
  .title { fill: #eef1f5 }
  .quiet { fill: #98a2b0 }
  .back { fill: #14181d }
  .size { stroke: #14181d }
  .grid { stroke: #2a313a }
  .axis { stroke: #6a7380 }
  .world { fill: #5aa2ee }
  .top, .step { stroke: #7db8f5 }
  .agreed { stroke: #98a2b0 }
  .again, .event { stroke: #e88a63 }
  .mark { fill: #e88a63 }
  .named { fill: #f0a384 }
  .cost { fill: #c3cad3 }
  .grey, .dead { fill: #98a2b0 }
}
"""
_STYLE = (
    _STYLE.replace("_FROM", f"{_LEFT / WIDTH:.3f}")
    .replace("_BACK", f"{_LEFT - WIDTH}px")
    .replace("_PLAY", f"{_PLAY_S}")
)


class Axis:
    """A map from values to pixels, with round numbers as labels."""

    def __init__(self, largest: float, start: float, end: float, ticks: int) -> None:
        self.step = nice_step(largest / ticks)
        self.largest = max(self.step, largest)
        self._start = start
        self._scale = (end - start) / self.largest

    def at(self, value: float) -> float:
        """Return the pixel of ``value``."""
        return self._start + value * self._scale

    def ticks(self) -> Iterator[float]:
        """Yield the round numbers from 0 to the largest value."""
        for index in range(math.floor(self.largest / self.step + 1e-9) + 1):
            yield index * self.step


def nice_step(raw: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, 50, … that is no less than ``raw``."""
    if raw <= 1:
        return 1
    power: float = 10 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class _Label:
    """An event with its name and its cost in words: here, and below it on torchrun ``alone``."""

    at_s: float
    name: str
    cost: str
    alone: str = ""

    @property
    def width(self) -> float:
        """The width of its wider line, in pixels."""
        first = len(self.name) + len(self.cost) + bool(self.cost)
        return _CHARACTER * max(first, len(self.alone)) + 12


def draw_picture(
    timeline: Timeline,
    native: Timeline | None = None,
    *,
    finished: bool = False,
    alone_finished: bool = False,
) -> str:
    """Draw a timeline as an SVG; without any progress of ranks, only its rounds.

    ``native``: the same drill on torchrun alone, drawn in grey behind the run. ``finished``,
    ``alone_finished``: as in ``facts``, of each.
    """
    worlds = timeline.worlds.all
    alone = native if native is not None and native.worlds.all and worlds else None
    behind = alone.worlds.all if alone is not None else []
    end_s = max((moment.at_s for moment in timeline.moments), default=1.0)
    end_s = max([end_s, *(world.ended_s for world in behind)])
    events = _labels(timeline, alone, alone_finished=alone_finished)
    time = Axis(max([end_s, *map(_room_for_label, events)]), _LEFT, _RIGHT, 12)
    rows = _label_rows(events, time)
    high = _LABEL_ROW + (_LABEL_LINE if any(event.alone for event in events) else 0)
    top = 52 + high * (max(rows, default=-1) + 1)
    size_bottom = top + _SIZE_HEIGHT
    bottom = size_bottom + (_BETWEEN + _STEP_HEIGHT if worlds else 0)
    height = bottom + 62
    sizes = [world.size for world in worlds] + [ranks for _, ranks in timeline.rounds]
    size = Axis(max(sizes, default=1) * 1.12, size_bottom, top, 5)
    result = _title(timeline, alone, finished=finished, alone_finished=alone_finished)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(result)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}" rx="6"/>',
        _text(20, 27, result, "title"),
        f'<clipPath id="played"><rect width="{WIDTH}" height="{height}"/></clipPath>',
    ]
    parts += _grid(time, size, "ranks", top, size_bottom)
    step_top = size_bottom + _BETWEEN
    steps = [world.last_step for world in (*worlds, *behind)]
    step = Axis(max(steps, default=1) * 1.05, bottom, step_top, 5)
    if worlds:
        parts += _grid(time, step, "step", step_top, bottom)
    parts.append('<g clip-path="url(#played)">')
    parts += _draw_events(events, rows, time, top, high, bottom)
    parts += _draw_alone(behind, time, size, size_bottom, step, finished=alone_finished)
    parts += _draw_worlds(timeline, events, time, size, size_bottom)
    parts += _draw_steps(timeline, time, step)
    parts += _draw_rounds(timeline, time, size, end_s, filled=not worlds)
    parts.append("</g>")
    parts.append(_line("now", WIDTH, top, WIDTH, bottom))
    parts += _time_labels(time, bottom)
    parts += _legend(height - 12, timeline, beside=bool(behind))
    return "\n".join([*parts, "</svg>\n"])


def _title(
    timeline: Timeline, alone: Timeline | None, *, finished: bool, alone_finished: bool
) -> str:
    if not timeline.moments:
        return "no moment of the run"
    if alone is None or timeline.worlds.fault:
        return facts(timeline, finished=finished)
    own, other = _result(timeline, finished), _result(alone, alone_finished)
    return f"Muster: {own}. torchrun alone: {other}"


def _result(timeline: Timeline, finished: bool) -> str:
    """Say in a few words what a run came to."""
    worlds = timeline.worlds
    again = worlds.steps_trained_again
    repeated = f"{again} trained again" if again else "none lost" if finished else ""
    if finished:
        took = f"{timeline.moments[-1].at_s:.0f} s"
        return f"{counted(worlds.all[-1].last_step, 'step')} in {took}, {repeated}"
    ended = f"dead at step {worlds.all[-1].last_step}"
    return ", ".join(filter(None, (repeated, ended)))


def _labels(timeline: Timeline, native: Timeline | None, *, alone_finished: bool) -> list[_Label]:
    """Return the events in order. Those of one change have its cost at the last of them."""
    words: dict[int, tuple[str, str]] = {}
    own = costs(timeline) if timeline.worlds.all else []
    others = [""] * len(own)
    if native is not None:
        others = beside(own, costs(native), finished=alone_finished)
    for one, other in zip(own, others, strict=True):
        if one.causes:  # two events may be equal in all their fields
            words[id(one.causes[-1])] = (one.short, f"torchrun: {other}" if other else "")
    return [
        _Label(event.at_s, event.label, *words.get(id(event), ("", "")))
        for event in interventions(timeline)
    ]


def _draw_alone(
    worlds: Sequence[World], time: Axis, size: Axis, bottom: float, step: Axis, *, finished: bool
) -> Iterator[str]:
    """Draw the run on torchrun alone, in grey, and its death if it did not finish."""
    for world, after in zip_longest(worlds, worlds[1:]):
        left, upper = time.at(world.began_s), size.at(world.size)
        yield _rect("alone", left, upper, time.at(world.ended_s) - left, bottom - upper)
        yield _polyline("native", world, time, step)
        x, y = time.at(world.ended_s), step.at(world.last_step)
        if after is not None:
            yield _line("gap", x, y, time.at(after.began_s), step.at(after.first_step))
        elif not finished:
            yield _text(x + 6, y + 16, "✕ torchrun alone: the job is dead", "dead")


def _draw_worlds(
    timeline: Timeline, events: Sequence[_Label], time: Axis, size: Axis, bottom: float
) -> Iterator[str]:
    worlds = timeline.worlds.all
    for world, after in zip_longest(worlds, worlds[1:]):
        left, right = (
            time.at(world.began_s),
            max(time.at(world.ended_s), time.at(world.began_s) + 1),
        )
        upper = size.at(world.size)
        yield _rect("world", left, upper, right - left, bottom - upper)
        yield _line("top", left, upper, right, upper)
        if right - left > 24:
            yield _text((left + right) / 2, upper - 6, f"{world.size}", "size", anchor="middle")
        if after is not None:
            if any(one.cost and world.began_s < one.at_s <= after.began_s for one in events):
                continue  # the label of the event says it
            pause = f"{after.began_s - world.ended_s:.1f} s"
            middle = (right + time.at(after.began_s)) / 2
            yield _text(middle, bottom - 6, pause, "quiet", anchor="middle")
            steps = again(world, after)
            words = f"{counted(steps, 'step')} again"
            if steps > 0 and not timeline.worlds.fault:
                wide = time.at(after.began_s) - right > _CHARACTER * len(words)
                shown = words if wide else f"-{steps}"
                yield _text(middle, bottom - 22, shown, "named", anchor="middle")


def _draw_steps(timeline: Timeline, time: Axis, step: Axis) -> Iterator[str]:
    worlds = timeline.worlds.all
    for world, after in zip_longest(worlds, worlds[1:]):
        yield _polyline("step", world, time, step)
        if after is not None:
            yield _line(
                "again",
                time.at(world.ended_s),
                step.at(world.last_step),
                time.at(after.began_s),
                step.at(after.first_step),
            )


def _polyline(style: str, world: World, time: Axis, step: Axis) -> str:
    points = " ".join(f"{time.at(at_s):.1f},{step.at(number):.1f}" for at_s, number in world.points)
    return f'<polyline class="{style}" points="{points}"/>'


def _draw_rounds(
    timeline: Timeline, time: Axis, size: Axis, end_s: float, *, filled: bool
) -> Iterator[str]:
    rounds = timeline.rounds
    ends_s = [*(at_s for at_s, _ in rounds[1:]), end_s][: len(rounds)]
    for (begin_s, ranks), after_s in zip(rounds, ends_s, strict=True):
        if not ranks:
            continue
        left, right, upper = time.at(begin_s), time.at(after_s), size.at(ranks)
        if filled:
            trusted = time.at(timeline.trusted_until(begin_s, after_s))
            yield _rect("world", left, upper, trusted - left, size.at(0) - upper)
            if trusted < right:
                yield _rect("unknown", trusted, upper, right - trusted, size.at(0) - upper)
            yield _text((left + trusted) / 2, upper - 6, f"{ranks}", "size", anchor="middle")
        yield _line("agreed", left, upper, right, upper)


def _room_for_label(event: _Label) -> float:
    """Return the end of the time axis at which the event's label fits to the right of its line."""
    span = _RIGHT - _LEFT
    return event.at_s * span / (span - event.width)


def _label_rows(events: Sequence[_Label], time: Axis) -> list[int]:
    """Return the row of each event's label; row 0 is next to the plot.

    A label stands above those of the later events whose lines it would cross.
    """
    rows: list[int] = []
    for index in reversed(range(len(events))):
        end = time.at(events[index].at_s) + events[index].width
        crossed = [
            row
            for later, row in zip(events[index + 1 :], rows, strict=True)
            if time.at(later.at_s) <= end
        ]
        rows.insert(0, max(crossed, default=-1) + 1)
    return rows


def _draw_events(
    events: Sequence[_Label], rows: Sequence[int], time: Axis, top: float, high: int, bottom: float
) -> Iterator[str]:
    for event, row in zip(events, rows, strict=True):
        x = time.at(event.at_s)
        y = top - 8 - high * row - (high - _LABEL_ROW)
        yield _line("event", x, y - 9, x, bottom)
        cost = f'<tspan class="cost" dx="6">{escape(event.cost)}</tspan>' if event.cost else ""
        yield f'<text class="named" x="{x + 4:.1f}" y="{y:.1f}">{escape(event.name)}{cost}</text>'
        if event.alone:
            yield _text(x + 4, y + _LABEL_LINE, event.alone, "grey")


def _grid(time: Axis, axis: Axis, unit: str, top: float, bottom: float) -> Iterator[str]:
    for value in time.ticks():
        yield _line("grid", time.at(value), top, time.at(value), bottom)
    for value in axis.ticks():
        y = axis.at(value)
        yield _line("axis" if value == 0 else "grid", _LEFT, y, _RIGHT, y)
        yield _text(_LEFT - 8, y + 4, f"{value:g}", "quiet", anchor="end")
    middle = (top + bottom) / 2
    yield (
        f'<text class="quiet" transform="translate(18 {middle:.1f}) rotate(-90)" '
        f'text-anchor="middle">{unit}</text>'
    )


def _time_labels(time: Axis, bottom: float) -> Iterator[str]:
    for value in time.ticks():
        yield _text(time.at(value), bottom + 18, f"{value:g}", "quiet", anchor="middle")
    yield _text(_RIGHT, bottom + 34, "seconds since the start", "quiet", anchor="end")


def _legend(y: float, timeline: Timeline, *, beside: bool) -> Iterator[str]:
    entries = []
    if timeline.worlds.all:
        entries.append(("top", "training, and pauses"))
    if beside:
        entries.append(("native", "torchrun alone"))
    if timeline.rounds:
        entries.append(("agreed", "agreed by the rendezvous"))
    if len(timeline.worlds.all) > 1:
        entries.append(("again", "back to a save"))
    if timeline.rounds and not timeline.worlds.all:
        entries.append(("unknown", "grey: unknown, no step was found"))
    x = float(_LEFT)
    for style, label in [*entries, ("event", "event")]:
        yield _line(style, x, y - 4, x + 22, y - 4)
        yield _text(x + 28, y, label, "quiet")
        x += 28 + _CHARACTER * len(label) + 26


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _rect(style: str, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" '
        f'width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"/>'
    )
