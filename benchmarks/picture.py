# SPDX-License-Identifier: Apache-2.0
"""A benchmark's figures as an SVG: each run a dot, above the baseline's, beside the bar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from benchmarks.figures import Figure
from console.local.picture import Axis

WIDTH = 900
_LEFT, _RIGHT = 168, 866
_TOP, _ROW_HEIGHT, _LINE_HEIGHT = 58, 150, 30

_STYLE = """
text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #3c4450 }
.title { font-size: 15px; font-weight: 600; fill: #1d232b }
.name { font-size: 13px; font-weight: 600; fill: #1d232b }
.quiet { fill: #6a7380 }
.back { fill: #ffffff }
.grid { stroke: #e3e7ec; stroke-width: 1 }
.own { fill: #2f6fb3; fill-opacity: .45 }
.base { fill: #6a7380; fill-opacity: .45 }
.own-value { stroke: #2f6fb3; stroke-width: 3 }
.base-value { stroke: #6a7380; stroke-width: 3 }
.bar { stroke: #c2562d; stroke-width: 1.5; stroke-dasharray: 5 4 }
.limit { fill: #a8431d; font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #c3cad3 }
  .title, .name { fill: #eef1f5 }
  .quiet { fill: #98a2b0 }
  .back { fill: #14181d }
  .grid { stroke: #2a313a }
  .own { fill: #5aa2ee }
  .own-value { stroke: #7db8f5 }
  .base { fill: #98a2b0 }
  .base-value { stroke: #98a2b0 }
  .bar { stroke: #e88a63 }
  .limit { fill: #f0a384 }
}
"""


class Scale:
    """An axis whose ticks may be fractions."""

    def __init__(self, largest: float) -> None:
        self._factor = 1.0
        while 0 < largest * self._factor < 8:
            self._factor *= 10
        self._axis = Axis(largest * self._factor, _LEFT, _RIGHT, 8)

    def at(self, value: float) -> float:
        """Return the horizontal position of ``value``, in pixels."""
        return self._axis.at(value * self._factor)

    def ticks(self) -> Iterator[float]:
        """Return the ticks: round numbers from 0."""
        return (tick / self._factor for tick in self._axis.ticks())


def draw_figures(title: str, figures: Sequence[Figure]) -> str:
    """Draw the figures below each other, each on a scale of its own."""
    height = _TOP + _ROW_HEIGHT * len(figures)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}" rx="6"/>',
        _text(20, 28, title, "title"),
    ]
    for row, figure in enumerate(figures):
        parts += _draw(figure, _TOP + _ROW_HEIGHT * row)
    return "\n".join([*parts, "</svg>\n"])


def _draw(figure: Figure, top: float) -> Iterator[str]:
    limit = _limit(figure)
    shown = [figure.value, *figure.runs, *figure.baseline_runs]
    shown += [number for number in (figure.baseline, limit) if number is not None]
    axis = Scale(max(shown) * 1.04)
    first, second = top + 36, top + 36 + _LINE_HEIGHT
    bottom = second + 24
    yield _text(20, top + 6, figure.name, "name")
    yield _text(_RIGHT, top + 6, _verdict(figure), "quiet" if figure.ok else "limit", "end")
    for tick in axis.ticks():
        yield _line("grid", axis.at(tick), top + 16, axis.at(tick), bottom)
        yield _text(axis.at(tick), bottom + 16, f"{tick:g}", "quiet", "middle")
    if figure.unit != "1":
        yield _text(_RIGHT, bottom + 32, figure.unit, "quiet", "end")
    yield _text(_LEFT - 14, first + 4, "muster", "", "end")
    yield from _dots("own", figure.runs, axis, first)
    yield _line("own-value", axis.at(figure.value), first - 10, axis.at(figure.value), first + 10)
    if figure.baseline is not None:
        yield _text(_LEFT - 14, second + 4, figure.baseline_name, "", "end")
        yield from _dots("base", figure.baseline_runs, axis, second)
        x = axis.at(figure.baseline)
        yield _line("base-value", x, second - 10, x, second + 10)
    if limit is not None:
        yield _line("bar", axis.at(limit), top + 16, axis.at(limit), bottom)


def _limit(figure: Figure) -> float | None:
    """Return the bar's limit on the scale of the value; None without a bar or a baseline."""
    if figure.bar is None:
        return None
    if figure.bar.what == "value":
        return figure.bar.limit
    return None if figure.baseline is None else figure.bar.limit * figure.baseline


def _verdict(figure: Figure) -> str:
    digits = ".3g" if figure.value < 1000 else ",.0f"
    words = f"{figure.value:{digits}}" + ("" if figure.unit == "1" else f" {figure.unit}")
    if figure.ratio is not None:
        words += f", {figure.ratio:.3g} × the baseline"
    if figure.bar is not None:
        words += f"; asked: {figure.bar}{'' if figure.ok else ', missed'}"
    return words


def _dots(style: str, values: Sequence[float], axis: Scale, y: float) -> Iterator[str]:
    radius = 4.5 if len(values) < 50 else 2.5
    for value in values:
        yield f'<circle class="{style}" cx="{axis.at(value):.1f}" cy="{y:.1f}" r="{radius}"/>'


def _text(x: float, y: float, text: str, style: str, anchor: str = "start") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
