# SPDX-License-Identifier: Apache-2.0
"""The batches that Lightning has counted in one world, counted anew in those of another."""

from __future__ import annotations

import pytest

from muster.lightning_loops import recount


@pytest.mark.parametrize(
    ("ready", "completed", "former", "present", "expected"),
    [
        (8, 7, 4, 2, (4, 3)),  # at the end of a step, as the callback saves
        (8, 8, 4, 2, (4, 4)),
        (9, 8, 4, 2, (4, 3)),  # a checkpoint by the clock, in the middle of a step
        (3, 2, 4, 2, (0, -1)),
        (6, 6, 1, 3, (18, 18)),
    ],
)
def test_a_step_that_was_not_complete_is_none(
    ready: int, completed: int, former: int, present: int, expected: tuple[int, int]
) -> None:
    counts = {"ready": ready, "started": ready, "processed": ready, "completed": completed}
    progress = {"current": dict(counts), "total": dict(counts)}
    recount({"loops": {"fit_loop": {"epoch_loop.batch_progress": progress}}}, former, present)
    for counted in progress.values():
        assert (counted["ready"], counted["completed"]) == expected
