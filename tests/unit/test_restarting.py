# SPDX-License-Identifier: Apache-2.0
"""Whether a torchrun that has ended is started again, and how its steps are counted."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.sidecar import Config
from agent.config.table import settings_of
from launcher_shim.pod.ranks import RESTART_STEPS, Ended, restart_steps, starts_again
from launcher_shim.rundir.rank_reports import StepCount, StepLine, count_from, read_steps
from muster.progress import ProgressFile

TERM, USR1, HUP = signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP


@pytest.mark.parametrize(
    ("ended", "least", "again"),
    [
        (Ended(1, 200), 200, True),
        (Ended(1, 199), 200, False),
        (Ended(1, 0), 1, False),
        (Ended(1, None), 200, False),
        (Ended(0, 1000), 200, False),
        (Ended(2, None), 200, False),
        (Ended(137, 1000), 200, True),
        (Ended(1, 1000), 0, False),
        (Ended(1, 1000, drained=True), 200, False),
        (Ended(1, 1000, frozenset({TERM})), 200, False),
        (Ended(1, 1000, frozenset({HUP})), 200, False),
        (Ended(1, 1000, frozenset({USR1})), 200, True),
        (Ended(128 + USR1, 1000, frozenset({USR1})), 200, False),
        (Ended(128 + USR1, 1000), 200, True),
    ],
)
def test_only_one_that_ended_by_itself_after_progress_is_started_again(
    ended: Ended, least: int, again: bool
) -> None:
    decided, sentence = starts_again(ended, least)
    assert decided == again
    assert (f"after {ended.steps} steps" in sentence) or not again


@given(st.integers(0, 255), st.none() | st.integers(0, 10**6), st.integers(0, 10**6))
def test_without_progress_its_status_is_the_last_word(
    status: int, steps: int | None, least: int
) -> None:
    again, _ = starts_again(Ended(status, steps), least)
    assert again == (status != 0 and steps is not None and 0 < least <= steps)


@pytest.mark.parametrize("text", ["", "0", " 50 ", "999999999"])
def test_the_number_of_steps_is_read_as_the_sidecar_reads_it(text: str) -> None:
    setting = settings_of(Config)["restart_steps"]
    assert setting.variable == RESTART_STEPS
    assert restart_steps({RESTART_STEPS: text}) == setting.parse(text or str(setting.default))


@pytest.mark.parametrize("text", ["-1", "many", "1.5", "1" * 10])
def test_a_number_of_steps_that_is_none_is_said(text: str) -> None:
    with pytest.raises(ValueError, match=f"{RESTART_STEPS} is .*: give a number of steps"):
        restart_steps({RESTART_STEPS: text})


# --- how many steps ---


def line(pid: int, first: int | None, step: int) -> StepLine:
    return StepLine((pid, 7), first, step)


FORMER = (line(1, 1, 900), line(2, -1, -1))


@pytest.mark.parametrize(
    ("looks", "made"),
    [
        ([], None),
        ([FORMER], None),
        ([[line(3, -1, -1)]], 0),
        ([[line(3, 1, 1)]], 0),
        ([[line(3, 1, 150)], [line(4, 1, 120)]], 149),
        ([[line(3, 1, 150)], [line(4, 101, 250)]], 249),
        ([[line(3, 5001, 5300)]], 299),
        ([[line(3, 1, 40), line(4, 1, 41)]], 40),
        ([[line(3, None, 10)], [line(3, None, 30)]], 20),
        ([[line(1, 1, 950)]], 50),
        ([[line(2, 31, 40)]], 9),
    ],
    ids=[
        "nothing",
        "what lay there",
        "entered",
        "the first step",
        "counts from 0 each time",
        "goes on from a checkpoint",
        "began at a checkpoint",
        "two ranks",
        "an older library",
        "a rank that was there before",
        "a rank that had entered before",
    ],
)
def test_steps_are_counted_from_the_first_that_its_own_ranks_tell(
    looks: list[list[StepLine]], made: int | None
) -> None:
    count = count_from(FORMER)
    for lines in looks:
        count = count.seen(lines)
    assert count.made == made


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=12),
    st.integers(1, 20),
)
def test_what_a_job_has_gained_is_counted_whatever_it_repeats(
    lives: list[tuple[int, int]], every: int
) -> None:
    """Each life of the workers goes on from some checkpoint, and is seen at its end at least."""
    count, saved, highest = StepCount({}), 0, 0
    for pid, (steps, back) in enumerate(lives):
        begin = max(0, saved - back) + 1
        for step in range(begin, begin + steps, every):
            count = count.seen([line(pid, begin, step)])
        highest = max(highest, begin + steps - 1)
        count = count.seen([line(pid, begin, begin + steps - 1)])
        saved = highest
    assert count.made == highest - 1


def test_the_lines_of_the_library_are_counted(tmp_path: Path) -> None:
    ProgressFile(str(tmp_path), {"LOCAL_RANK": "1"}).write(4)
    before = count_from(read_steps(tmp_path))
    file = ProgressFile(str(tmp_path), {})
    file.write(-1)
    (tmp_path / "2.json").write_bytes(b"{}\n")
    assert [(one.first, one.step) for one in read_steps(tmp_path)] == [(-1, -1), (4, 4)]
    file.write(31)
    file.write(40)
    (own, _) = read_steps(tmp_path)
    assert (own.first, own.step) == (31, 40)
    assert before.seen([own]).highest == 40
