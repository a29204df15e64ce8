# SPDX-License-Identifier: Apache-2.0
"""The membership as a round depends on it: drains by pod, grants, and joins that wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher_shim.c10d.rounds.inputs import RoundMembers, run_membership
from launcher_shim.c10d.rounds.records import Round, Seat
from rdzv.drain.decision import savers
from rdzv.records.drain import Commit, Drain, Outcome, Vote
from rdzv.records.job import Incarnation, Job
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import Snapshot, listing_of
from tests.support.records import drain, member

RUN = "digits"
WORLD = Round(3, complete=True, frozen=tuple(Seat(name, f"of-{name}", 1) for name in "abc"))


def seen(
    *drains: Drain,
    members: str = "abc",
    commit: Commit | None = None,
    incarnations: tuple[Incarnation, ...] = (),
    replaced: str = "",
    fenced: str | None = None,
    current: Round = WORLD,
) -> RoundMembers:
    snapshot = Snapshot(
        9,
        Job(JobPolicy(2, 3)),
        {
            name: member(name, uid="uid-new" * (name in replaced), min_workers=2, most=3)
            for name in members
        },
        {one.member: one for one in incarnations},
        {one.pod_uid: one for one in drains},
        commit=commit,
    )
    return run_membership(snapshot, listing_of(snapshot), RUN, current, fenced)


def test_nobody_leaves_a_quiet_job() -> None:
    quiet = seen(members="abcd")
    # Who is on standby has no place only as long as others take them all.
    assert quiet.listed == frozenset("abcd")
    assert sorted(quiet.ages, key=quiet.ages.__getitem__) == list("abcd")
    assert (quiet.leaving, quiet.granted, quiet.ends_round) == (frozenset(), frozenset(), False)


def test_a_machine_is_no_block() -> None:
    # Of four pods on two machines the oldest stay, unless a topology is given.
    pods = {"a": "", "b": "block-1", "c": "block-1/rack-2", "d": "/rack-2"}
    members = {
        name: member(name, age, topology=topology, node="machine-1")
        for age, (name, topology) in enumerate(pods.items(), 1)
    }
    snapshot = Snapshot(90, Job(JobPolicy(1, 4)), members)
    assert run_membership(snapshot, listing_of(snapshot), RUN, Round()).blocks == {
        "b": "block-1",
        "c": "block-1",
    }


def test_who_drains_leaves_and_is_not_listed() -> None:
    one = seen(drain("b"))
    assert (one.listed, one.leaving, one.granted) == (frozenset("ac"), frozenset("b"), frozenset())


@pytest.mark.parametrize("outcome", ["committed", "uncommitted", "expired"])
def test_a_drain_with_an_outcome_is_granted(outcome: Outcome) -> None:
    assert seen(drain("a"), drain("b", outcome)).granted == frozenset("b")


def test_a_leave_is_granted_by_the_commit() -> None:
    commit = Commit(4, RUN, 3, "done", 40, ("uid-a", "uid-b"), granted=("uid-b",))
    both = seen(drain("a"), drain("b"), commit=commit)
    assert (both.leaving, both.granted) == (frozenset("ab"), frozenset("b"))


@pytest.mark.parametrize("outcome", ["", "committed"])
def test_a_new_pod_of_the_same_name_is_not_drained(outcome: Outcome) -> None:
    replaced = seen(drain("b", outcome), replaced="b")
    assert replaced.listed == frozenset("abc")
    assert (replaced.leaving, replaced.granted) == (frozenset(), frozenset())
    booting = seen(
        drain("b", outcome), members="ac", incarnations=(Incarnation("b", 2, "uid-new"),)
    )
    assert booting.leaving == frozenset()


def test_who_leaves_has_saved_once_its_acknowledgement_is_on_record() -> None:
    commit = Commit(4, RUN, 3, "commit", 40, ("uid-b",))
    saved = Vote(4, 3, "uid-b", 40, acked=40)
    snapshot = Snapshot(9, Job(JobPolicy(2, 3)), drains={"uid-b": drain("b")}, commit=commit)
    stays = {"a": Vote(4, 3, "uid-a", 40, acked=40)}
    assert savers(snapshot, {"b": saved, **stays}, RUN, 3) == {"uid-b": "b"}
    for other in (replace(saved, acked=None), replace(saved, epoch=3), replace(saved, pod_uid="")):
        assert savers(snapshot, {"b": other}, RUN, 3) == {}
    assert savers(snapshot, {"b": saved}, RUN, 4) == {}
    done = replace(snapshot, commit=replace(commit, phase="done"))
    assert savers(done, {"b": saved}, RUN, 3) == {}


def test_a_drained_pod_that_is_away_still_leaves() -> None:
    held = (Incarnation("b", 1, "uid-b"),)
    assert seen(drain("b"), members="ac", incarnations=held).leaving == frozenset("b")
    assert seen(drain("b"), members="ac").leaving == frozenset("b")


def test_a_fenced_sidecar_counts_itself_among_the_leavers() -> None:
    assert seen(fenced="c").leaving == frozenset("c")


def test_i1_a_drain_of_the_backup_is_none_of_who_got_a_place_after_it() -> None:
    """The store has lost the world, and which pod has the name by now."""
    former = replace(drain("b", "committed"), created_revision=20)
    names = (Incarnation("b", 9, "uid-b"),)
    lost = replace(WORLD, restored=True, restored_at=30)
    one = seen(former, members="ac", incarnations=names, current=lost)
    assert (one.leaving, one.granted) == (frozenset(), frozenset())
    # Nor does its outcome, which may be written since, make it one.
    late = seen(replace(former, mod_revision=40), members="ac", incarnations=names, current=lost)
    assert late.granted == frozenset()
    for drained, current in [
        (replace(former, created_revision=31), lost),
        (former, replace(lost, frozen=lost.frozen[:1])),
        (former, WORLD),
    ]:
        one = seen(drained, members="ac", incarnations=names, current=current)
        assert (one.leaving, one.granted) == (frozenset("b"), frozenset("b"))


@pytest.mark.parametrize(
    ("commit", "waits", "ends"),
    [
        (None, True, False),
        (Commit(4, RUN, 3, "hold", joins=True), True, False),
        (Commit(4, RUN, 3, "commit", 40, joins=True), True, False),
        (Commit(4, RUN, 3, "done", 40, joins=True, admitted=True), False, True),
        (Commit(4, RUN, 3, "done", 40, ("uid-b",), granted=("uid-b",)), True, True),
        (Commit(4, RUN, 3, "void", refused=True, joins=True), False, False),
        (Commit(4, RUN, 3, "void", leaving=("uid-b",), refused=True), True, False),
        (Commit(4, RUN, 2, "done", 40, joins=True, admitted=True), True, False),
        (Commit(4, "other", 3, "done", 40, joins=True, admitted=True), True, False),
    ],
    ids=[
        "never",
        "hold",
        "commit",
        "admitted",
        "granted",
        "refused",
        "refused to a leaver alone",
        "of a former round",
        "another run",
    ],
)
def test_newcomers_wait_for_the_save_of_this_round(
    commit: Commit | None, waits: bool, ends: bool
) -> None:
    one = seen(commit=commit)
    assert (one.joins_wait, one.ends_round) == (waits, ends)
