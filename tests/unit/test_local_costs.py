# SPDX-License-Identifier: Apache-2.0
"""What ``muster local`` prints of a run: lines, what each event has cost, and how it ends."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from console.local import screen as ending
from console.local import session
from console.local.costs import closing_lines, facts
from console.local.launch_line import LaunchLine
from console.local.picture import draw_picture
from console.local.screen import SHOWN_TIMES, Native, Repeats, result_rows, show_result
from console.local.settings import LocalSettings
from console.local.timeline import Kind, Moment, Progress, Timeline
from rdzv.records.policy import JobPolicy
from tests.support.clocks.hand import HandClock


class Told:
    """A timeline that is told what happens, and when."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.began_s = self.clock.now_s
        self.timeline = Timeline(self.clock, lambda _: None)

    def at(self, at_s: float, what: str, who: str = "", kind: Kind = "event") -> Told:
        self.clock.now_s = self.began_s + at_s
        asked = f"{what}:{who}" if kind == "event" else ""
        self.timeline.record(kind, what, who, "done", asked=asked)
        return self

    def world(self, pid: int, size: int, *points: tuple[float, int]) -> Told:
        for at_s, step in points:
            self.timeline.worlds.see(at_s, Progress(pid, 0, size, 0, step, 0.0))
        return self

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return result_rows(self.timeline, None)


def trained(size: int = 2) -> Told:
    """One that trains until second 10."""
    return Told().world(1, size, (1, 1), (10, 90))


def killed() -> Told:
    return trained(3).at(10, "kill", "node-0")


def test_a_kill_and_a_drain_have_a_pause_and_steps() -> None:
    told = killed().world(2, 2, (24, 60), (40, 200)).at(40, "drain", "node-1")
    told.at(40.2, "released", "node-1", "membership").world(3, 1, (42, 201), (50, 300))
    assert told.rows == [
        ("kill node-0", "14.0 s pause", "31 steps again"),
        ("drain node-1", "2.0 s pause", "no step lost"),
    ]


def test_an_event_that_stops_no_world_costs_nothing() -> None:
    told = Told().world(1, 2, (1, 1), (30, 300)).at(5, "kill-sidecar", "node-0")
    assert told.rows == [("kill-sidecar node-0", "no pause", "trained on")]


def test_an_added_node_counts_with_the_world_that_it_enlarges() -> None:
    told = killed().at(11, "add", "node-3").world(2, 2, (24, 60), (30, 120))
    told.world(3, 3, (33, 121), (50, 300))
    assert [row[0] for row in told.rows] == ["kill node-0", "add node-3"]
    at_once = killed().at(11, "add", "node-3").world(2, 3, (24, 60), (30, 120))
    assert [row[0] for row in at_once.rows] == ["kill node-0, add node-3"]


def test_an_event_before_the_first_step_has_not_left_a_world_that_trained_on() -> None:
    told = Told().at(5, "kill", "node-1").world(1, 2, (20, 1), (30, 90))
    early = [("kill node-1", "", "before the first step")]
    assert told.rows == early
    told.at(30, "kill", "node-0").world(2, 1, (40, 91), (50, 200))
    assert told.rows == [*early, ("kill node-0", "10.0 s pause", "no step lost")]


@pytest.mark.parametrize(
    ("what", "who", "label"),
    [
        ("pause", "me@here", "pause"),
        ("set", "me@here", "set"),
        ("released", "node-1", "drain node-1"),
        ("admit", "node-1", "admit node-1"),
        ("outage", "", "outage"),
    ],
)
def test_what_people_and_the_store_do_is_an_event(what: str, who: str, label: str) -> None:
    told = trained().at(10, what, who, "membership").world(2, 3, (12, 91), (30, 300))
    assert told.rows == [(label, "2.0 s pause", "no step lost")]
    picture = draw_picture(told.timeline)
    assert f'>{label}<tspan class="cost" dx="6">2.0 s, no step lost</tspan></text>' in picture
    assert ">10.0 s; 300 steps in 2 worlds</text>" in picture


