# SPDX-License-Identifier: Apache-2.0
"""Who watches whom, and when a member is evicted before its lease ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import combinations, product

import pytest

from agent.neighbour_watch import has_failed
from launcher_shim.c10d.rounds.observations import SilentMembers
from launcher_shim.c10d.rounds.records import LOST, Round
from rdzv.peers import (
    VETO_S,
    WATCHED,
    PeerDecision,
    Sign,
    Suspicion,
    decide_evictions,
    in_force,
    near,
    ring,
    watched_by,
)
from rdzv.records.job import Member
from rdzv.records.world import WorldChange
from rdzv.snapshot import Snapshot
from rdzv.store import KeyValue, WatchEvent
from tests.support.records import member

NOBODY = frozenset[str]()
LEASES = {name: 100 + age for age, name in enumerate("abcdefgh")}


def members(names: str, **machines: str) -> dict[str, Member]:
    """Members on machines of their own, if nothing else is said."""
    return {
        name: member(
            name, node=machines.get(name, f"machine-{name}"), health_port=9400, lease=LEASES[name]
        )
        for name in names
    }


def suspects(by: str, name: str, sign: Sign = "silent", incarnation: int = 1) -> Suspicion:
    key = f"suspicions/{name}/{by}"
    return Suspicion(by, name, incarnation, sign, key, LEASES[by], mod_revision=7)


def decided(
    names: str,
    suspicions: Iterable[Suspicion],
    *,
    at_s: float = 10.0 + VETO_S,
    failed: str = "",
    world: str = "",
) -> PeerDecision:
    """Decide at a time at which each suspicion stands since 10 s."""
    snapshot, listed = Snapshot(9, members=members(names)), list(suspicions)
    since_s = {(one.member, one.incarnation): 10.0 for one in listed}
    return decide_evictions(
        at_s, snapshot, listed, since_s, frozenset(failed), dict.fromkeys(world, frozenset(world))
    )


def evicted(decision: PeerDecision) -> str:
    return "".join(one.member.name for one in decision.evictions)


def test_each_member_watches_the_next_three_and_is_watched_by_three() -> None:
    job = members("abcdefgh")
    watchers = Counter(one.name for name in job for one in watched_by(name, job))
    assert watchers == dict.fromkeys(job, WATCHED)
    assert [one.name for one in watched_by("g", job)] == ["h", "a", "b"]
    assert near("d", job) == set("abcefg")


def test_pods_of_one_machine_stand_apart_in_the_ring() -> None:
    job = members("abcdef", a="one", b="one", c="two", d="two", e="three", f="three")
    assert ring(job) == ["a", "c", "e", "b", "d", "f"]


def test_a_newcomer_moves_few_neighbours() -> None:
    before, after = members("abdefgh"), members("abcdefgh")
    moved = [n for n in before if watched_by(n, before) != watched_by(n, after)]
    assert len(moved) == WATCHED


def test_a_sidecar_that_holds_no_connection_is_not_watched() -> None:
    job = members("abc")
    job["b"] = member("b", health_port=0)
    assert [one.name for one in watched_by("a", job)] == ["c"]


def test_in_a_job_of_two_nobody_watches_and_nobody_is_evicted() -> None:
    job = members("ab")
    assert watched_by("a", job) == []
    both = [suspects("b", "a"), suspects("c", "a")]
    assert evicted(decided("ab", both)) == ""


def test_two_suspicions_by_different_members_evict() -> None:
    both = [suspects("a", "c"), suspects("b", "c")]
    assert evicted(decided("abc", both)) == "c"
    assert evicted(decided("abc", both[:1])) == ""
    assert evicted(decided("abc", [both[0], both[0]][:1])) == ""


def test_a_suspicion_stands_for_a_while_before_it_evicts() -> None:
    both = [suspects("a", "c"), suspects("b", "c")]
    early = decided("abc", both, at_s=10.0)
    assert (evicted(early), early.wake_at_s) == ("", 10.0 + VETO_S)


def test_i5_a_suspected_member_has_no_vote() -> None:
    """A member that is cut off from the others suspects all of them, and they suspect it."""
    cut = [suspects("a", "b"), suspects("a", "c"), suspects("b", "a"), suspects("c", "a")]
    assert evicted(decided("abcd", cut)) == ""
    assert evicted(decided("abcd", [*cut, suspects("d", "b"), suspects("d", "a")])) == ""


def test_i6_a_suspicion_of_another_incarnation_counts_for_nothing() -> None:
    stale = [suspects("a", "c", incarnation=0), suspects("b", "c")]
    assert evicted(decided("abc", stale)) == ""


def test_i6_a_vote_counts_only_as_long_as_its_member_is_registered_on_that_lease() -> None:
    snapshot = Snapshot(9, members={**members("abc"), "b": member("b", lease=999)})
    assert [one.by for one in in_force(snapshot, [suspects("a", "c"), suspects("b", "c")])] == ["a"]
    assert in_force(Snapshot(9, members=members("bc")), [suspects("a", "c")]) == []


def test_i5_a_refused_connection_evicts_only_in_a_world_that_has_failed() -> None:
    """A sidecar may be away while its ranks train on."""
    both = [suspects("a", "c", "refused"), suspects("b", "c", "refused")]
    assert evicted(decided("abc", both)) == ""
    assert evicted(decided("abc", both, failed="abc")) == "c"
    mixed = [suspects("a", "c"), suspects("b", "c", "refused")]
    assert evicted(decided("abc", mixed)) == ""


@pytest.mark.parametrize(
    ("ends", "change", "failed"),
    [
        (f"{LOST}a", None, True),
        ("a pod comes", None, False),
        ("", WorldChange(phase="broken", round=3), True),
        ("", WorldChange(phase="broken", round=2), False),
        ("", WorldChange(phase="broken", round=3, attempts=1), False),
        ("", WorldChange(phase="form", round=3), False),
    ],
)
def test_i5_a_world_has_failed_once_no_rank_trains_on(
    ends: str, change: WorldChange | None, failed: bool
) -> None:
    assert has_failed(Round(3, complete=True, ends=ends), change) is failed


def test_i1_a_world_that_is_cut_off_as_a_whole_is_kept() -> None:
    """Its ranks train on; those who stand by must not form another one beside it."""
    by_spares = [suspects("c", "a"), suspects("d", "a")]
    assert evicted(decided("abcd", by_spares)) == "a"
    assert evicted(decided("abcd", by_spares, world="a")) == ""
    assert evicted(decided("abcd", by_spares, world="ab")) == ""
    assert evicted(decided("abcd", [*by_spares, suspects("b", "a")], world="ab")) == "a"


@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
def test_every_set_of_suspicions_keeps_the_rules(names: str) -> None:
    """All of them: each pair of members may suspect one another, or not."""
    pairs = [(by, name) for by in names for name in names if by != name]
    for chosen in product((False, True), repeat=len(pairs)):
        cut = [pair for pair, broken in zip(pairs, chosen, strict=True) if broken]
        suspected = {name for _, name in cut}
        gone = set(evicted(decided(names, [suspects(by, name) for by, name in cut])))
        for name in names:
            voters = {by for by, of in cut if of == name} - suspected
            assert (name in gone) == (len(names) > 2 and len(voters) > 1)
        # Those that evict are not evicted themselves: at least two always stay.
        assert not gone or len(set(names) - gone) >= 2


@pytest.mark.parametrize("size", [3, 4, 5])
def test_i1_i5_no_partition_evicts_from_two_sides(size: int) -> None:
    """Of two halves that do not reach each other, none evicts anybody: all are suspected."""
    names = "abcdefgh"[:size]
    for length in range(1, size):
        for half in combinations(names, length):
            across = [
                suspects(by, name)
                for by in names
                for name in names
                if (by in half) != (name in half)
            ]
            assert evicted(decided(names, across)) == ""


def stored(one: Suspicion) -> WatchEvent:
    return WatchEvent("put", KeyValue(f"/muster/{one.key}", one.to_json(), 1, 7, 1, one.lease))


def test_a_silent_member_may_be_evicted_once_its_first_suspicion_has_stood() -> None:
    seen = SilentMembers()
    first, second = stored(suspects("b", "a")), stored(suspects("c", "a"))
    seen.note(first, 10.0)
    seen.note(second, 10.4)
    seen.note(first, 10.6)  # it was written again
    assert seen.evicts_s("abc") == 10.0 + VETO_S
    assert seen.evicts_s("bc") == math.inf
    seen.note(WatchEvent("delete", first.kv), 10.7)
    assert seen.evicts_s("abc") == 10.4 + VETO_S


@pytest.mark.parametrize(
    "event",
    [
        stored(suspects("b", "a", "refused")),
        WatchEvent("put", KeyValue("/muster/suspicions/a/b", b"{}", 1, 7, 1, 101)),
        WatchEvent("put", KeyValue("/muster/members/a", b"{}", 1, 7, 1, 101)),
    ],
    ids=["refused", "malformed", "another-key"],
)
def test_nothing_else_is_a_silence(event: WatchEvent) -> None:
    seen = SilentMembers()
    seen.note(event, 10.0)
    assert seen.evicts_s("abc") == math.inf
