# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from typing import Any, Literal

from hypothesis import given
from hypothesis import strategies as st

from rdzv.records.drain import Drain
from rdzv.records.job import Incarnation, Job, Member
from rdzv.snapshot import Places, Snapshot, first_to_go, listing_of
from tests.support import records

JOB = Job(1, 3)


def member(name: str, incarnation: int, **changes: Any) -> Member:
    return records.member(name, incarnation, most=3, **changes)


def snapshot(*members: Member, **changes: Any) -> Snapshot:
    return replace(Snapshot(7, JOB, {m.name: m for m in members}), **changes)


def names(members: tuple[Member, ...]) -> list[str]:
    return [m.name for m in members]


def test_the_oldest_come_first_and_what_is_beyond_max_stands_by() -> None:
    listing = listing_of(snapshot(*(member(f"w-{n}", 10 - n) for n in range(5))))
    assert names(listing.listed) == ["w-4", "w-3", "w-2"]
    assert names(listing.standby) == ["w-1", "w-0"]
    assert "2 on standby" in listing.reason


def test_who_came_back_after_a_cut_keeps_its_place_before_a_spare() -> None:
    members = [member("w-0", 90, since=1), member("w-1", 91, since=2), member("w-2", 92, since=3)]
    listing = listing_of(snapshot(*members, member("spare", 89, since=4)))
    assert names(listing.listed) == ["w-0", "w-1", "w-2"]
    assert names(listing.standby) == ["spare"]


def test_where_pods_are_numbered_the_highest_is_foreseen_to_go_also_one_that_stands_by() -> None:
    pods = [member(f"w-{n}", 10 - n, index=n) for n in (0, 1, 2, 10)]
    first = first_to_go(listing_of(snapshot(*pods)))
    assert first is not None
    assert first.name == "w-10"
    drained = {"uid-w-10": Drain("uid-w-10", "w-10", "node pressure", "preStop")}
    first = first_to_go(listing_of(snapshot(*pods, drains=drained)))
    assert first is not None
    assert first.name == "w-2"


def test_nobody_is_foreseen_to_go_where_pods_have_no_numbers_or_there_is_one() -> None:
    assert first_to_go(listing_of(snapshot(member("a", 1), member("b", 2, index=1)))) is None
    assert first_to_go(listing_of(snapshot(member("a", 1, index=0)))) is None


def test_each_excluded_member_has_its_reason() -> None:
    listing = listing_of(
        snapshot(
            member("launcher", 1, role="launcher", slots=0),
            member("empty", 2, slots=0),
            member("leaver", 3),
            member("stale", 5),
            member("fine", 6),
            drains={"uid-leaver": Drain("uid-leaver", "leaver", "node pressure", "preStop")},
            incarnations={"stale": Incarnation("stale", 8, "uid-stale")},
        )
    )
    assert names(listing.listed) == ["fine"]
    assert set(listing.excluded) == {"launcher", "empty", "leaver", "stale"}
    assert "node pressure" in listing.excluded["leaver"]


def test_i6_a_stale_incarnation_is_not_listed() -> None:
    old = member("w-0", 5)
    listing = listing_of(snapshot(old, incarnations={"w-0": Incarnation("w-0", 6, "new-pod")}))
    assert listing.listed == ()
    assert "incarnation 6" in listing.excluded["w-0"]


def test_a_member_below_min_is_listed_all_the_same_and_the_sentence_says_so() -> None:
    listing = listing_of(snapshot(member("w-0", 1), job=Job(2, 3)))
    assert names(listing.listed) == ["w-0"]
    assert "1 short of min" in listing.reason


def test_only_a_size_that_is_allowed_is_listed_unless_none_can_be() -> None:
    members = [member(f"w-{n}", n + 1, version="0.2.0") for n in range(6)]
    for job, listed, said in (
        (Job(1, 8, unit=4), 4, "4 listed of min 1 and max 8, in multiples of 4, 2 on standby"),
        (Job(1, 8, allowed_sizes=(2, 5)), 5, "1 on standby"),
        (Job(1, 9, unit=8), 6, "2 short of 8, the smallest size"),
    ):
        listing = listing_of(snapshot(*members, job=job))
        assert len(listing.listed) == listed
        assert listing.reason.endswith(said)
        # One of 0.1.0 knows no sizes, and lets all six in.
        old = replace(members[5], version="")
        assert len(listing_of(snapshot(*members[:5], old, job=job)).listed) == 6


MEMBERS = st.lists(
    st.builds(
        member,
        st.sampled_from([f"w-{n}" for n in range(8)]),
        st.integers(1, 20),
        slots=st.integers(0, 2),
        role=st.sampled_from(["worker", "launcher"]),
        max_workers=st.sampled_from([3, 4]),
    ),
    unique_by=lambda m: m.name,
)


@given(MEMBERS, st.integers(1, 5), st.sampled_from([1, 2, 3]))
def test_everybody_is_in_exactly_one_place(members: list[Member], room: int, unit: int) -> None:
    found = snapshot(*members, job=Job(1, room, unit=unit))
    listing = listing_of(found)
    places = [*names(listing.listed), *names(listing.standby), *listing.excluded]
    assert sorted(places) == sorted(found.members)
    assert len(listing.listed) <= room
    assert listing_of(found) == listing


@given(st.sets(st.sampled_from("abcd")), st.sampled_from(["", "committed", "expired"]))
def test_i2_who_drains_is_not_listed_however_its_drain_ended(
    leavers: set[str], outcome: Literal["", "committed", "expired"]
) -> None:
    drains = {f"uid-{n}": Drain(f"uid-{n}", n, "spot", "hand", outcome=outcome) for n in leavers}
    members = [member(name, at) for at, name in enumerate("abcd", 1)]
    listing = listing_of(snapshot(*members, drains=drains))
    assert leavers.isdisjoint(names(listing.listed + listing.standby))
    assert leavers <= set(listing.excluded)


def test_i2_a_new_pod_of_the_same_name_starts_undrained() -> None:
    drains = {"uid-before": Drain("uid-before", "w-0", "spot", "hand", outcome="committed")}
    assert names(listing_of(snapshot(member("w-0", 9), drains=drains)).listed) == ["w-0"]


def test_who_trains_has_a_place_before_an_older_one_and_who_asks_before_one_that_does_not() -> None:
    pods = snapshot(*(member(name, age) for age, name in enumerate("abcde", 1)))
    assert names(listing_of(pods).listed) == ["a", "b", "c"]
    listing = listing_of(pods, Places(frozenset("ce"), frozenset("d")))
    assert names(listing.listed) == ["c", "e", "d"]
    assert names(listing.standby) == ["a", "b"]


def test_a_place_is_no_reason_to_list_who_drains() -> None:
    pods = snapshot(member("a", 1), drains={"uid-a": Drain("uid-a", "a", "spot", "hand")})
    assert listing_of(pods, Places(frozenset("a"))).listed == ()
