# SPDX-License-Identifier: Apache-2.0
"""Ranks are silent once they make no step for long, and should make one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

import agent.stuck
from agent.stuck import Pulse
from rdzv.records.progress import RankProgress

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


PLANTED = {
    "STARTS": 0,
    "TIMES": 0.0,
    "gcd": lambda *_: 1,
}


@pytest.mark.parametrize("rule", PLANTED)
def test_a_planted_bug_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.stuck, rule, PLANTED[rule])
    monkeypatch.setattr(agent.stuck, "STARTS_LOOKS", 0 if rule == "STARTS" else 3)
    assert any(_fails(case) for case in CASES)


def _fails(case: Callable[[], None]) -> bool:
    try:
        case()
    except AssertionError:
        return True
    return False


CASES: tuple[Callable[[], None], ...] = (
    test_a_world_that_starts_may_compile_for_minutes,
    partial(test_a_silence_is_ten_times_the_usual_report_and_thirty_seconds, 0.5, 100, 500),
)
