# SPDX-License-Identifier: Apache-2.0
"""How long the phases of a drain are said to have taken."""

from __future__ import annotations

from dataclasses import replace

from agent.drain.decisions import Chronicle
from rdzv.records.drain import Commit, Drain
from rdzv.snapshot import Snapshot

DRAIN = Drain("uid-b", "b", "spot", "sigterm")
BEGUN = Snapshot(9, drains={"uid-b": DRAIN})
HOLD = Commit(1, "run", 0, "hold", leaving=("uid-b",))


def test_each_phase_is_timed_from_the_first_sight_of_the_drain() -> None:
    chronicle = Chronicle()
    for at, snapshot in [
        (10.0, BEGUN),
        (10.5, replace(BEGUN, commit=HOLD)),
        (10.75, replace(BEGUN, commit=HOLD)),
        (12.0, replace(BEGUN, commit=replace(HOLD, phase="commit", step=7))),
    ]:
        chronicle.see(at, snapshot)
    assert chronicle.phases_s(14.25, "uid-b") == {
        "agreeing_after_s": 0.5,
        "saving_after_s": 2.0,
        "took_s": 4.25,
    }


def test_the_phase_in_which_a_drain_is_first_seen_has_no_time_before_it() -> None:
    chronicle = Chronicle()
    chronicle.see(10.0, replace(BEGUN, commit=HOLD))
    assert chronicle.phases_s(11.0, "uid-b") == {"took_s": 1.0}


def test_a_drain_that_is_off_the_record_is_forgotten() -> None:
    chronicle = Chronicle()
    chronicle.see(10.0, BEGUN)
    chronicle.see(11.0, Snapshot(10))
    assert chronicle.phases_s(12.0, "uid-b") == {}
    chronicle.see(20.0, BEGUN)
    assert chronicle.phases_s(21.0, "uid-b") == {"took_s": 1.0}
