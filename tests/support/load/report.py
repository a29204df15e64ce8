# SPDX-License-Identifier: Apache-2.0
"""The curves of ``test_store_bounds`` as a page with a picture."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.support.load.bounds import Sample

WIDTH, PANEL_HEIGHT, LEFT, TOP, BOTTOM, GAP = 760, 150, 70, 40, 36, 56
INK, GRID, IN_USE, ON_DISK, KEYS = "#334155", "#e2e8f0", "#2563eb", "#94a3b8", "#d97706"


def write_report(
    directory: Path, curves: Mapping[str, Sequence[Sample]], rest: Mapping[str, Sample]
) -> None:
    """Write ``store-bounds.md`` and ``store-bounds.svg`` into ``directory``.

    ``rest``: the store after each curve, with everything compacted.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "store-bounds.svg").write_text(draw(curves))
    (directory / "store-bounds.md").write_text("".join(_page(curves, rest)))


def _page(curves: Mapping[str, Sequence[Sample]], rest: Mapping[str, Sample]) -> Iterator[str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    yield "# What a long life leaves in the store\n\n"
    yield (
        "One real etcd 3.6.16 that compacts every 5 s (a job's would once an hour), real"
        " registrars, endpoints and sweepers.\n`tests/chaos/test_store_bounds.py` made this page:"
        " `pytest -m long` with `MUSTER_TEST_REPORT=docs`.\n\n"
    )
    made = datetime.now(UTC).date().isoformat()
    machine = f"{platform.machine()}, Linux {platform.release()}"
    yield f"{made}, commit {commit or 'unknown'}, {machine}.\n\n"
    yield "![Size of the store over changes, rounds and renewals](store-bounds.svg)\n\n"
    yield (
        "Between two compactions the database grows by what is written meanwhile, so it stands the"
        " higher the faster this load ran, which shared its machine.\nThe measure is what is left"
        " when everything is compacted, and the number of keys.\n\n"
    )
    yield "| after | keys | bytes in values | db in use | db on disk | revision |\n"
    yield "|---|---|---|---|---|---|\n"
    for name, samples in curves.items():
        for share in (0.1, 0.25, 0.5, 0.75, 1.0):
            one = samples[max(0, round(share * len(samples)) - 1)]
            yield _row(f"{one.done:,} {name}", one)
        yield _row("the same, compacted", rest[name])


def _row(after: str, one: Sample) -> str:
    return (
        f"| {after} | {one.keys} | {one.value_bytes:,} | {one.in_use / 1e6:.2f} MB"
        f" | {one.on_disk / 1e6:.2f} MB | {one.revision:,} |\n"
    )


def draw(curves: Mapping[str, Sequence[Sample]]) -> str:
    """Draw a panel for each curve: size in use and on disk, and the number of keys."""
    height = TOP + len(curves) * (PANEL_HEIGHT + GAP) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        f' viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_legend(),
    ]
    for at, (name, samples) in enumerate(curves.items()):
        parts += _panel(name, samples, TOP + at * (PANEL_HEIGHT + GAP) + 24)
    return "\n".join([*parts, "</svg>\n"])


def _legend() -> Iterator[str]:
    entries = ((IN_USE, "db in use, MB"), (ON_DISK, "db on disk, MB"), (KEYS, "keys"))
    for at, (color, text) in enumerate(entries):
        x = LEFT + 170 * at
        yield f'<rect x="{x}" y="16" width="18" height="4" fill="{color}"/>'
        yield f'<text x="{x + 24}" y="22">{text}</text>'


def _panel(name: str, samples: Sequence[Sample], top: float) -> Iterator[str]:
    right, bottom = WIDTH - 60, top + PANEL_HEIGHT
    last = samples[-1].done
    sizes = _ceiling(max(sample.on_disk for sample in samples) / 1e6)
    keys = _ceiling(max(sample.keys for sample in samples))
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * PANEL_HEIGHT
        yield f'<line x1="{LEFT}" y1="{y}" x2="{right}" y2="{y}" stroke="{GRID}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{share * sizes:g}</text>'
        yield f'<text x="{right + 8}" y="{y + 4}" fill="{KEYS}">{share * keys:g}</text>'
        x = LEFT + share * (right - LEFT)
        yield (f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{share * last:,.0f}</text>')
    yield f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{last:,} {name}</text>'
    drawn: tuple[tuple[str, Callable[[Sample], float]], ...] = (
        (ON_DISK, lambda sample: sample.on_disk / 1e6 / sizes),
        (IN_USE, lambda sample: sample.in_use / 1e6 / sizes),
        (KEYS, lambda sample: sample.keys / keys),
    )
    for color, height in drawn:
        points = " ".join(
            f"{LEFT + one.done / last * (right - LEFT):.1f},"
            f"{bottom - height(one) * PANEL_HEIGHT:.1f}"
            for one in sorted(samples, key=lambda one: one.done)
        )
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8"/>'


def _ceiling(value: float) -> float:
    """Round up to a number that reads well."""
    step = 10.0 ** (len(f"{int(value)}") - 1)
    return next(step * factor for factor in (1, 2, 4, 5, 8, 10) if step * factor >= value)
