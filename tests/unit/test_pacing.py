# SPDX-License-Identifier: Apache-2.0
"""When a member registers once more: ever later, never later than a lease time, and apart."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from rdzv.pacing import FIRST_PAUSE_S, Pacing

ttls_s = st.floats(2, 600)
counts = st.integers(0, 100_000)
seeds = st.integers(0, 2**32)


@given(ttls_s, counts, counts, seeds)
def test_no_pause_is_longer_than_a_lease_or_shorter_than_half_the_first(
    ttl_s: float, failures: int, brief: int, seed: int
) -> None:
    pause_s = Pacing(ttl_s, failures, brief).pause_s(Random(seed))
    assert FIRST_PAUSE_S / 2 <= pause_s <= ttl_s


@given(ttls_s, counts, seeds)
def test_with_each_failure_the_pause_doubles_until_it_is_a_lease_time(
    ttl_s: float, failures: int, seed: int
) -> None:
    before = Pacing(ttl_s, failures)
    before_s, after_s = (one.pause_s(Random(seed)) for one in (before, before.after_failure()))
    longest_s = Random(seed).uniform(0.5, 1.0) * ttl_s
    assert min(2 * before_s, longest_s) == after_s


@given(ttls_s, seeds, seeds)
def test_two_members_hardly_ever_wait_for_the_same_time(ttl_s: float, one: int, two: int) -> None:
    pacing = Pacing(ttl_s, failures=5)
    same = pacing.pause_s(Random(one)) == pacing.pause_s(Random(two))
    assert same == (Random(one).random() == Random(two).random())


@given(ttls_s, counts, st.floats(0, 1e9), seeds)
def test_failures_are_forgotten_with_the_first_success(
    ttl_s: float, failures: int, now_s: float, seed: int
) -> None:
    pacing = Pacing(ttl_s, failures).after_registering(now_s).after_loss(kept_s=ttl_s)
    assert pacing.pause_s(Random(seed)) <= FIRST_PAUSE_S
    assert pacing.complaint(now_s) is None


@given(ttls_s, st.lists(st.floats(0, 0.99), min_size=2, max_size=40), st.floats(0, 1e6), seeds)
def test_registrations_that_do_not_last_come_ever_later_and_are_told(
    ttl_s: float, kept: list[float], began_s: float, seed: int
) -> None:
    pacing, now_s = Pacing(ttl_s), began_s
    pauses_s = []
    for share in kept:
        pacing = pacing.after_registering(now_s).after_loss(share * ttl_s)
        pauses_s.append(pacing.pause_s(Random(seed)))
        now_s += pauses_s[-1]
    assert pauses_s == sorted(pauses_s)
    complaint = pacing.complaint(now_s)
    assert complaint is not None
    assert complaint.startswith(f"registered {len(kept)} times within {now_s - began_s:.1f} s: ")
    assert f"for leases of {ttl_s:g} s?" in complaint
    calm = pacing.after_registering(now_s).after_loss(ttl_s)
    assert calm.complaint(now_s) is None
    assert calm.pause_s(Random(seed)) <= FIRST_PAUSE_S


@given(ttls_s, seeds)
def test_a_single_loss_is_no_reason_to_complain_or_to_wait_for_long(
    ttl_s: float, seed: int
) -> None:
    once = Pacing(ttl_s).after_registering(5.0).after_loss(kept_s=0.0)
    assert once.complaint(6.0) is None
    assert once.pause_s(Random(seed)) <= 2 * FIRST_PAUSE_S
