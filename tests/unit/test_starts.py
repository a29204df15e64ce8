# SPDX-License-Identifier: Apache-2.0
"""What the sidecar of rank 0 notes on the round key of its ranks' start."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from launcher_shim.c10d.rounds.decision import decide, next_round
from launcher_shim.c10d.rounds.inputs import RoundPolicy
from launcher_shim.c10d.rounds.observations import (
    NO_STEP,
    START_MAX_S,
    RanksSeen,
    RoundObservations,
    joins_from_s,
    observe,
)
from launcher_shim.c10d.rounds.records import Round
from rdzv.errors import RecordError
from tests.support.records import kv, node, run, world

POLICY = RoundPolicy(2, 4)


class Sidecar:
    """The sidecar of rank 0's pod; ``step``: what it sees of its ranks, None for nothing."""

    def __init__(self, *, from_the_start: bool = True) -> None:
        self.seen = RoundObservations()
        self.ranks = RanksSeen(2)
        self.current = world("ab")
        if from_the_start:
            self._look(99, Round(3))

    def look(self, now: float, step: int | None) -> Round:
        if step is not None:
            self.ranks = self.ranks.at(now, 3, step)
        self.current = self._look(now, self.current) or self.current
        return self.current

    def _look(self, now: float, current: Round) -> Round | None:
        snapshot = run([node("a", "in"), node("b", "in")], current)
        self.seen = observe(
            *(now, self.seen, snapshot, POLICY),
            healthy_s=99,
            cut_off=False,
            ranks=self.ranks,
        )
        return decide(now, snapshot, self.seen, POLICY).round if current.complete else None


def test_a_start_is_measured_from_the_completion_to_the_first_boundary() -> None:
    one = Sidecar()
    assert one.look(100, None).progress == ""
    assert one.look(110, NO_STEP).progress == "loads"
    begun = one.look(130, 41)
    assert (begun.progress, begun.start_s) == ("steps", 30.0)
    assert one.look(900, 800) == begun


def test_ranks_that_import_muster_and_report_no_step_are_awaited_once() -> None:
    one = Sidecar()
    one.look(100, NO_STEP)
    assert one.look(699, NO_STEP).progress == "loads"
    mute = one.look(700, NO_STEP)
    assert (mute.progress, mute.start_s) == ("mute", START_MAX_S)
    assert next_round(mute).progress == "mute"
    assert one.look(800, 1).progress == "steps"


def test_a_start_of_more_than_ten_minutes_is_awaited_in_each_world() -> None:
    one = Sidecar()
    one.current = replace(one.current, start_s=30.0)
    one.look(100, NO_STEP)
    for formed_s in (700, 1400, 2100):
        following = replace(next_round(one.look(formed_s, NO_STEP)), complete=True)
        assert joins_from_s(following, formed_s) == formed_s + START_MAX_S


def test_a_sidecar_that_came_later_does_not_measure_the_start() -> None:
    one = Sidecar(from_the_start=False)
    one.current = replace(one.current, start_s=75.0)
    one.look(100, NO_STEP)
    begun = one.look(101, 1)
    assert (begun.progress, begun.start_s) == ("steps", 75.0)


def test_the_next_world_knows_the_last_start_and_has_made_no_step() -> None:
    following = next_round(replace(world("ab"), progress="steps", start_s=30.0))
    assert (following.progress, following.start_s) == ("", 30.0)


def test_the_start_of_a_round_is_stored_and_may_be_missing() -> None:
    begun = replace(world("ab"), progress="steps", start_s=30.5)
    assert Round.from_kv(kv("round", 50, begun.to_json())) == begun
    assert b"start_s" not in world("ab").to_json()
    assert b"progress" not in world("ab").to_json()


@pytest.mark.parametrize("changes", [{"progress": "idle"}, {"start_s": math.inf}])
def test_an_untrue_start_is_no_record(changes: dict[str, object]) -> None:
    bad = replace(world("ab"), **changes)  # type: ignore[arg-type]
    with pytest.raises(RecordError):
        Round.from_kv(kv("round", 50, bad.to_json()))