def test_a_change_without_an_event_is_explained_by_what_came_before_it() -> None:
    told = trained().at(10, "error", "node-1", "node").world(2, 2, (14, 51), (30, 300))
    assert told.rows == [("error node-1", "4.0 s pause", "40 steps again")]


def test_after_the_last_world_nothing_is_claimed() -> None:
    told = trained().at(10, "kill", "node-1")
    assert told.rows == [("kill node-1", "", "training did not go on")]
    assert Told().at(10, "kill", "node-1").rows == [("kill node-1", "", "cost unknown: no steps")]
    told.timeline.worlds.fault = "they begin again in each epoch"
    assert told.rows == [("kill node-1", "", "cost unknown: no steps")]
    added = trained().at(12, "add", "node-2").at(14, "closed", kind="round")
    assert added.rows == [("add node-2", "", "training did not go on")]
    added.timeline.record("round", "closed", "", "job finished")
    assert added.rows == [("add node-2", "no pause", "after the last step")]


def muster_and_torchrun(status: int) -> tuple[Told, Native]:
    told = killed().world(2, 2, (12, 91), (30, 300)).at(30, "drain", "node-1")
    told.world(3, 1, (31, 301), (40, 400)).at(40, "end", "", "end")
    # On torchrun another node hosts rank 0 then: the events are the same.
    alone = killed()
    if not status:
        alone.world(2, 2, (22, 51), (40, 300))
    alone.at(99, "end", "", "end")
    return told, Native(alone.timeline, status)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, ["12.0 s, 40 steps again", "it did not come"]),
        (1, ["the job is dead", "the job was dead by then"]),
    ],
)
def test_torchrun_alone_stands_beside_it(status: int, words: list[str]) -> None:
    told, native = muster_and_torchrun(status)
    assert [row[3] for row in result_rows(told.timeline, native)] == words
    assert 'class="native"' in draw_picture(told.timeline, native.timeline)


def printed(told: Told, native: Native | None, **screen: Any) -> str:
    output = io.StringIO()
    console = Console(file=output, color_system=None, **screen)
    show_result(console, told.timeline, native, finished=True)
    return output.getvalue()


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_a_terminal_shows_a_box_no_wider_than_itself(columns: int) -> None:
    shown = printed(*muster_and_torchrun(0), width=columns, force_terminal=True)
    lines = shown.strip().splitlines()
    assert max(map(len, lines)) <= columns
    assert (lines[0][0], lines[-1][0]) == ("\u256d", "\u2570")
    assert "40.0 s; 400 steps in 3 worlds; no step lost" in lines[0]


def test_a_pipe_gets_plain_columns() -> None:
    lines = printed(*muster_and_torchrun(0), width=80).strip().splitlines()
    assert lines[0] == "40.0 s; 400 steps in 3 worlds; no step lost"
    assert lines[1].startswith("  kill node-0    2.0 s pause   no step lost   torchrun: ")
    assert lines[1].endswith("torchrun: 12.0 s, 40 steps again")
    assert lines[3] == "torchrun alone: 99.0 s; 300 steps in 2 worlds; 40 steps trained again; done"


def test_a_run_without_events_has_no_box() -> None:
    told = trained().at(11, "end", "", "end")
    shown = printed(told, None, width=80, force_terminal=True)
    assert shown == "\n11.0 s; 90 steps in 1 world; no step lost\n"


@pytest.mark.parametrize(
    ("points", "warning"),
    [
        ([(1, 2), (9, 400)], ""),
        (
            [(1, 350), (9, 400)],
            "torchrun alone began at step 350: the script keeps checkpoints out",
        ),
        ([], "torchrun alone finished without a step: perhaps the script keeps"),
    ],
)
def test_checkpoints_elsewhere_are_warned_of(points: list[tuple[float, int]], warning: str) -> None:
    told = Told().world(1, 2, (1, 1), (10, 300)).at(11, "end", "", "end")
    alone = Told().world(1, 2, *points).at(11, "end", "", "end")
    shown = printed(told, Native(alone.timeline, 0), width=200)
    assert ("warning: " in shown) is bool(warning)
    assert warning in shown


