# SPDX-License-Identifier: Apache-2.0
"""When a world that has lost nobody forms again, whose turn the write is, and what it notes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.c10d.rounds.decision import decide, next_round
from launcher_shim.c10d.rounds.decision_loop import TURN_S, order
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.observations import (
    NO_STEP,
    START_MAX_S,
    RanksSeen,
    RoundObservations,
    joins_from_s,
    observe,
)
from launcher_shim.c10d.rounds.records import Node, Progress, Round, Seat
from launcher_shim.c10d.rounds.world import LEAD_S, Reform, reform
from rdzv.errors import RecordError
from rdzv.reconcile import SPREAD, Turn
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
    policy = RoundPolicy(2, 4, sizes=(2, 4))
    one = Sidecar(world(frozen), policy)
    one.look(0, asking)
    assert one.look(LEAD_S, asking).cause == cause


def test_who_stands_by_for_want_of_a_size_opens_no_window() -> None:
    one = Sidecar(TWO, RoundPolicy(2, 8, sizes=(2, 4, 8), gather_s=60))
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


def delay_s(member: str, members: list[str], random: Random) -> float:
    return Turn(member, members, TURN_S).delay_s(random.random())


def asking(member: str, revision: int) -> Node:
    return Node(member, "asking", f"n-{member}", 1, member, 1, 0, mod_revision=revision)


def seats(members: str) -> tuple[Seat, ...]:
    return tuple(Seat(member, f"n-{member}", 1) for member in members)


def word(members: str, newest: str, frozen: str = "") -> RunSnapshot:
    nodes = {member: asking(member, 9 if member == newest else 1) for member in members}
    return RunSnapshot(9, Round(1, frozen=seats(frozen)), nodes)


def test_whose_write_made_it_due_is_first_then_the_ranks_then_the_others() -> None:
    wanted = Round(1, complete=True, frozen=seats("cba"))
    assert order(wanted, word("abcdx", newest="b")) == ["b", "c", "a", "d", "x"]


def test_a_round_that_is_over_is_followed_by_its_own_nodes_first() -> None:
    assert order(Round(2), word("abcd", newest="d", frozen="cb")) == ["d", "c", "b", "a"]


def test_who_has_no_node_in_the_store_has_no_turn() -> None:
    wanted = Round(1, complete=True, frozen=seats("cba"))
    assert order(wanted, word("ab", newest="a")) == ["a", "b"]
    assert order(Round(1), word("", newest="")) == []


def test_the_first_writes_at_once_and_twice_as_many_at_each_turn() -> None:
    members = [f"w-{number}" for number in range(1000)]
    delays = [delay_s(member, members, Random(member)) for member in members]
    assert delays[0] == 0
    for turn in range(1, 11):
        within = sum(delay < turn * TURN_S for delay in delays)
        assert within <= 2 ** (turn - 1)
    assert max(delays) <= 10 * TURN_S * (1 + SPREAD)


@pytest.mark.parametrize(("late_s", "writers"), [(0.9 * TURN_S, 1), (0.6, 2)])
def test_how_late_the_watch_is_decides_how_many_write_whatever_their_number(
    late_s: float, writers: int
) -> None:
    for size in (3, 60, 1000):
        members = [f"w-{number}" for number in range(size)]
        writing = [m for m in members if delay_s(m, members, Random(m)) < late_s]
        assert writing == members[:writers]


def test_who_is_not_among_them_comes_last() -> None:
    members = ["a", "b", "c"]
    last = delay_s("spare", members, Random(1))
    assert last >= max(delay_s(member, members, Random(1)) for member in members) > 0


def test_a_member_that_others_have_evicted_costs_no_turn() -> None:
    """Its record is the newest, and it is not there to decide."""
    stored = word("abc", newest="a", frozen="abc")
    evicted = replace(stored, membership=RoundMembers(frozenset("bc")))
    assert order(Round(2), evicted) == ["b", "c", "a"]


START_POLICY = RoundPolicy(2, 4)


class StartSidecar:
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
            *(now, self.seen, snapshot, START_POLICY), healthy_s=99, cut_off=False, ranks=self.ranks
        )
        return decide(now, snapshot, self.seen, START_POLICY).round if current.complete else None


def test_a_start_is_measured_from_the_completion_to_the_first_boundary() -> None:
    one = StartSidecar()
    assert one.look(100, None).progress == ""
    assert one.look(110, NO_STEP).progress == "loads"
    begun = one.look(130, 41)
    assert (begun.progress, begun.start_s) == ("steps", 30.0)
    assert one.look(900, 800) == begun


def test_ranks_that_import_muster_and_report_no_step_are_awaited_once() -> None:
    one = StartSidecar()
    one.look(100, NO_STEP)
    assert one.look(699, NO_STEP).progress == "loads"
    mute = one.look(700, NO_STEP)
    assert (mute.progress, mute.start_s) == ("mute", START_MAX_S)
    assert next_round(mute).progress == "mute"
    assert one.look(800, 1).progress == "steps"


def test_a_start_of_more_than_ten_minutes_is_awaited_in_each_world() -> None:
    one = StartSidecar()
    one.current = replace(one.current, start_s=30.0)
    one.look(100, NO_STEP)
    for formed_s in (700, 1400, 2100):
        following = replace(next_round(one.look(formed_s, NO_STEP)), complete=True)
        assert joins_from_s(following, formed_s) == formed_s + START_MAX_S


def test_a_sidecar_that_came_later_does_not_measure_the_start() -> None:
    one = StartSidecar(from_the_start=False)
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
