# SPDX-License-Identifier: Apache-2.0
"""For how long a SIGTERM is held at the most."""

from __future__ import annotations

import pytest

from launcher_shim.pod.hold import FAREWELL_S, FINISHING, OutgoingNotice, reserve_s
from rdzv.drain.standing import PhaseName, phase_of
from rdzv.snapshot import Snapshot
from tests.support.records import drain

END_S = 1000.0


def notice(grace_s: float) -> OutgoingNotice:
    return OutgoingNotice("sigterm", "test", END_S, END_S - reserve_s(grace_s))


@pytest.mark.parametrize("grace_s", [1.5, 3.0, 30.0, 600.0])
def test_while_the_job_is_finishing_only_a_second_of_the_grace_is_kept(grace_s: float) -> None:
    held = notice(grace_s)
    assert held.until_s(FINISHING) == END_S - FAREWELL_S
    phases: tuple[PhaseName, ...] = ("draining", "agreeing", "saving", "saved", "released")
    for phase in ("", "noted", *phases):
        assert held.until_s(phase) == held.deadline_s == END_S - reserve_s(grace_s)


def test_a_wait_that_may_already_last_longer_is_not_cut() -> None:
    held = OutgoingNotice("sigterm", "test", END_S, END_S)
    assert held.until_s(FINISHING) == END_S


def test_both_sides_have_one_word_for_it() -> None:
    assert phase_of(Snapshot(9), drain("b"), finishing=True).name == FINISHING
