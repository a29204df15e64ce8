# SPDX-License-Identifier: Apache-2.0
"""How long an attempt waits, by the answers that came before it."""

from __future__ import annotations

import pytest

from rdzv.pacing import ANSWERS, ATTEMPT_S, MAX_ATTEMPT_S, Patience
from rdzv.store.interface import DEFAULT_TIMEOUT_S


def after(*answers_s: float) -> Patience:
    patience = Patience()
    for took_s in answers_s:
        patience.answered(took_s)
    return patience


def test_who_has_answered_nothing_yet_is_left_after_the_usual_time() -> None:
    assert Patience().attempt_s == ATTEMPT_S


@pytest.mark.parametrize("took_s", [0.001, 0.05, 0.16])
def test_a_fast_line_is_given_no_more_than_the_usual_time(took_s: float) -> None:
    assert after(took_s).attempt_s == ATTEMPT_S


@pytest.mark.parametrize(("took_s", "attempt_s"), [(0.2, 1.2), (0.25, 1.5), (0.6, MAX_ATTEMPT_S)])
def test_a_slow_line_is_given_more_up_to_a_bound(took_s: float, attempt_s: float) -> None:
    assert after(took_s).attempt_s == pytest.approx(attempt_s)


def test_an_attempt_is_a_whole_one_within_what_callers_give_by_default() -> None:
    assert MAX_ATTEMPT_S < DEFAULT_TIMEOUT_S


def test_one_fast_answer_shows_that_an_election_is_over() -> None:
    patience = after(*[0.9] * 20)
    assert patience.attempt_s == MAX_ATTEMPT_S
    patience.answered(0.002)
    assert patience.attempt_s == ATTEMPT_S


def test_a_line_that_has_become_slow_is_known_as_slow_after_a_few_answers() -> None:
    patience = after(0.002, *[0.4] * (ANSWERS - 1))
    assert patience.attempt_s == ATTEMPT_S
    patience.answered(0.4)
    assert patience.attempt_s == MAX_ATTEMPT_S


def test_an_attempt_in_vain_lets_the_next_one_wait_for_longer() -> None:
    patience = after(*[0.002] * ANSWERS)
    patience.missed(ATTEMPT_S)
    assert patience.attempt_s == MAX_ATTEMPT_S
    patience.answered(0.2)
    assert patience.attempt_s == pytest.approx(1.2)


def test_a_line_that_has_just_become_slow_lets_one_expect_the_same_of_the_next() -> None:
    next_one = after(*[0.002] * ANSWERS)
    next_one.expect(after(*[0.002] * ANSWERS, 0.4))
    assert next_one.attempt_s == MAX_ATTEMPT_S
    next_one.answered(0.002)
    assert next_one.attempt_s == ATTEMPT_S


def test_a_fast_line_that_is_left_tells_nothing_of_the_next() -> None:
    slow, unknown = after(0.25), Patience()
    for one in (slow, unknown):
        one.expect(after(0.002))
        one.expect(Patience())
    assert slow.attempt_s == pytest.approx(1.5)
    assert unknown.attempt_s == ATTEMPT_S


def test_only_a_whole_attempt_tells_that_an_endpoint_is_stuck() -> None:
    assert after(0.002).whole(ATTEMPT_S)
    assert not after(0.4).whole(ATTEMPT_S)
    assert after(0.4).whole(MAX_ATTEMPT_S)


@pytest.mark.parametrize(
    ("line_s", "waited_s", "blamed"),
    [(0.002, 0.3, True), (0.4, 0.3, False), (0.4, ATTEMPT_S, True), (0.4, MAX_ATTEMPT_S, True)],
)
def test_a_short_attempt_on_a_slow_line_is_no_reason_to_leave(
    line_s: float, waited_s: float, *, blamed: bool
) -> None:
    assert after(line_s).blames(waited_s) is blamed
