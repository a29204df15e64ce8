# SPDX-License-Identifier: Apache-2.0
"""A store that refuses writes for a while, as etcd over its quota (NOSPACE): in every phase.

Reads, watches, renewals, expiries and deletions go on. What refuses everybody's writes refuses new
leases, too: a sidecar that starts again meanwhile gets none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.departures import drain_patiently, notice, notice_and_cancel
from tests.simulation.launchers import die, end_torchrun
from tests.simulation.outages import crash, crash_briefly, cut_one_for_long, freeze, stall, tear

if TYPE_CHECKING:
    from tests.simulation.plot import Event
    from tests.simulation.story import Story

REFUSED_S = (10.0, 60.0, 600.0)
"""For how long at most writes are refused."""

LONG_S = 90.0
"""For so long at least where ranks would stand still in the midst of a save."""

LOOK_S = 0.05
"""How often the phase of the save is looked at."""

WRITES = (0, 0, 1, 2, 3, 5, 8)
"""How many still land: what comes after may be any transaction of a join, a drain, a start."""

MOST_PODS = 5

MEANWHILE_S = 40.0
"""How often something else happens meanwhile, on average."""


def join(story: Story) -> None:
    """Let one more pod come, of a name that nobody has."""
    free = [name for name in "abcdefgh" if name not in story.job.pods]
    if free and len(story.job.present()) < MOST_PODS:
        story.come(free[0])


TO_SIDECARS: Sequence[Event] = (join, crash_briefly, crash_briefly, tear, stall)
"""What a world that has formed outlives."""
TO_PODS: Sequence[Event] = (join, crash, end_torchrun, notice, notice_and_cancel, die)


def refuse_writes(story: Story) -> None:
    """Refuse everybody's writes for a while, in which more may happen."""
    others = story.random.choice((TO_SIDECARS, TO_PODS))
    _refuse_writes(story, story.random.choice(WRITES), others)


def refuse_writes_amid_save(story: Story) -> None:
    """Let one more pod come, or drain one with minutes to spare; refuse writes in what follows."""
    story.random.choice((join, drain_patiently))(story)
    phase = story.random.choice(("hold", "commit", "done"))
    writes = story.random.choice((0, 0, 1, 2, 3))
    _look(story, phase, writes, story.job.loop.time() + LONG_S)


def _look(story: Story, phase: str, writes: int, until_s: float) -> None:
    commit = story.invariants.snapshot.commit
    if commit is not None and commit.phase == phase:
        _refuse_writes(story, writes, (crash_briefly, tear), at_least_s=LONG_S)
    elif story.job.loop.time() < until_s:
        story.later(LOOK_S, lambda: _look(story, phase, writes, until_s))


def refuse_writes_in_peace(story: Story) -> None:
    """Refuse everybody's writes for a while in which nothing happens that may cost a world."""
    _refuse_writes(story, 0, (crash_briefly, tear, stall))


def refuse_writes_and_cut(story: Story) -> None:
    """Refuse everybody's writes for a while, in which leases end whose ranks train on."""
    _refuse_writes(story, 0, (cut_one_for_long, freeze, crash))


def _refuse_writes(
    story: Story, writes: int, events: Sequence[Event], at_least_s: float = 1.0
) -> None:
    engine = story.job.engine
    if engine.full:
        return
    seconds = at_least_s - 1.0 + story.random.uniform(1.0, story.random.choice(REFUSED_S))
    story.say(None, f"the store takes {writes} more writes, and then none for {seconds:.1f} s")
    engine.fill(writes)
    for _ in range(round(story.random.uniform(0.0, 2.0 * seconds / MEANWHILE_S))):
        event = partial(story.tell, story.random.choice(events))
        story.later(story.random.uniform(0.0, seconds), event)
    story.later(seconds, lambda: _make_room(story))


def _make_room(story: Story) -> None:
    story.say(None, "the store takes writes again")
    story.job.engine.make_room()
