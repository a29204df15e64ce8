# SPDX-License-Identifier: Apache-2.0
"""Ranks that are silent, and the rank that the others wait for."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import agent.stuck
from agent.rundir.reports import read_line
from agent.stuck import Pulse
from agent.verdict.runs import straggler, waits_of
from muster import waiting
from muster.waiting import WaitingShare
from rdzv.drain.saves import steady
from rdzv.keys import JobKeys
from rdzv.records.progress import PodSaves, RankProgress
from rdzv.store import KeyValue
from tests.support.programs import older_pythons
from tests.support.sources import ROOT

LEAST_S, LOOK_S = 30.0, 5.0
RANK = RankProgress(0, 1, "m:1", -1, True, False, pid=7)


class Watched:
    """A rank that reports every ``every`` steps, and a sidecar that looks at it."""

    def __init__(self, step_s: float, every: int = 1) -> None:
        self.now_s, self.step_s, self.every = 0.0, step_s, every
        self.rank, self.pulse, self.alarms = RANK, Pulse(), 0
        self._next_look_s = 0.0
        self.pause(0.0)

    def pause(self, seconds: float, **changes: object) -> None:
        """Let time pass without a report, and the sidecar look."""
        self.rank = replace(self.rank, **changes)  # type: ignore[arg-type]
        until_s = self.now_s + seconds
        while self._next_look_s <= until_s:
            self.now_s = self._next_look_s
            self.pulse = self.pulse.beat("m:1", (self.rank,), self.now_s)
            self.alarms += self.pulse.stands((self.rank,), self.now_s, LEAST_S)
            self._next_look_s += LOOK_S
        self.now_s = until_s

    def train(self, steps: int) -> None:
        for _ in range(steps // self.every):
            self.pause(self.every * self.step_s)
            step = max(0, self.rank.step) + self.every
            self.rank = replace(self.rank, step=step, at_unix_s=self.now_s)


@pytest.mark.parametrize(
    ("step_s", "every", "term_s"), [(0.05, 1, 30), (0.5, 100, 500), (4, 1, 40), (20, 1, 200)]
)
def test_a_silence_is_ten_times_the_usual_report_and_thirty_seconds(
    step_s: float, every: int, term_s: float
) -> None:
    one = Watched(step_s, every)
    one.train(max(40 * every, round(60 / step_s)))
    one.pause(term_s - 2 * LOOK_S - step_s * every)
    assert one.alarms == 0
    one.pause(6 * LOOK_S + step_s * every)
    assert one.alarms > 0


def test_a_world_that_starts_may_compile_for_minutes() -> None:
    one = Watched(0.5)
    one.pause(200)
    one.train(1)
    one.pause(200)
    assert one.alarms == 0


@pytest.mark.parametrize("state", [{"held": True}, {"epoch": 3}, {"away": True}])
def test_a_rank_that_need_not_step_is_not_silent(state: dict[str, int]) -> None:
    one = Watched(0.5)
    one.train(100)
    one.pause(300, **state)
    assert one.alarms == 0
    one.pause(300, **dict.fromkeys(state, 0))
    assert one.alarms > 0


def test_another_round_is_another_beginning() -> None:
    one = Watched(0.5)
    one.train(100)
    pulse = one.pulse.beat("m:2", (replace(RANK, master="m:2"),), one.now_s)
    assert pulse.starts


PYTHONS = [sys.executable, *older_pythons()]


def pod(name: str, first: int, *waits: float) -> PodSaves:
    ranks = tuple(range(first, first + len(waits)))
    return PodSaves(name, f"uid-{name}", "digits", 3, ranks=ranks, waits=waits)


def test_the_rank_that_waits_least_is_named_with_what_it_costs() -> None:
    found = straggler("ab", [pod("a", 0, 0.5, 0.45), pod("b", 2, 0.05, 0.55)])
    assert found is not None
    assert found.ranks == (("b", 2),)
    assert found.sentence == (
        "all others wait for rank 2 (b): at least 45% of each step, and a step would take 40% less"
        " without"
    )


@pytest.mark.parametrize(
    "told",
    [
        [pod("a", 0, 0.1), pod("b", 1, 0.25)],
        [pod("a", 0, 0.1), pod("b", 1, 0.1), pod("c", 2, 0.8)],
        [pod("a", 0, 0.5)],
        [pod("a", 0, 0.5), pod("b", 1)],
        [],
    ],
    ids=["alike", "most-are-slow", "one-pod-silent", "one-rank-unknown", "nothing"],
)
def test_no_rank_is_named_without_need(told: list[PodSaves]) -> None:
    names = "abc" if len(told) == 3 else "ab"
    assert straggler(names, told) is None


def test_two_ranks_as_slow_as_each_other_are_both_named() -> None:
    told = [pod("a", 0, 0.1, 0.6), pod("b", 2, 0.12, 0.6), pod("c", 4, 0.6, 0.6)]
    found = straggler("abc", told)
    assert found is not None
    assert [rank for _, rank in found.ranks] == [0, 2]
    assert waits_of(told) == {"a": 0.1, "b": 0.12, "c": 0.6}


def test_a_share_is_the_median_of_windows_that_end_at_steps() -> None:
    share, found = WaitingShare(), None
    for step in range(20):  # of 2 s each, 0.5 s of waiting; the ninth is a save
        for tenth in range(20):
            waits = tenth >= 15 or step == 8
            found = share.add(0.1, step, waits=waits) or found
    assert found == pytest.approx(0.25)


def test_a_share_is_unknown_until_there_are_windows() -> None:
    share = WaitingShare()
    assert all(share.add(0.1, 0, waits=True) is None for _ in range(1000))


def test_small_changes_are_not_stored() -> None:
    stored = pod("a", 0, 0.5, 0.5)
    assert steady(pod("a", 0, 0.56, 0.44), stored).waits == (0.5, 0.5)
    assert steady(pod("a", 0, 0.5, 0.35), stored).waits == (0.5, 0.35)
    assert steady(pod("a", 4, 0.56, 0.44), stored).waits == (0.56, 0.44)


def test_shares_survive_the_store() -> None:
    one = pod("a", 0, 0.5, 0.25)
    key = JobKeys("n", "digits").in_generation(1).pod_saves("a")
    assert PodSaves.from_kv(KeyValue(key, one.to_json(), 0, 1, 1, 0)).waits == (0.5, 0.25)
    assert "waits" not in json.loads(pod("a", 0).to_json())


def test_library_and_sidecar_know_the_same_collective_operations() -> None:
    assert waiting.COLLECTIVES.pattern == agent.stuck._COLLECTIVES.pattern
    assert waiting.PYTHONS.pattern == agent.stuck._PYTHONS.pattern


@pytest.mark.parametrize("python", PYTHONS)
def test_a_rank_reports_its_share_of_waiting(tmp_path: Path, python: str) -> None:
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    (tmp_path / "torch" / "distributed" / "calls.py").write_text(
        "import time\n\n\ndef all_reduce(for_s):\n    time.sleep(for_s)\n"
    )
    (tmp_path / "train.py").write_text(
        "import sys, time\n"
        "sys.path.insert(0, sys.argv[1] + '/torch/distributed')\n"
        "import calls, muster\n"
        "for step in range(1000000):\n"
        "    time.sleep(0.05)\n"
        "    calls.all_reduce(0.15)\n"
        "    muster.report_step(step)\n"
    )
    environ = {"PYTHONPATH": str(ROOT), "MUSTER_RUN_DIR": str(tmp_path), "WORLD_SIZE": "2"}
    words = [python, str(tmp_path / "train.py"), str(tmp_path)]
    process = subprocess.Popen(words, env=environ)
    try:
        share = None
        while share is None:
            assert process.poll() is None
            line = read_line(tmp_path / "progress" / "0.json")
            share = None if line is None else line.waits
        assert 0.5 < share < 1.0
    finally:
        process.kill()
        process.wait()
