# SPDX-License-Identifier: Apache-2.0
"""When a member that is away counts as gone, so that its commands end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.tunnel.connections import ABSENT_S, RETURN_S, Absence

LONG_S = 3600.0


def test_one_that_dies_while_the_watch_works_is_gone_at_once() -> None:
    absence = Absence(ABSENT_S)
    assert not absence.lasts(100.0, LONG_S)
    assert absence.lasts(100.0 + ABSENT_S, LONG_S)


def test_i5_after_a_cut_between_all_and_the_store_everybody_may_come_back() -> None:
    """All leases have run out: each registers again in its own time, and its commands run on."""
    absence = Absence(ABSENT_S)
    assert not absence.lasts(100.0, 0.5)  # the first look after the cut
    assert not absence.lasts(100.0 + 2 * ABSENT_S, 0.5 + 2 * ABSENT_S)
    assert not absence.lasts(99.0 + RETURN_S, RETURN_S - 0.5)
    absence.over()
    assert not absence.lasts(200.0, LONG_S)


def test_one_that_does_not_come_back_after_a_cut_is_gone() -> None:
    absence = Absence(ABSENT_S)
    assert not absence.lasts(100.0, 0.5)
    assert absence.lasts(100.0 + RETURN_S, RETURN_S + 0.5)


@given(st.lists(st.tuples(st.floats(0.01, 5.0), st.booleans()), max_size=50))
def test_nobody_is_gone_by_what_a_blind_watch_has_missed(looks: list[tuple[float, bool]]) -> None:
    absence, now, healthy_since = Absence(ABSENT_S), 0.0, 0.0
    for passed_s, blind in looks:
        now += passed_s
        if blind:
            healthy_since = now
        if absence.lasts(now, now - healthy_since):
            assert now - healthy_since >= RETURN_S
