# SPDX-License-Identifier: Apache-2.0
"""What a pod notes of its own drain: the earliest deadline, and the reserve before it."""

from __future__ import annotations

import math

import pytest

import agent.drain.notice
from agent.drain.notice import Notice, OwnDrainRecord
from agent.process import boot_s
from launcher_shim.pod.hold import reserve_s


def notice(source: str, left_s: float | None) -> Notice:
    return Notice(source, "why", left_s)  # type: ignore[arg-type]


def due_boot_s(notes: OwnDrainRecord) -> float:
    assert notes.deadline_boot_s is not None
    return notes.deadline_boot_s - notes.reserve_s


def test_the_reserve_is_a_third_of_a_short_grace_and_at_least_a_second() -> None:
    assert [reserve_s(grace_s) for grace_s in (1, 5, 15, 30, 600)] == [1, 5 / 3, 5, 5, 5]


def noticed(notes: OwnDrainRecord, another: Notice, now_boot_s: float) -> OwnDrainRecord:
    return notes.joined(OwnDrainRecord.of_notice("uid", another, now_boot_s, 30))


def test_the_earliest_deadline_counts_with_its_own_reserve() -> None:
    notes = OwnDrainRecord.of_notice("uid", notice("control", 600), 100, 30)
    assert due_boot_s(notes) == 695
    sooner = noticed(notes, notice("sigterm", 5), 100)
    assert due_boot_s(sooner) == pytest.approx(105 - 5 / 3)
    assert sooner.sources == ("control", "sigterm")
    assert due_boot_s(noticed(sooner, notice("prestop", None), 100)) == due_boot_s(sooner)


def test_a_notice_that_is_repeated_changes_nothing() -> None:
    notes = OwnDrainRecord.of_notice("uid", notice("sigterm", 30), 100, 30)
    for left_s in (29, 12, 3, 0.5):
        again = noticed(notes, notice("sigterm", left_s), 130 - left_s - 0.1)
        assert again == notes


def test_an_operators_drain_without_end_takes_the_time_of_a_notice() -> None:
    notes = OwnDrainRecord("uid", ("operator",), "by hand", None, 0)
    assert due_boot_s(noticed(notes, notice("prestop", None), 50)) == 75


def test_notes_survive_the_file() -> None:
    now_s = boot_s()
    notes = OwnDrainRecord.of_notice("uid", notice("sigterm", 30), now_s, 30)
    assert OwnDrainRecord.from_json(notes.to_json()) == notes
    assert notes.outlived_boot_s == now_s + 30 + agent.drain.notice.OUTLIVED_S
    assert math.isclose(notes.record("a", now_s).seconds_left or 0, 30, abs_tol=0.1)
