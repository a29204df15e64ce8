# SPDX-License-Identifier: Apache-2.0
"""When a world that has lost nobody forms again: newcomers, sizes, a pause."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.c10d.rounds.decision import decide
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy
from launcher_shim.c10d.rounds.observations import RoundObservations, observe
from launcher_shim.c10d.rounds.records import Node, Progress, Round
from launcher_shim.c10d.rounds.world import LEAD_S, Reform, reform
from tests.support.records import kv, members, node, run, world

POLICY = RoundPolicy(min_nodes=2, max_nodes=10, gather_s=60.0)
TWO = world("ab")


class Sidecar:
    """What one sidecar decides about a world, second by second."""

    def __init__(self, current: Round, policy: RoundPolicy = POLICY) -> None:
        self.current = current
        self.policy = policy
        self.seen = RoundObservations()

    def look(
        self, now: float, asking: Iterable[str], *, listed: str = "", agreed: bool = False
    ) -> Reform:
        here = [seat.member for seat in self.current.frozen]
        nodes = [*(node(m, "in") for m in here), *(node(m) for m in asking)]
        members = RoundMembers(
            frozenset({*here, *asking, *listed}), joins_wait=True, join_agreed=agreed
        )
        snapshot = run(nodes, self.current, membership=members)
        self.seen = observe(now, self.seen, snapshot, self.policy, healthy_s=99, cut_off=False)
        return reform(now, snapshot, self.seen, self.policy)


def test_newcomers_are_gathered_until_nobody_has_come_for_a_third_of_the_window() -> None:
    one = Sidecar(TWO)
    first = one.look(0, "c")
    assert (first.cause, first.wake_at_s) == ("", 20)
    assert first.reason == (
        "1 more asks to join a world of 2: gathering others until the wave is over"
    )
    assert one.look(19, "cd").wake_at_s == 39
    # One that has only been listed is on its way: its launcher is starting.
    assert one.look(38, "cd", listed="e").wake_at_s == 58
    assert one.look(57, "cde").wake_at_s == 60
    assert one.look(60, "cde").cause == "join"


def test_a_wave_that_is_complete_is_let_in_once_all_agents_look() -> None:
    three = Sidecar(TWO, replace(POLICY, desired=3))
    assert three.look(0, "c") == Reform(
        "", "1 more asks to join a world of 2: gathering others until the wave is over", LEAD_S
    )
    assert three.look(LEAD_S, "c").cause == "join"
    # Those that come to more than was desired anyway are gathered.
    assert Sidecar(TWO, replace(POLICY, desired=2)).look(0, "c").cause == ""
    full = Sidecar(TWO, replace(POLICY, max_nodes=4))
    assert [full.look(now, asking).wake_at_s for now, asking in ((0, "c"), (1, "cd"))] == [
        20,
        1 + LEAD_S,
    ]
    assert full.look(1 + LEAD_S, "cd").cause == "join"
    single = Sidecar(TWO, replace(POLICY, gather_s=0))
    assert [single.look(now, "c").cause for now in (0, LEAD_S)] == ["", "join"]
    # Another sidecar, whose clock is ahead, has begun the save: the wave is over for all.
    assert Sidecar(TWO).look(0, "c", agreed=True).cause == "join"


def test_the_window_begins_anew_with_each_wave_and_each_world() -> None:
    one = Sidecar(TWO)
    one.look(0, "c")
    assert one.look(10, "").cause == ""
    assert one.look(50, "d").wake_at_s == 70
    one.current = world("abd", number=4)
    assert one.look(75, "e").wake_at_s == 95


def test_i11_newcomers_wait_for_the_first_step_of_ranks_that_load() -> None:
    at_once = replace(POLICY, max_nodes=3, gather_s=0)
    one = Sidecar(replace(TWO, progress="loads", start_s=5.0), at_once)
    first = one.look(0, "c")
    assert (first.cause, first.wake_at_s) == ("", 600)
    assert (
        first.reason == "1 more asks to join a world of 2: waiting for the first step of its ranks"
    )
    assert one.look(599, "c").cause == ""
    assert one.look(600, "c").cause == "join"
    one = Sidecar(replace(TWO, progress="loads"), at_once)
    one.look(0, "c")
    one.current = replace(one.current, progress="steps")
    assert one.look(LEAD_S, "c").cause == "join"


@pytest.mark.parametrize("progress", ["", "mute"])
def test_newcomers_wait_for_as_long_as_the_last_start_took_if_ranks_report_nothing(
    progress: Progress,
) -> None:
    one = Sidecar(replace(TWO, progress=progress, start_s=90.0), replace(POLICY, max_nodes=3))
    assert one.look(0, "c").wake_at_s == 90
    assert one.look(90, "c").cause == "join"
    unknown = Sidecar(replace(TWO, progress=progress), replace(POLICY, max_nodes=3))
    assert [unknown.look(now, "c").cause for now in (0, LEAD_S)] == ["", "join"]


def test_the_window_is_not_shorter_than_the_last_start() -> None:
    one = Sidecar(replace(TWO, progress="steps", start_s=300.0))
    assert one.look(0, "c").wake_at_s == 100
    assert one.look(90, "cd").wake_at_s == 190
    assert one.look(180, "cde").wake_at_s == 280
    assert one.look(270, "cdef").wake_at_s == 300
    short = Sidecar(replace(TWO, progress="steps", start_s=6.0))
    assert short.look(0, "c").wake_at_s == 20


def test_a_world_saves_before_it_goes_on_without_a_silent_torchrun() -> None:
    silent = replace(node("b", "in"), silent=True)
    snapshot = run([node("a", "in"), silent, node("c")], TWO, membership=members("abc"))
    found = reform(0, snapshot, RoundObservations(), POLICY)
    assert (found.cause, found.reason) == (
        "hang",
        "the torchrun of b is silent while its ranks train",
    )
    other = replace(silent, nonce="another torchrun")
    snapshot = run([node("a", "in"), other], TWO, membership=members("ab"))
    assert reform(0, snapshot, RoundObservations(), POLICY).cause == ""
    assert Node.from_kv(kv("nodes/b", 10, silent.to_json())) == silent
    assert not Node.from_kv(kv("nodes/b", 10, replace(silent, state="left").to_json())).silent


@pytest.mark.parametrize(("paused", "cause"), [(True, "pause"), (False, "shrink")])
def test_only_newcomers_wait_for_the_first_step(paused: bool, cause: str) -> None:
    policy = replace(POLICY, min_nodes=1, max_nodes=1, paused=paused)
    assert Sidecar(replace(TWO, progress="loads"), policy).look(0, "").cause == cause


@pytest.mark.parametrize(
    ("frozen", "asking", "cause"),
    [
        ("ab", "c", ""),
        ("ab", "cd", "join"),
        ("abcd", "e", ""),
        ("abc", "", "shrink"),
        ("abc", "d", "join"),
        ("a", "", ""),
    ],
)
def test_only_an_allowed_size_is_worth_another_world(frozen: str, asking: str, cause: str) -> None:
    policy = RoundPolicy(2, 4, allowed_sizes=(2, 4))
    one = Sidecar(world(frozen), policy)
    one.look(0, asking)
    assert one.look(LEAD_S, asking).cause == cause


def test_who_stands_by_for_want_of_a_size_opens_no_window() -> None:
    one = Sidecar(TWO, RoundPolicy(2, 8, allowed_sizes=(2, 4, 8), gather_s=60))
    assert one.look(0, "c") == Reform()
    assert one.look(600, "cd").wake_at_s == 620


@pytest.mark.parametrize(
    ("current", "cause"),
    [
        (TWO, "pause"),
        (replace(TWO, finishing=True), ""),
        (replace(TWO, closed="failure"), ""),
        (Round(4), ""),
    ],
)
def test_a_paused_job_has_no_world(current: Round, cause: str) -> None:
    policy = replace(POLICY, paused=True)
    assert Sidecar(current, policy).look(0, "cd").cause == cause
    decision = decide(0, run([node("a"), node("b")], Round(4)), RoundObservations(), policy)
    assert decision.round is None
    assert decision.reason == "round 4: 2 nodes ask, and the job is paused"


@given(
    st.lists(st.floats(0, 120), min_size=1, max_size=8).map(sorted),
    st.floats(0, 90),
    st.integers(3, 12),
)
def test_everybody_who_stays_is_let_in_within_the_window(
    times: list[float], gather_s: float, most: int
) -> None:
    """Each newcomer is let in ``gather_s`` after it came, and the time until all agents look, if
    there is room, whoever else comes."""
    policy = replace(POLICY, max_nodes=most, gather_s=gather_s)
    one, now, asking = Sidecar(TWO, policy), 0.0, dict[str, float]()
    arrivals = [*zip(times, "cdefghij", strict=False)]
    while arrivals or asking:
        came = [name for at, name in arrivals if at <= now]
        asking |= dict.fromkeys(came, now)
        arrivals = [(at, name) for at, name in arrivals if at > now]
        seen = one.look(now, asking)
        here = [seat.member for seat in one.current.frozen]
        if seen.cause:
            room = most - len(here)
            assert all(now <= at + gather_s + LEAD_S for at in list(asking.values())[:room])
            one.current = world(
                "".join([*here, *list(asking)[:room]]), number=one.current.number + 1
            )
            asking = dict(list(asking.items())[room:])
            continue
        if len(here) == most:
            break
        now = min([seen.wake_at_s, *(at for at, _ in arrivals)])
        assert math.isfinite(now)
