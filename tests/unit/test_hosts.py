# SPDX-License-Identifier: Apache-2.0
"""The host list of Horovod: tokens, order, what may vanish from it and when."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.hosts import (
    CONFIRM_S,
    NUDGE_S,
    NUDGE_SHARE,
    SETTLE_S,
    HostList,
    follow,
    host_of,
    parse,
)
from rdzv.records.job import Member
from rdzv.snapshot import Listing
from tests.support import records


def member(name: str, age: int = 5) -> Member:
    return records.member(name, age, mod_revision=age)


class Scene:
    """A list that is followed; time moves by hand."""

    def __init__(self, members: Sequence[Member] = ()) -> None:
        self.list = HostList(generation=1)
        self.now = 100.0
        self.revision = 5
        if members:
            self.see(members)

    def see(
        self,
        members: Sequence[Member],
        *,
        after_s: float = 0.0,
        generation: int = 1,
        left: Sequence[str] = (),
        healthy_for_s: float = 1000.0,
        heard_s: float = math.inf,
        standby: Sequence[Member] = (),
        excluded: Sequence[str] = (),
    ) -> list[str]:
        self.now += after_s
        self.revision += 1
        listing = Listing(
            self.revision, tuple(members), tuple(standby), dict.fromkeys(excluded, "it drains")
        )
        self.list = follow(
            self.list,
            listing,
            generation,
            left=lambda host: host.member in left,
            now=self.now,
            healthy_for_s=healthy_for_s,
            heard_s=heard_s,
        )
        return [host.member for host in self.list.hosts]


A, B, C, D = (member(name, age) for age, name in enumerate("abcd", 3))


def test_a_line_for_each_host_and_the_revision_last() -> None:
    scene = Scene([A, dataclasses.replace(B, slots=4)])
    first, second, last = scene.list.render().splitlines()
    assert first.startswith("a.")
    assert first.endswith(":1")
    assert second.startswith("b.")
    assert second.endswith(":4")
    assert last == "rev-6:0"


def test_a_registration_again_keeps_the_host_and_another_pod_does_not() -> None:
    again = dataclasses.replace(A, incarnation=99, mod_revision=99)
    replaced = dataclasses.replace(A, pod_uid="another")
    assert host_of(A) is not None
    assert host_of(A).token == host_of(again).token  # type: ignore[union-attr]
    assert host_of(A).token != host_of(replaced).token  # type: ignore[union-attr]


def test_a_name_that_is_not_safe_in_a_shell_is_no_host() -> None:
    for name in ("a;reboot", "a b", "$(x)", "", "-o", "a:1", "a\n"):
        assert host_of(member(name)) is None


def test_the_revision_moves_with_the_hosts_and_only_with_them() -> None:
    scene = Scene([A])
    before = scene.list.render()
    scene.see([dataclasses.replace(A, incarnation=50, mod_revision=50)])
    assert scene.list.render() == before
    scene.see([A, B])
    assert scene.list.revision > int(before.splitlines()[-1][4:-2])


def test_the_revision_moves_even_if_that_of_the_store_went_back() -> None:
    scene = Scene()
    scene.revision = 5000
    scene.see([A])
    scene.revision = 3
    scene.see([A, B])
    assert scene.list.revision == 5002


def nudges(scene: Scene, for_s: float) -> list[float]:
    """Let time pass; when the last line was renamed, in seconds from now."""
    began_s, moments = scene.now, []
    while scene.list.next_nudge_s() <= began_s + for_s:
        scene.now = scene.list.next_nudge_s()
        before, scene.list = scene.list, scene.list.nudged(scene.now)
        assert scene.list.revision == before.revision + 1
        assert scene.list.hosts == before.hosts
        moments.append(scene.now - began_s)
    return moments


def test_after_a_change_the_last_line_is_renamed_again_and_again_but_ever_more_rarely() -> None:
    scene = Scene([A, B])
    assert scene.list.nudged(scene.now + NUDGE_S - 0.01) is scene.list
    moments = nudges(scene, 3600)
    assert moments[:3] == [NUDGE_S, 2 * NUDGE_S, 3 * NUDGE_S]
    for before, after in pairwise(moments):
        assert after - before <= max(NUDGE_S, before / NUDGE_SHARE) + 1e-6
    assert len(nudges(scene, 7 * 86_400)) < 100 - len(moments)


def test_another_change_brings_the_nudges_back_and_none_lets_them_fade() -> None:
    scene = Scene([A])
    nudges(scene, 10_000)
    scene.see([A])
    assert scene.list.next_nudge_s() > scene.now + 100 * NUDGE_S
    scene.see([A, B])
    assert nudges(scene, NUDGE_S) == [NUDGE_S]


def test_a_sidecar_that_starts_again_does_not_know_what_was_missed_and_nudges() -> None:
    scene = Scene([A])
    nudges(scene, 10_000)
    before, scene.list = scene.list, parse(scene.list.render(), 1, scene.now)
    scene.see([A], after_s=1.0)
    assert scene.list.revision == before.revision
    assert nudges(scene, NUDGE_S) == [NUDGE_S - 1.0]


def test_who_leaves_or_drains_goes_at_once() -> None:
    scene = Scene([A, B, C])
    assert scene.see([A, C], left=["b"]) == ["a", "c"]
    assert scene.see([A], excluded=["c"]) == ["a"]


def test_another_pod_of_the_same_name_takes_the_place_at_once() -> None:
    scene = Scene([A, B])
    scene.see([A, dataclasses.replace(B, pod_uid="new")])
    assert len(scene.list.hosts) == 2
    assert host_of(B) not in scene.list.hosts


def test_a_lost_member_goes_once_it_was_missed_for_the_confirmation_time() -> None:
    scene = Scene([A, B])
    assert scene.see([A]) == ["b", "a"]
    assert scene.list.next_check_s() == scene.now + CONFIRM_S
    assert scene.see([A], after_s=CONFIRM_S - 0.1) == ["b", "a"]
    assert scene.see([A], after_s=0.2) == ["a"]
    assert scene.list.next_check_s() is None


def test_a_lost_member_that_comes_back_changes_nothing() -> None:
    scene = Scene([A, B])
    before = scene.list.render()
    scene.see([A])
    scene.see([A, B], after_s=3)
    assert scene.list.render() == before
    assert not scene.list.missed_since_s


def test_time_without_a_healthy_watch_does_not_count() -> None:
    scene = Scene([A, B])
    scene.see([A], healthy_for_s=0.0)
    assert scene.see([A], after_s=60, healthy_for_s=1.0) == ["b", "a"]
    assert scene.see([A], after_s=2.9, healthy_for_s=3.9) == ["b", "a"]
    assert scene.see([A], after_s=0.2, healthy_for_s=4.1) == ["a"]


def test_i4_a_lost_member_goes_only_by_what_the_store_said_after_that() -> None:
    scene = Scene([A, B])
    scene.see([A])
    missed_s = scene.now
    # The sidecar stood still for less than it takes a watch to count as unhealthy.
    assert scene.see([A], after_s=CONFIRM_S + 1, heard_s=missed_s + 1) == ["b", "a"]
    assert scene.list.overdue(scene.now)
    assert scene.see([A, B], after_s=0.1, heard_s=scene.now) == ["a", "b"]
    assert not scene.list.overdue(scene.now)
    scene.see([A])
    assert not scene.list.overdue(scene.now)
    assert scene.see([A], after_s=CONFIRM_S + 1, heard_s=scene.now + CONFIRM_S) == ["a"]


def test_i4_after_a_cut_of_everybody_the_list_is_never_empty_or_partial() -> None:
    scene = Scene([A, B, C])
    before = scene.list.render()
    for _ in range(10):  # every lease ran out; nobody is back yet
        assert len(scene.see([], after_s=30)) == 3
    again = [dataclasses.replace(m, incarnation=m.incarnation + 9) for m in (A, B, C)]
    for back in (1, 2, 3):
        assert len(scene.see(again[:back], after_s=1)) == 3
    assert scene.list.render() == before


def test_i4_the_last_ones_go_only_if_they_leave() -> None:
    scene = Scene([A])
    assert scene.see([], after_s=1000) == ["a"]
    assert scene.see([], left=["a"]) == []
    assert scene.list.render() == f"rev-{scene.list.revision}:0\n"


def test_of_a_list_that_only_shrinks_one_host_stays_whoever_leaves() -> None:
    scene = Scene([A, B, C])
    before = scene.list
    assert before.without(lambda host: False, scene.now) is before
    fewer = before.without(lambda host: host.member == "b", scene.now)
    assert [host.member for host in fewer.hosts] == ["a", "c"]
    assert fewer.revision == before.revision + 1
    last = fewer.without(lambda host: True, scene.now)
    assert [host.member for host in last.hosts] == ["a"]
    assert last.without(lambda host: True, scene.now) is last


def test_a_new_life_of_the_job_begins_with_its_own_hosts() -> None:
    scene = Scene([A, B])
    assert scene.see([C], generation=2) == ["c"]


def test_a_delivered_list_is_read_back() -> None:
    scene = Scene([A, dataclasses.replace(B, slots=8)])
    again = parse(scene.list.render(), 1, scene.now)
    assert again.render() == scene.list.render()
    scene.list = again
    assert scene.see([A]) == ["b", "a"]


@pytest.mark.parametrize(
    "text", ["", "\n", "a:1\n", "rev-1:0\na.00000000:1\n", "a.00000000:0\nrev-1:0", "x y\nrev-1:0"]
)
def test_an_unsound_list_is_read_as_none(text: str) -> None:
    assert parse(text, 3, 100.0) == HostList()


@given(st.text(max_size=80))
def test_any_text_can_be_read(text: str) -> None:
    assert isinstance(parse(text, 1, 100.0), HostList)


def test_where_all_are_replaced_at_once_the_oldest_stays_until_another_has_settled() -> None:
    scene = Scene([A, B])
    assert scene.see([C, D], after_s=SETTLE_S, left=["a", "b"]) == ["a", "c", "d"]
    assert scene.list.kept == host_of(A).token  # type: ignore[union-attr]
    assert scene.list.next_check_s() == scene.now + SETTLE_S
    revision = scene.list.revision
    assert scene.see([C, D], after_s=SETTLE_S - 0.1, left=["a", "b"]) == ["a", "c", "d"]
    assert scene.list.revision == revision
    assert scene.see([C, D], after_s=0.2, left=["a", "b"]) == ["c", "d"]
    assert scene.list.revision > revision
    assert (scene.list.kept, scene.list.next_check_s()) == ("", None)


def test_one_after_the_other_too_fast_leaves_the_one_that_horovod_uses() -> None:
    scene = Scene([A])
    assert scene.see([A, B], after_s=SETTLE_S) == ["a", "b"]
    assert scene.see([B], after_s=1, excluded=["a"]) == ["a", "b"]
    assert scene.see([C], after_s=1, excluded=["a", "b"]) == ["a", "c"]
    assert scene.see([C], after_s=SETTLE_S, excluded=["a", "b"]) == ["c"]


def test_overlap_is_nothing_to_keep_where_nobody_comes_or_the_old_one_is_back() -> None:
    scene = Scene([A])
    assert scene.see([C], after_s=SETTLE_S, left=["a"]) == ["a", "c"]
    assert scene.see([A, C], after_s=1) == ["a", "c"]
    assert scene.list.kept == ""
    assert scene.see([], after_s=1, left=["a", "c"]) == []


def test_where_all_drain_and_nobody_comes_the_oldest_stays_while_it_is_there() -> None:
    scene = Scene([A, B])
    assert scene.see([], after_s=SETTLE_S, excluded=["a", "b"]) == ["a"]
    assert scene.list.next_check_s() is None
    assert scene.see([], after_s=SETTLE_S, excluded=["a"], left=["b"]) == ["a"]
    assert scene.see([C], after_s=1, excluded=["a"], left=["b"]) == ["a", "c"]
    assert scene.see([C], after_s=SETTLE_S, excluded=["a"], left=["b"]) == ["c"]
    assert scene.see([], after_s=1, left=["c"]) == []


def test_the_oldest_is_back_for_those_who_come_after_all_have_left() -> None:
    scene = Scene([A, B])
    assert scene.see([], after_s=SETTLE_S, left=["a", "b"]) == []
    assert scene.list.next_check_s() is None
    assert scene.see([], after_s=100, left=["a", "b"]) == []
    assert scene.see([C, D], after_s=1, left=["a", "b"]) == ["a", "c", "d"]
    assert scene.see([C, D], after_s=SETTLE_S - 1, left=["a", "b"]) == ["a", "c", "d"]
    assert scene.see([C, D], after_s=1, left=["a", "b"]) == ["c", "d"]
    assert scene.see([B], after_s=1, generation=2) == ["b"]


def test_hosts_of_a_list_that_is_read_back_have_settled() -> None:
    scene = Scene([A, B])
    scene.list = parse(scene.list.render(), 1, scene.now)
    assert scene.see([C], after_s=1, left=["a", "b"]) == ["a", "c"]


names = st.sampled_from("abcdef")


@given(
    st.lists(
        st.tuples(
            st.sets(names),
            st.sets(names),
            st.floats(0, 10),
            st.sampled_from([0.0, 2.0, 5.0, 500.0]),
        ),
        max_size=12,
    )
)
def test_i4_a_host_vanishes_only_with_a_reason(
    steps: list[tuple[set[str], set[str], float, float]],
) -> None:
    scene = Scene()
    absent_for_s: dict[str, float] = {}
    for present, left, after_s, healthy_for_s in steps:
        before = {host.member for host in scene.list.hosts}
        for name in before:
            seen = name in present or not present
            absent_for_s[name] = 0.0 if seen else absent_for_s.get(name, 0.0) + after_s
        shown = scene.see(
            [member(name) for name in sorted(present)],
            after_s=after_s,
            left=sorted(left),
            healthy_for_s=healthy_for_s,
        )
        assert present <= set(shown)
        assert len(shown) == len(set(shown))
        for name in before - set(shown):
            assert name in left or (absent_for_s[name] >= CONFIRM_S and healthy_for_s >= CONFIRM_S)
        if before and not (before & left):
            assert shown


def test_a_paused_job_shows_no_host_and_then_the_same_again() -> None:
    scene = Scene([A, B])
    before = scene.list
    hidden = before.hiding(hidden=True, now=200.0)
    assert hidden.render() == f"rev-{before.revision + 1}:0\n"
    assert hidden.hiding(hidden=True, now=300.0) is hidden
    shown = hidden.hiding(hidden=False, now=400.0)
    assert shown.render().splitlines()[:-1] == before.render().splitlines()[:-1]
    assert shown.revision > hidden.revision
