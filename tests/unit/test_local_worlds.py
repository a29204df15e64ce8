# SPDX-License-Identifier: Apache-2.0
"""From progress files to the worlds that trained."""

import os
from pathlib import Path

import pytest

from console.local.timeline import MAX_POINTS, Progress, World, Worlds, newest_rank_0, read_progress
from muster.progress import ProgressFile


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
    assert [(world.size, world.points) for world in worlds.all] == [
        (2, [(10.0, 1), (11.0, 20)]),
        (4, [(18.5, 13), (20.0, 40)]),
        (2, [(21.0, 41)]),
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


def test_a_rank_0_of_a_former_world_that_lingers_begins_nothing() -> None:
    worlds = Worlds()
    worlds.see(1.0, at(1, pid=1))
    worlds.see(2.0, at(1, pid=2))
    assert worlds.see(3.0, at(2, pid=1)) is None
    assert len(worlds.all) == 2


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


def test_dead_ranks_and_foreign_files_are_left_out(
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
