# SPDX-License-Identifier: Apache-2.0
"""Worlds change around processes that live on: no step lost or doubled, one state for all."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.training.worlds import NEAR, Worlds

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def joins_and_leaves(folder: Path, **given: Any) -> Worlds:
    """1 → 2 → 3 ranks, then rank 0 leaves."""
    with Worlds(folder, **given) as worlds:
        worlds.waits_s = 0.3
        worlds.begin("a")
        worlds.at(3)
        for name in ("b", "c"):
            worlds.start(name)
            worlds.join(name)
            worlds.at(worlds.told("a")["step"] + 3)
        worlds.leave("a")
        worlds.at(worlds.told("b")["step"] + 3)
        last = worlds.finish(compared=not given.get("norm"))
        if not given.get("norm"):
            assert worlds.difference(last - 1) > NEAR
        return worlds


def loses(folder: Path, lost: str, **given: Any) -> Worlds:
    """Three ranks, one of which is killed amid a collective; another one joins then."""
    with Worlds(folder, **given) as worlds:
        worlds.start(lost, dies_at=9)
        worlds.begin(*"abc")
        worlds.until(lambda: worlds.is_dead(lost), f"{lost} dies")
        worlds.lose(lost)
        worlds.at(12)
        worlds.start("d")
        worlds.join("d")
        worlds.finish()
        return worlds


def newcomer_dies(folder: Path, **given: Any) -> Worlds:
    """A newcomer dies in its first form; the others go on in the next world."""
    with Worlds(folder, **given) as worlds:
        worlds.begin(*"ab")
        worlds.at(3)
        worlds.start("c", dies_in_form=True)
        worlds.ready("c")
        step = worlds.hold()
        assert not worlds.form(*"abc", step=step)
        worlds.lose("c")
        worlds.at(step + 3)
        worlds.finish()
        assert {*worlds.digests()} == {1, 3}
        return worlds


def newcomer_fails(folder: Path, **given: Any) -> Worlds:
    """A newcomer cannot take the state at first, and can in the world after."""
    with Worlds(folder, **given) as worlds:
        worlds.begin(*"ab")
        worlds.at(3)
        worlds.start("c", raises_in_form=True)
        worlds.ready("c")
        step = worlds.hold()
        assert not worlds.form(*"abc", step=step)
        assert worlds.told("c").get("failed") == [2, "RuntimeError: no state could be taken"]
        worlds.lose(joined="c")
        worlds.finish()
        assert {*worlds.digests()} == {1, 3}
        return worlds


def freezes(folder: Path, **given: Any) -> Worlds:
    """A rank is stopped: the others' collective would last as long as Gloo's own timeout."""
    with Worlds(folder, **given) as worlds:
        worlds.begin(*"abc")
        worlds.at(5)
        os.kill(worlds.processes["b"].pid, signal.SIGSTOP)
        time.sleep(1.0)  # the others come to a collective without it
        worlds.lose("b")
        worlds.finish()
        return worlds


def feeds(folder: Path, **given: Any) -> Worlds:
    """A loader reads ahead as a rank is killed, and as another one joins."""
    with Worlds(folder, fed=True, **given) as worlds:
        worlds.start("c", dies_at=9)
        worlds.begin(*"abc")
        worlds.until(lambda: worlds.is_dead("c"), "c dies")
        worlds.lose("c")
        worlds.start("d")
        worlds.join("d")
        worlds.check_rows(worlds.finish(after=12, compared=False))
        return worlds


def test_ranks_join_and_rank_0_leaves(tmp_path: Path) -> None:
    worlds = joins_and_leaves(tmp_path)
    assert {*worlds.digests()} == {1, 2, 3, 4}
    assert worlds.processes["a"].exitcode == -signal.SIGTERM


def test_running_statistics_come_from_one_rank(tmp_path: Path) -> None:
    joins_and_leaves(tmp_path, norm=True)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_i13_a_killed_rank_costs_no_step(tmp_path: Path, lost: str) -> None:
    loses(tmp_path, lost)


def test_a_newcomer_dies_in_its_first_form(tmp_path: Path) -> None:
    newcomer_dies(tmp_path)


def test_a_newcomer_cannot_take_the_state(tmp_path: Path) -> None:
    newcomer_fails(tmp_path)


def test_a_frozen_rank_is_left_behind(tmp_path: Path) -> None:
    freezes(tmp_path)


def test_i12_each_row_is_trained_once_an_epoch(tmp_path: Path) -> None:
    feeds(tmp_path)


def test_a_scripts_own_exception_goes_on(tmp_path: Path) -> None:
    with Worlds(tmp_path) as worlds:
        worlds.start("a", raises_at=4)
        worlds.begin("a")
        worlds.until(lambda: worlds.is_dead("a"), "a ends")
        assert worlds.processes["a"].exitcode == 1
        assert not worlds.told("a").get("over")
        assert "ValueError: gloo: own" in (tmp_path / "a.err").read_text()


def test_an_exception_that_breaks_a_step_each_time_goes_on(tmp_path: Path) -> None:
    with Worlds(tmp_path) as worlds:
        worlds.start("a", raises_at=4, fails_like_gloo=True)
        worlds.begin("a")
        for _ in range(2):
            worlds.until(lambda: worlds.told("a").get("broken") == worlds.number, "it breaks")
            worlds.lose()
        worlds.until(lambda: worlds.is_dead("a"), "a ends")
        assert worlds.processes["a"].exitcode == 1
        assert "RuntimeError: gloo: own" in (tmp_path / "a.err").read_text()


def test_fifty_worlds_leave_no_descriptor_and_no_thread(tmp_path: Path) -> None:
    def held(name: str) -> tuple[int, int]:
        process = Path("/proc") / str(worlds.processes[name].pid)
        return len([*(process / "fd").iterdir()]), len([*(process / "task").iterdir()])

    with Worlds(tmp_path) as worlds:
        worlds.begin(*"ab")
        found = []
        for number in range(50):
            step = worlds.hold()
            found.append([held("a"), held("b")])
            assert worlds.form(*("ba" if number % 2 else "ab"), step=step)
        worlds.finish()
        for rank in (0, 1):
            # What is just being closed may be seen once more; a leak is one for each world.
            assert sum(found[-1][rank]) <= sum(found[5][rank]) + 5


@pytest.mark.parametrize(
    ("planted", "life", "options"),
    [
        ("formed_before_the_state", joins_and_leaves, {}),
        ("without_buffers", joins_and_leaves, {"norm": True}),
        ("without_moments", joins_and_leaves, {}),
        ("steps_before_all_have_formed", joins_and_leaves, {}),
        ("number_reused", newcomer_fails, {}),
        ("listening_socket_cut", newcomer_dies, {}),
        ("broken_step_counted", loses, {"lost": "b"}),
        ("no_cut", freezes, {}),
        ("batch_not_read_again", feeds, {}),
    ],
)
def test_a_planted_defect_is_found(
    tmp_path: Path,
    planted: str,
    life: Any,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.support.training.worlds.DEADLINE_S", 20.0)
    with pytest.raises(AssertionError):
        life(tmp_path, planted=planted, **options)
