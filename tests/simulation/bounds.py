# SPDX-License-Identifier: Apache-2.0
"""Events of who runs the job: other sizes, another gather window, a pause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rdzv.records.policy import JobPolicy
from rdzv.store import Compare, Put
from rdzv.store.memory.client import transact
from tests.simulation.nodes import KEYS
from tests.support.records import by_policy

if TYPE_CHECKING:
    from tests.simulation.story import Story

CHOICES: tuple[dict[str, Any], ...] = (
    {"sizes": (), "unit": 1},
    {"sizes": (), "unit": 2},
    {"sizes": (1, 3), "unit": 1},
    {"sizes": (2, 4), "unit": 1},
    {"sizes": (1, 2, 4), "unit": 1},
)
GATHER_S = (0.0, 5.0, 20.0, 60.0)
PAUSE_S = (0.5, 5.0, 60.0, 1200.0)


def set_sizes(story: Story) -> None:
    """Allow other sizes, of which one at least lies between min and max."""
    shape = story.job.shape
    choice = story.random.choice(CHOICES)
    sizes = JobPolicy(shape.least, shape.most, choice["sizes"], choice["unit"])
    if not sizes.fault and _set(story, f"sets {sizes.sizes_in_words}", **choice):
        story.job.sizes = sizes
        story.job.former_sizes.append(sizes)


def set_gather(story: Story) -> None:
    """Let newcomers be gathered for longer, or shorter."""
    gather_s = story.random.choice(GATHER_S)
    _set(story, f"sets a gather window of {gather_s:g} s", gather_s=gather_s)


def pause_for_a_while(story: Story) -> None:
    """Pause the job, and resume it moments or minutes later."""
    if not story.job.paused and _set(story, "pauses the job", paused=True):
        story.job.paused = True
        story.later(story.random.choice(PAUSE_S), lambda: _resume(story))


def _resume(story: Story) -> None:
    story.job.paused = not _set(story, "resumes the job", paused=False)


def _set(story: Story, what: str, **changes: Any) -> bool:
    job = story.invariants.snapshot.job
    if job is None:
        return False
    story.say(None, f"somebody {what}")
    written = Put(KEYS.job, by_policy(job, **changes).to_json())
    unchanged = Compare(KEYS.job, "mod", "=", job.mod_revision)
    return transact(story.job.engine, [unchanged], [written]).succeeded
