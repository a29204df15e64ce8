# SPDX-License-Identifier: Apache-2.0
"""The report of one pod on its ranks in a world that changes in place: pure.

A report says what *all* local ranks have done, and of harm what one of them has seen. After a loss
they may be a step apart: the highest whole one is in it, and the rank that holds it. The step is in
it only while a change is under way: a world that trains writes nothing to the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher_shim.c10d.rounds.records import Seat
from rdzv.records.progress import RankInWorld, RankProgress
from rdzv.records.world import WorldChange, WorldReport

WHY_MAX = 120
"""The longest cause that is passed on."""


def seat_name(seat: Seat) -> str:
    """Return the name of one request for a place in reports."""
    return f"{seat.nonce}.{seat.ask}"


def report_of(
    lines: Sequence[RankProgress], seat: Seat, change: WorldChange, before: WorldReport | None
) -> WorldReport | None:
    """Return the report of the pod of ``seat``; None if it has nothing to say.

    ``lines``: what the ranks that were started for ``seat`` have published. ``change``: the newest
    that they are shown. ``before``: the last report, whose vote stays: others may have counted it.
    """
    parts = [line.in_world for line in lines if line.in_world is not None]
    if not parts or len(parts) < len(lines):
        plain = any(line.in_world is None and line.step > 0 for line in lines)
        return WorldReport(seat.member, seat=seat_name(seat), plain=True) if plain else None
    if len(parts) < max(line.local_world_size for line in lines):
        return None  # others are still on their way
    before = before if before is not None and before.seat == seat_name(seat) else None
    failed = next((one.failed for one in parts if one.failed is not None), (0, ""))
    vote, voted = _vote(parts, change, before)
    steps = {one.step for one in parts}
    step = -1 if change.phase == "train" else max(steps)
    holders = [line.local_rank for line in lines if line.in_world and line.in_world.step == step]
    held = _common(one.held for one in parts)
    return WorldReport(
        seat.member,
        ranks=len(parts),
        seat=seat_name(seat),
        torch=parts[0].torch,
        number=min(one.number for one in parts),
        epoch=min(one.epoch for one in parts),
        step=step,
        holder=min(holders, default=0),
        ready=all(one.ready for one in parts),
        vote=vote,
        voted=voted,
        held=held if len(steps) == 1 else 0,
        formed=_common(one.formed for one in parts),
        broken=max(one.broken for one in parts),
        failed=failed[0],
        why=failed[1][:WHY_MAX],
        over=any(one.over for one in parts),
    )


def _vote(
    parts: Sequence[RankInWorld], change: WorldChange, before: WorldReport | None
) -> tuple[int | None, int]:
    """Return the first boundary that no rank can have passed, and the change that asks for it.

    A rank publishes its boundary before it looks: one that is not held yet may have looked before
    it was asked to stop, and stands at its next boundary then.
    """
    if before is not None and before.voted == change.epoch:
        return before.vote, before.voted
    if change.phase != "hold" or change.step is not None:
        return None, 0
    return max(one.step + (one.held != change.epoch) for one in parts), change.epoch


def _common(numbers: Iterable[int]) -> int:
    different = set(numbers)
    return different.pop() if len(different) == 1 else 0