def three_times(told: Told) -> Told:
    """A drain, and two adds that the user wrote alike."""
    told.world(1, 3, (1, 1), (10, 90)).at(10, "drain", "node-1")
    told.world(2, 2, (13, 91), (20, 150)).at(20, "add")
    told.world(3, 3, (25, 151), (40, 300)).at(40, "kill", "node-0")
    return told


def test_equal_events_are_compared_each_with_its_own() -> None:
    own = three_times(Told()).world(4, 2, (44, 290), (50, 340)).at(50, "add")
    own.world(5, 3, (55, 341), (60, 400))
    rows = result_rows(own.timeline, Native(three_times(Told()).timeline, 1))
    assert [row[-1] for row in rows] == [
        "3.0 s, no step lost",
        "5.0 s, no step lost",
        "the job is dead",
        "the job was dead by then",
    ]


def test_the_picture_has_the_end_and_the_costs_of_torchrun_alone() -> None:
    own = three_times(Told()).world(4, 2, (44, 290), (50, 340)).at(60, "end", kind="end")
    drawn = draw_picture(own.timeline, three_times(Told()).timeline, finished=True)
    assert "Muster: 340 steps in 60 s, 11 trained again. torchrun alone: dead at step 300" in drawn
    assert "the job is dead</text>" in drawn
    assert ">torchrun: 3.0 s, no step lost<" in drawn
    assert 'class="alone"' in drawn


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


def test_without_steps_a_world_is_unknown_after_a_kill(
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
def test_only_a_finished_job_has_lost_no_step(timeline: Timeline, *, finished: bool) -> None:
    a_round(timeline, 2)
    timeline.worlds.see(1.0, Progress(7, 0, 2, 0, 9, 0.0))
    timeline.record("event", "add", "", "no world of 3 ranks came", had_effect=False)
    assert facts(timeline, finished=finished).endswith("; no step lost") is finished
    _, idle = closing_lines(timeline)
    assert idle == "  add: no world of 3 ranks came"


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize("as_json", [False, True])
async def test_the_status_is_the_jobs_where_the_report_has_lost_its_directory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    as_json: bool,
) -> None:
    report = tmp_path / "removed meanwhile"

    class Run(SimpleNamespace):
        async def until_over(self) -> tuple[int, str]:
            return status, "it is over"

    @asynccontextmanager
    async def swept(run: str) -> AsyncIterator[Path]:
        yield tmp_path

    def run(*_: Any, **__: Any) -> Run:
        return Run(given_up_for=None, endings=[], last_leader=None, nodes={}, rounds=rounds)

    rounds = SimpleNamespace(last_rank_0=None)
    monkeypatch.setattr(session, "LocalRun", run)
    monkeypatch.setattr(session, "_swept", swept)
    settings = LocalSettings(
        run="r",
        namespace="local",
        job="job",
        line=LaunchLine(("torchrun", "train.py"), 1),
        nodes=1,
        policy=JobPolicy(1, 1, gather_s=2.0),
        restarts=0,
        lease_ttl_s=5,
        checkpoints=tmp_path,
        access=None,
        native=True,
    )
    screen = io.StringIO()
    places = session.Directories(tmp_path, report)
    ended = await session.run_session(
        settings, [], places, Console(file=screen, width=200), as_json=as_json
    )
    assert ended == status
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        f"muster: --report {report}: cannot be written (No such file or directory)"
    ]
    assert "report:" not in screen.getvalue()
    assert not as_json or all(map(json.loads, screen.getvalue().splitlines()))


@pytest.mark.parametrize("spoilt", ["timeline.json", "world.svg"])
def test_a_failed_write_leaves_no_half_of_a_file(tmp_path: Path, spoilt: str) -> None:
    (tmp_path / spoilt).mkdir()
    with pytest.raises(OSError, match="directory"):
        ending._replace(tmp_path / spoilt, "all of it")
    ending._replace(tmp_path / "other", "all of it")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([spoilt, "other"])
    assert (tmp_path / "other").read_text() == "all of it"
