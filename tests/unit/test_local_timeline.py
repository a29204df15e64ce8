# SPDX-License-Identifier: Apache-2.0
"""The timeline of a run, its worlds from progress files, what the store adds, and the picture."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.local.job_in_store import Outages, RoundFollower
from console.local.payload import Closing
from console.local.picture import WIDTH, Axis, draw_picture
from console.local.timeline import (
    MAX_POINTS,
    Moment,
    Progress,
    Timeline,
    World,
    Worlds,
    newest_rank_0,
    read_progress,
)
from launcher_shim.c10d.rounds.records import ClosedWhy, Round, Seat
from muster.progress import ProgressFile
from rdzv.keys import JobKeys
from rdzv.records.job import HistoryEntry
from rdzv.store import KeyValue, WatchEvent
from tests.support.clocks.hand import HandClock

KEYS = JobKeys("local", "digits")
ROUND = KEYS.in_generation(1).run("digits").round
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def told() -> list[Moment]:
    return []


@pytest.fixture
def timeline(clock: HandClock, told: list[Moment]) -> Timeline:
    return Timeline(clock, told.append)


def put(key: str, value: bytes) -> WatchEvent:
    return WatchEvent("put", KeyValue(key, value, 1, 1, 1, 0))


def formed(number: int, *members: str, closed: ClosedWhy = "") -> WatchEvent:
    frozen = tuple(Seat(member, "nonce", 1) for member in members)
    round_ = Round(number, True, closed, frozen=frozen)
    return put(ROUND, round_.to_json())


def test_a_world_that_loads_for_long_says_so_once_a_round(
    clock: HandClock, told: list[Moment], timeline: Timeline
) -> None:
    rounds = RoundFollower(KEYS, "digits", 2, timeline)

    def loading(last_step_s: float, *events: WatchEvent) -> list[str]:
        """The lines of a round that forms, and makes no step for a minute."""
        told.clear()
        rounds.take_in(events)
        for _ in range(60):
            rounds.note_loading(last_step_s)
            clock.now_s += 1
        return [f"{one.what} {one.who} {one.detail}" for one in told if one.what == "loading"]

    said = "loads: no step since it formed 5 s ago"
    assert loading(0.0) == []
    assert loading(0.0, formed(0, "node-0")) == [f"loading 0 a world of 2 ranks {said}"]
    assert loading(0.0, formed(1, "node-0")) == [], "a script that reports no steps"
    again = formed(2, "node-0", "node-1")
    assert loading(30.0, again) == [f"loading 2 a world of 4 ranks {said}"]
    assert loading(timeline.now_s(), formed(3, "node-0")) == [], "it steps"
    assert loading(30.0, formed(4, "node-0", closed="success")) == []


def test_moments_are_told_as_they_happen_and_kept(
    clock: HandClock, told: list[Moment], timeline: Timeline
) -> None:
    timeline.record("node", "launched", "node-0", "torchrun is 7")
    clock.now_s += 12.34
    timeline.record("event", "kill", "node-0", "it hosts rank 0")
    assert [str(moment) for moment in told] == [
        "    0.0 s  launched   node-0    torchrun is 7",
        "   12.3 s  kill       node-0    it hosts rank 0",
    ]
    assert timeline.moments == told
    timeline.worlds.see(3.0, Progress(1, 0, 2, 0, 5, 0.0))
    report = timeline.to_json(("torchrun", "train.py"), 0)
    assert json.loads(json.dumps(report))["worlds"] == [{"size": 2, "points": [[3.0, 5]]}]


def test_rounds_and_history_come_from_the_store(timeline: Timeline, told: list[Moment]) -> None:
    rounds = RoundFollower(KEYS, "digits", 2, timeline)
    entry = HistoryEntry("join", "node-0", "it registered", 0.0)
    rounds.take_in([put(KEYS.history_entry(1, "node-0", entry.what), entry.to_json())])
    rounds.take_in([formed(0, "node-1", "node-0"), formed(0, "node-1", "node-0")])
    assert rounds.nodes == ("node-1", "node-0")
    rounds.take_in([put(ROUND, Round(1).to_json())])
    assert not rounds.nodes
    rounds.take_in([formed(1, "node-0"), put(KEYS.job, b"{}")])
    assert rounds.closing is None
    rounds.take_in([formed(1, "node-0", closed="success")])
    assert rounds.closing == Closing(True, frozenset({"node-0"}))
    assert [(moment.what, moment.who, moment.detail) for moment in told] == [
        ("join", "node-0", "it registered"),
        ("round", "0", "2 nodes, 4 ranks: node-1, node-0"),
        ("round", "1", "1 node, 2 ranks: node-0"),
        ("closed", "", "job finished"),
    ]
    assert [ranks for _, ranks in timeline.rounds] == [4, 0, 2, 0]


def test_a_failure_counts_until_a_world_has_formed_again(timeline: Timeline) -> None:
    rounds = RoundFollower(KEYS, "digits", 1, timeline)
    rounds.take_in([formed(0, "node-0", "node-1"), formed(0, "node-0", "node-1", closed="failure")])
    failure = Closing(False, frozenset({"node-0", "node-1"}))
    assert rounds.closing == failure
    rounds.take_in([put(ROUND, Round(1).to_json())])
    assert rounds.closing == failure
    rounds.take_in([formed(1, "node-1", "node-2")])
    assert rounds.closing is None


def test_a_corrupt_record_is_shown_and_ends_nothing(timeline: Timeline, told: list[Moment]) -> None:
    rounds = RoundFollower(KEYS, "digits", 1, timeline)
    rounds.take_in([put(ROUND, b"\xff"), put(KEYS.history_entry(1, "x", "join"), b"[]")])
    rounds.take_in([put(KEYS.in_generation(1).run("another").round, b"not ours")])
    assert [moment.what for moment in told] == ["corrupt", "corrupt"]


def drawn(timeline: Timeline) -> ElementTree.Element:
    return ElementTree.fromstring(draw_picture(timeline))


def classes(picture: ElementTree.Element) -> list[str]:
    return [element.get("class", "") for element in picture.iter()]


def test_the_picture_of_a_run(clock: HandClock, timeline: Timeline) -> None:
    for pid, size, first_s in ((1, 2, 10.0), (2, 4, 40.0)):
        for index in range(50):
            timeline.worlds.see(first_s + index / 2, Progress(pid, 0, size, 0, index, 0.0))
    timeline.record("event", "kill", "node-<0>", "as asked for")
    clock.now_s += 70
    timeline.record("end", "end", "", "the job finished")
    picture = drawn(timeline)
    assert classes(picture).count("world") == 2
    assert classes(picture).count("step") == 2
    texts = [element.text for element in picture.iter(f"{SVG}text")]
    assert {"ranks", "step", "kill node-<0>", "seconds since the start", "5.5 s"} <= set(texts)


def test_without_progress_the_picture_has_rounds(clock: HandClock, timeline: Timeline) -> None:
    timeline.record_round(2)
    clock.now_s += 10
    timeline.record_round(0)
    clock.now_s += 5
    timeline.record_round(3)
    clock.now_s += 10
    timeline.record("end", "end", "", "the job finished")
    picture = drawn(timeline)
    assert classes(picture).count("world") == 2
    assert "step" not in classes(picture)


def test_an_empty_run_has_a_picture_too(timeline: Timeline) -> None:
    assert drawn(timeline).get("width") == str(WIDTH)


@given(st.lists(st.floats(0, 600), max_size=12))
def test_labels_of_events_cross_neither_each_other_nor_a_line(times_s: list[float]) -> None:
    clock = HandClock()
    timeline, began_s = Timeline(clock, lambda _: None), clock.now_s
    for at_s in sorted(times_s):
        clock.now_s = began_s + at_s
        timeline.record("event", "kill", "node-1", "as asked for")
    elements = list(drawn(timeline).iter())
    lines = [e for e in elements if e.get("class") == "event"][: len(times_s)]
    labels = [e for e in elements if e.get("class") == "named"]
    assert len(lines) == len(labels) == len(times_s)
    for label in labels:
        left, y = float(label.get("x", "")), float(label.get("y", ""))
        right = left + 6.5 * len("kill node-1")
        assert right <= WIDTH
        for line in lines:
            x, top = float(line.get("x1", "")), float(line.get("y1", ""))
            assert not (left < x < right and top < y - 1), "a line crosses a label"
        for other in labels:
            beside = float(other.get("x", ""))
            assert other is label or other.get("y") != label.get("y") or abs(beside - left) > 70


@given(st.floats(0.001, 1e9), st.integers(1, 12))
def test_an_axis_has_few_round_ticks_up_to_the_largest_value(largest: float, ticks: int) -> None:
    axis = Axis(largest, 0, 100, ticks)
    values = list(axis.ticks())
    assert len(values) <= ticks + 1
    assert values[0] == 0
    assert axis.at(largest) <= 100 + 1e-6
    assert f"{axis.step:g}".strip("0").strip(".")[:1] in "125"


@pytest.mark.parametrize(
    ("details", "sentence"),
    [
        ({"outcome": "committed", "step": 7}, "committed at step 7: spot"),
        ({"outcome": "expired"}, "expired: it ran out of time before all ranks had saved (spot)"),
        ({"outcome": "uncommitted"}, "uncommitted: there was nothing to save, or a rank takes no"),
    ],
)
def test_the_end_of_a_drain_says_what_was_saved(
    told: list[Moment], timeline: Timeline, details: dict[str, object], sentence: str
) -> None:
    entry = HistoryEntry("drain", "node-1", "spot", 1.0, details)
    key = KEYS.history_entry(5, "node-1", "drain")
    RoundFollower(KEYS, "digits", 1, timeline).take_in([put(key, entry.to_json())])
    assert (told[0].what, told[0].who) == ("released", "node-1")
    assert told[0].detail.startswith(sentence)


def test_an_outage_of_the_store_and_its_end_are_told_once() -> None:
    outages = Outages()
    seen = [outages.see(at_s, why) for at_s, why in ((1, ""), (2, "refused"), (3, "silent"))]
    assert seen == [
        None,
        ("outage", "the store does not answer (refused); worlds that have formed train on"),
        None,
    ]
    assert outages.see(40, "") == ("back", "the store answers again after 38 s")
    assert outages.see(41, "") is None


def at(step: int, pid: int = 1, size: int = 2) -> Progress:
    return Progress(pid, 0, size, 0, step, 0.0)


def test_a_world_is_told_from_the_next_by_its_rank_0() -> None:
    worlds = Worlds()
    assert worlds.see(10.0, at(1)) == "first step: 1 in a world of 2"
    assert worlds.see(11.0, at(20)) is None
    assert worlds.see(18.5, at(13, pid=2, size=4)) == (
        "trains again at step 13 in a world of 4 after 7.5 s, 8 steps are trained again"
    )
    assert worlds.see(20.0, at(40, pid=2, size=4)) is None
    assert worlds.see(21.0, at(41, pid=3)) == (
        "trains again at step 41 in a world of 2 after 1.0 s, no step is lost"
    )
    assert worlds.see(22.0, at(42, pid=2, size=4)) is None, "the rank 0 of a former world lingers"
    again = worlds.see(23.0, at(43, pid=3, size=3))
    assert again is not None, "as a central launcher's goes on in a world of another size"
    assert [(world.size, world.points) for world in worlds.all] == [
        (2, [(10.0, 1), (11.0, 20)]),
        (4, [(18.5, 13), (20.0, 40)]),
        (2, [(21.0, 41)]),
        (3, [(23.0, 43)]),
    ]


def test_a_world_that_changes_in_place_is_said_to_and_repeats_no_step() -> None:
    worlds = Worlds()

    def see(
        at_s: float, pid: int, size: int, step: int, number: int, master: str = "m:1"
    ) -> object:
        one = Progress(pid, 0, size, 0, step, 0.0, master=master, world=number)
        return worlds.see(at_s, one)

    assert see(1.0, 7, 2, 0, 0) == "first step: 0 in a world of 2"
    assert see(1.2, 7, 2, 1, 1) is None  # it has formed
    assert see(5.0, 7, 2, 40, 1) is None
    joined = "trains again at step 40 in a world of 3 after 0.2 s, no step is lost, in place"
    assert see(5.2, 7, 3, 40, 2) == joined
    see(9.0, 7, 3, 80, 2)
    # Rank 0 alone had made step 80.
    lost = "trains again at step 79 in a world of 2 after 0.5 s, 1 step is trained again, in place"
    assert see(9.5, 8, 2, 79, 3) == lost
    see(12.0, 8, 2, 99, 3)
    swapped = "trains again at step 99 in a world of 2 after 0.1 s, no step is lost, in place"
    assert see(12.1, 8, 2, 99, 4) == swapped
    see(14.0, 8, 2, 120, 0)  # it falls back
    restarted = "trains again at step 121 in a world of 3 after 6.0 s, no step is lost"
    assert see(20.0, 9, 3, 121, 5, "m:2") == restarted
    assert len(worlds.all) == 5


def test_the_first_world_of_a_size_from_one_on() -> None:
    worlds = Worlds()
    for pid, size in enumerate((2, 3, 2)):
        worlds.see(float(pid), at(1, pid=pid, size=size))
    assert [worlds.first_of(2, start) for start in range(4)] == [0, 2, 2, None]
    assert worlds.first_of(4, 0) is None


def test_a_long_world_keeps_its_ends_and_a_bounded_number_of_points() -> None:
    world = World(1, 2)
    for index in range(20 * MAX_POINTS):
        world.see(float(index), index)
    assert len(world.points) <= MAX_POINTS
    assert world.points[0] == (0.0, 0)
    assert world.points[-1] == (20 * MAX_POINTS - 1.0, 20 * MAX_POINTS - 1)
    assert world.points == sorted(world.points)


def test_progress_is_read_as_the_ranks_write_it(tmp_path: Path) -> None:
    for local_rank in (1, 0):
        environ = {"LOCAL_RANK": str(local_rank), "RANK": str(2 + local_rank), "WORLD_SIZE": "4"}
        ProgressFile(str(tmp_path), environ).write(7)
    found = read_progress(tmp_path)
    assert [(p.pid, p.rank, p.world_size, p.step) for p in found] == [
        (os.getpid(), 2, 4, 7),
        (os.getpid(), 3, 4, 7),
    ]


def test_dead_ranks_and_foreign_files_are_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ProgressFile(str(tmp_path), {}).write(7)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 2**22 + 1)
        ProgressFile(str(tmp_path), {"LOCAL_RANK": "1"}).write(7)
    ProgressFile(str(tmp_path), {"LOCAL_RANK": "2"}).write(-1)  # has entered, made no step yet
    for index, content in enumerate(("", "[]", "{", '{"pid": "x"}', '{"step": null}', "\xff")):
        (tmp_path / f"foreign{index}.json").write_text(content, "latin-1")
    assert [progress.pid for progress in read_progress(tmp_path)] == [os.getpid()]
    assert read_progress(tmp_path / "nowhere") == ()


def test_the_rank_0_that_spoke_last_leads() -> None:
    old, new = Progress(1, 0, 2, 0, 90, 100.0), Progress(2, 0, 2, 0, 80, 101.0)
    other = Progress(3, 1, 2, 0, 95, 102.0)
    assert newest_rank_0([new, old, other]) == new
    assert newest_rank_0([other]) is None
