# SPDX-License-Identifier: Apache-2.0
"""The words of one pod on a world that changes in place: its report, and its ranks' file. Pure.

A report says what *all* local ranks have done, and of harm what one of them has seen. After a loss
they may be a step apart: the highest whole one is in it, and the rank that holds it. The step is in
it only while a change is under way: a world that trains writes nothing to the store.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from launcher_shim.c10d.rounds.records import Seat
from rdzv.keys import RunKeys
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


def root_of(keys: RunKeys) -> str:
    """Return the start of the keys by which the ranks of a run's worlds meet.

    Worlds of two runs may have the same number.
    """
    return f"muster.world/{keys.name}/"


def prefix_of(root: str, number: int) -> str:
    """Return the start of those of world ``number``."""
    return f"{root}{number}/"


def shown(
    change: WorldChange,
    world: int,
    members: Sequence[str],
    member: str,
    *,
    was_in: bool,
    own_round: bool,
    closed: bool,
    store: str,
    root: str,
) -> bytes:
    """Return the content of the file of ``member``'s pod.

    ``world`` and ``members`` are those of the world that has formed. ``was_in``: whether the ranks
    of the pod were in a world. ``own_round``: whether their torchrun is in a round of its own, so
    that they cannot train in the world that it believes to have started. ``closed``: whether the
    run has ended well. ``store``: the address at which its ranks reach the sidecar; ``root``: as of
    ``root_of``.
    """
    fields: dict[str, object] = {
        "epoch": change.epoch,
        "phase": "idle",
        "number": world or -1,
        "step": None,
        "why": change.reason,
    }
    if closed and member not in members:
        fields["phase"] = "over"
    elif change.phase == "form" and member in change.seats:
        place = change.seats.index(member)
        fields |= {
            "phase": "form",
            "number": change.number,
            "step": change.step,
            "size": sum(change.sizes),
            "first_rank": change.first_rank(member),
            "source": change.first_rank(change.source) + change.holder,
            "store": store,
            "prefix": prefix_of(root, change.number),
            "seats": change.seats,
            "local_size": change.sizes[place],
        }
    elif change.phase == "broken":
        # Also to newcomers: they may have been asked to form the world that failed.
        fields |= {"phase": "broken", "number": change.number}
    elif change.phase == "fall-back":
        fields |= {"phase": "fall-back", "number": change.number if own_round else -1}
    elif member in members:
        # One that leaves stays held while the others form the next world.
        fields |= {"phase": change.phase, "step": change.step}
        if change.phase == "form":
            fields["phase"] = "hold"
    elif was_in and world:
        fields["phase"] = "leave"
    return json.dumps(fields).encode()


IDLE = shown(
    WorldChange(), 0, (), "", was_in=False, own_round=False, closed=False, store="", root=""
)
"""The content before any change: by it a script knows that the sidecar beside it knows worlds."""
