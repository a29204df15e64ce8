# SPDX-License-Identifier: Apache-2.0
"""What ``muster local`` prints of a run, and what it leaves out."""

from __future__ import annotations

import pytest

from console.local.costs import closing_lines, facts
from console.local.picture import draw_picture
from console.local.screen import SHOWN_TIMES, Repeats
from console.local.timeline import Moment, Progress, Timeline
from tests.support.clocks.hand import HandClock


def moment(what: str, detail: str, at_s: float = 0.0) -> Moment:
    return Moment(at_s, "round", what, "0", detail)


def shown(*moments: Moment) -> list[str]:
    repeats = Repeats()
    return [line for one in moments for line in repeats.lines(one)]


def test_a_failing_job_is_shown_a_few_times_then_counted() -> None:
    loop = [moment(what, f"{what} {n}") for n in range(40) for what in ("round", "error")]
    lines = shown(*loop, moment("end", "given up", 99.0))
    assert len(lines) == 2 * SHOWN_TIMES + 2
    assert lines[-2] == "   99.0 s  …          74 more lines like these"


def test_another_error_is_shown() -> None:
    lines = shown(*[moment("error", "boom")] * 9, moment("error", "bang"))
    assert "6 more" in lines[-2]
    assert "bang" in lines[-1]


def test_after_an_event_all_is_shown_again() -> None:
    rounds = [moment("round", "2 nodes")] * SHOWN_TIMES
    assert len(shown(*rounds, moment("kill", ""), *rounds)) == 2 * SHOWN_TIMES + 1


@pytest.fixture
def timeline(clock: HandClock) -> Timeline:
    return Timeline(clock, lambda _: None)


def a_round(timeline: Timeline, ranks: int) -> None:
    timeline.record("round", "round", "0", f"{ranks} nodes")
    timeline.record_round(ranks)


def test_of_a_script_that_tells_no_steps_the_world_is_unknown_after_a_kill(
    clock: HandClock, timeline: Timeline
) -> None:
    a_round(timeline, 3)
    clock.now_s += 10.0
    timeline.record("event", "kill", "rank7", "no such node is there", had_effect=False)
    clock.now_s += 10.0
    timeline.record("event", "kill", "node-1", "as asked for")
    clock.now_s += 10.0
    a_round(timeline, 2)
    clock.now_s += 10.0
    timeline.record("end", "end", "", "the job finished")
    picture = draw_picture(timeline)
    assert picture.count('class="unknown"') == 1 + 1, "the area and its legend"
    assert "kill node-1" in picture
    assert "rank7" not in picture
    assert "2 rounds" in facts(timeline, finished=True)
    said = "\n".join(closing_lines(timeline))
    assert "muster.report_step" in said
    assert "1 of 2 events did nothing:\n  kill rank7" in said


def test_of_one_that_tells_them_the_steps_are_counted(clock: HandClock, timeline: Timeline) -> None:
    a_round(timeline, 2)
    for at_s, pid, step in ((1.0, 7, 0), (2.0, 7, 9), (5.0, 8, 5), (6.0, 8, 30)):
        timeline.worlds.see(at_s, Progress(pid, 0, 2, 0, step, 0.0))
    timeline.record("end", "end", "", "the job finished")
    assert closing_lines(timeline) == []
    assert facts(timeline, finished=True) == (
        "0.0 s; 1 round; 30 steps in 2 worlds; 5 steps trained again"
    )


@pytest.mark.parametrize("finished", [True, False])
def test_that_no_step_is_lost_is_said_of_a_job_that_has_finished(
    timeline: Timeline, *, finished: bool
) -> None:
    a_round(timeline, 2)
    timeline.worlds.see(1.0, Progress(7, 0, 2, 0, 9, 0.0))
    timeline.record("event", "add", "", "no world of 3 ranks came", had_effect=False)
    assert facts(timeline, finished=finished).endswith("; no step lost") is finished
    _, idle = closing_lines(timeline)
    assert idle == "  add: no world of 3 ranks came"
