# SPDX-License-Identifier: Apache-2.0
"""A run as the mirror shows it, of a store that was restored too; the membership of its rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from launcher_shim.c10d.rounds.decision import decide
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, run_membership
from launcher_shim.c10d.rounds.mirrored_run import MirroredRun
from launcher_shim.c10d.rounds.observations import RoundObservations, Standing, observe, stand
from launcher_shim.c10d.rounds.records import ClosedWhy, Node, Round, Seat
from rdzv.drain.decision import savers
from rdzv.keys import JobKeys
from rdzv.records.drain import Commit, Drain, Outcome, Vote
from rdzv.records.job import Incarnation, Job
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import Snapshot, listing_of
from rdzv.store import KeyValue, WatchEvent
from tests.support.records import drain, member

RUN = JobKeys("team", "digits").in_generation(1).run("digits")
NODE = Node("a", "asking", "n", 1, "10.0.0.1", 7, 0)
B_ASKED = replace(NODE, member="b", nonce="m", ask=2)
NOW_S = 1000.0


def put(key: str, value: bytes, revision: int) -> WatchEvent:
    return WatchEvent("put", KeyValue(key, value, 1, revision, 1, 1))


def stand_in(run: MirroredRun) -> dict[str, Standing]:
    """Where each node of the world stands, for one that has just looked."""
    word = run.snapshot(run.revision, RoundMembers())
    seen = observe(
        NOW_S, RoundObservations(), word, RoundPolicy(1, 4), healthy_s=60.0, cut_off=False
    )
    standings = stand(NOW_S, word, seen, RoundPolicy(1, 4))
    return {seat.member: standing for seat, standing in standings.of.items()}


def test_a_store_that_was_restored_and_has_come_as_far_again_is_known_by_its_records() -> None:
    for key, value in ((RUN.node("a"), NODE.to_json()), (RUN.round, Round(3).to_json())):
        run = MirroredRun(RUN)
        for revision in (9, 15):
            event = put(key, value, revision)
            assert not run.went_back(revision, [event])
            run.apply(event)
        assert run.went_back(17, [put(key, value, 9)])


def test_a_world_that_the_store_has_lost_is_marked_when_it_is_written_again() -> None:
    world = Round(3, True, frozen=(NODE.seat,))
    run = MirroredRun(RUN)
    assert not run.went_back(9, [])
    run.apply(put(RUN.round, world.to_json(), 9))
    assert run.went_back(4, [])
    run.apply(put(RUN.round, Round(2).to_json(), 3))
    assert run.lacks_round
    assert run.round == replace(world, restored=True, restored_at=4, mod_revision=3)
    run.apply(put(RUN.round, run.round.to_json(), 5))
    assert not run.lacks_round
    assert run.round.restored


def test_a_store_that_is_restored_twice_counts_from_the_second_time() -> None:
    run = MirroredRun(RUN)
    run.went_back(9, [])
    run.apply(put(RUN.round, WORLD.to_json(), 9))
    run.went_back(4, [])
    run.apply(put(RUN.round, Round(2).to_json(), 2))
    assert run.round.restored_at == 4
    assert run.went_back(3, [])
    assert run.round.restored_at == 3


def test_i11_that_a_world_must_form_again_outlives_a_restore_to_before_it_was_written() -> None:
    run, ended = MirroredRun(RUN), replace(WORLD, ends="it has lost b")
    assert not run.went_back(9, [])
    run.apply(put(RUN.round, ended.to_json(), 9))
    assert run.round == replace(ended, mod_revision=9)
    assert run.went_back(4, [])
    run.apply(put(RUN.round, WORLD.to_json(), 3))
    assert run.lacks_round
    assert run.round.ends == ended.ends


def test_a_round_of_an_older_sidecar_says_nothing_of_its_end() -> None:
    assert b"ends" not in WORLD.to_json()
    assert Round.from_kv(KeyValue(RUN.round, WORLD.to_json(), 1, 9, 1, 0)).ends == ""


def test_an_open_round_that_the_store_has_lost_may_be_entered() -> None:
    run = MirroredRun(RUN)
    assert not run.went_back(9, [])
    run.apply(put(RUN.round, Round(3).to_json(), 9))
    assert run.went_back(4, [])
    run.apply(put(RUN.round, Round(2).to_json(), 3))
    assert run.round == Round(3, mod_revision=3)


def test_a_store_that_goes_on_was_not_restored() -> None:
    run = MirroredRun(RUN)
    run.apply(put(RUN.node("a"), NODE.to_json(), 9))
    assert not run.went_back(15, [put(RUN.node("a"), NODE.to_json(), 12)])
    assert not run.went_back(17, [put(RUN.node("b"), NODE.to_json(), 5)])
    assert run.went_back(16, [])


WORLD = Round(3, True, frozen=(NODE.seat, B_ASKED.seat))


def of_world(name: str, kind: Literal["put", "delete"], revision: int) -> WatchEvent:
    """What a node of ``WORLD`` stored for the others, and what became of it."""
    key = RUN.value(b"/torch.rendezvous.digits.3/" + name.encode())
    return WatchEvent(kind, KeyValue(key, b"1", 1, revision, 1, 0))


@pytest.mark.parametrize("name", ["MASTER_ADDR", "torchelastic/role_info/1"])
def test_a_world_is_marked_whose_store_has_lost_what_its_nodes_meet_by(name: str) -> None:
    run = MirroredRun(RUN)
    run.apply(put(RUN.round, WORLD.to_json(), 9))
    run.apply(of_world(name, "put", 10))
    assert not run.lacks_round
    assert run.apply(of_world(name, "delete", 9)) == "round"
    assert run.lacks_round
    # What the backup has of its nodes is no older than it, as the backup has the round, too.
    assert run.round == replace(WORLD, restored=True, mod_revision=9)
    run.apply(put(RUN.round, run.round.to_json(), 11))
    assert not run.lacks_round
    assert run.round.restored


def test_a_key_that_is_stored_again_is_not_lost() -> None:
    run = MirroredRun(RUN)
    run.apply(put(RUN.round, WORLD.to_json(), 9))
    run.apply(of_world("MASTER_ADDR", "delete", 9))
    assert run.apply(of_world("MASTER_ADDR", "put", 10)) == "round"
    assert not run.lacks_round


@pytest.mark.parametrize(
    "current",
    [
        replace(WORLD, finishing=True),
        replace(WORLD, closed="success"),
        replace(WORLD, closed="failure"),
        replace(WORLD, ends="it has lost b"),
        Round(4, former=("a", "b")),
        Round(5, True, frozen=WORLD.frozen),
    ],
    ids=["finishing", "ended well", "failed", "to form again", "over", "two rounds on"],
)
def test_what_a_world_met_by_may_go_once_nobody_meets_there(current: Round) -> None:
    events = [put(RUN.round, current.to_json(), 10), of_world("MASTER_ADDR", "delete", 11)]
    # Who has read all anew is told of what is gone first.
    for told in (events, events[::-1]):
        run = MirroredRun(RUN)
        run.apply(put(RUN.round, WORLD.to_json(), 9))
        for event in told:
            run.apply(event)
        assert not run.lacks_round
        assert not run.round.restored


def test_other_keys_of_a_world_may_go() -> None:
    run = MirroredRun(RUN)
    run.apply(put(RUN.round, WORLD.to_json(), 9))
    run.apply(of_world("torchelastic/agent/terminal_state/last_member", "delete", 10))
    run.apply(WatchEvent("delete", KeyValue(RUN.value(b"/their/own"), b"", 1, 11, 1, 0)))
    assert not run.lacks_round


@pytest.mark.parametrize(
    "before",
    [
        replace(B_ASKED, ask=1),
        replace(B_ASKED, nonce="before", ask=9),
        replace(B_ASKED, nonce="before", state="left", left_reason="closed"),
    ],
    ids=["asked before", "torchrun before", "end of the torchrun before"],
)
def test_i1_a_record_of_the_backup_is_none_of_a_torchrun_that_took_a_place(before: Node) -> None:
    run = MirroredRun(RUN)
    run.went_back(9, [])
    run.apply(put(RUN.round, WORLD.to_json(), 9))
    assert run.went_back(5, [])
    run.apply(put(RUN.round, Round(2).to_json(), 3))
    run.apply(put(RUN.node("b"), before.to_json(), 4))
    run.apply(put(RUN.node("a"), NODE.to_json(), 6))
    standings = stand_in(run)
    assert standings == {"a": "here", "b": "missing"}
    # Nor is it for one that came after the restore, and reads what was written again.
    late = MirroredRun(RUN)
    late.went_back(7, [])
    for event in (
        put(RUN.node("b"), before.to_json(), 4),
        put(RUN.node("a"), NODE.to_json(), 6),
        put(RUN.round, run.round.to_json(), 7),
    ):
        late.apply(event)
    assert stand_in(late) == {"a": "here", "b": "missing"}
    assert late.node("b") is None
    late.apply(put(RUN.node("b"), replace(B_ASKED, state="in", round=3).to_json(), 8))
    assert stand_in(late) == {"a": "here", "b": "here"}


@pytest.mark.parametrize("closed", ["", "failure"])
@pytest.mark.parametrize("known", ["watched", "from a note"])
def test_i11_a_world_all_of_whose_torchruns_were_started_again_gives_way(
    closed: ClosedWhy, known: str
) -> None:
    """They asked anew before the last sidecar saw that the store was restored."""
    policy, both = RoundPolicy(2, 4), RoundMembers(listed=frozenset({"a", "b"}))
    world = replace(WORLD, closed=closed)
    run = MirroredRun(RUN)
    if known == "watched":
        run.went_back(9, [])
        run.apply(put(RUN.round, world.to_json(), 9))
    run.went_back(8, [])
    run.apply(put(RUN.round, Round(2).to_json(), 3))
    run.apply(put(RUN.node("a"), replace(NODE, nonce="next").to_json(), 6))
    run.apply(put(RUN.node("b"), replace(B_ASKED, nonce="next", ask=1).to_json(), 7))
    if known != "watched":
        assert run.remember(world)
    run.apply(put(RUN.round, run.round.to_json(), 9))
    word = run.snapshot(run.revision, both)
    seen, found = RoundObservations(), []
    for now_s in (NOW_S, NOW_S + policy.return_s, NOW_S + policy.orphan_hold_s):
        seen = observe(now_s, seen, word, policy, healthy_s=60.0, cut_off=False)
        found.append(decide(now_s, word, seen, policy))
    # Until then, the records may be the backup's, of torchruns that are no more.
    assert [decision.round for decision in found[:2]] == [None, None]
    assert found[0].wake_at_s == NOW_S + policy.orphan_hold_s
    assert found[2].round is not None
    assert found[2].round.number == 4
    run.apply(put(RUN.round, found[2].round.to_json(), 10))
    assert len(run.snapshot(10, both).asking()) == 2


def test_a_torchrun_that_takes_a_place_after_the_restore_has_replaced_the_one_before() -> None:
    run = MirroredRun(RUN)
    run.went_back(9, [])
    run.apply(put(RUN.round, WORLD.to_json(), 9))
    assert run.went_back(5, [])
    run.apply(put(RUN.round, run.round.to_json(), 6))
    run.apply(put(RUN.node("a"), NODE.to_json(), 7))
    run.apply(put(RUN.node("b"), replace(B_ASKED, nonce="next", ask=3).to_json(), 8))
    assert stand_in(run) == {"a": "here", "b": "replaced"}


def test_who_came_to_the_exit_barrier_is_done_though_nobody_remembers_its_record() -> None:
    here, gone, died = (Seat(member, f"of-{member}", 1) for member in "abc")
    world = Round(3, True, finishing=True, frozen=(here, gone, died))
    run = MirroredRun(RUN)
    run.apply(put(RUN.round, world.to_json(), 9))
    run.apply(put(RUN.node("a"), replace(NODE, nonce="of-a", ask=1, state="in").to_json(), 9))
    barrier = b"/torch.rendezvous.digits.%d/torchelastic/agent/terminal_state/num_members"
    run.apply(put(RUN.addend(barrier % 2, "c.of-c"), b"1", 5))
    run.apply(put(RUN.addend(barrier % 3, "b.of-b"), b"1", 10))
    assert stand_in(run) == {"a": "here", "b": "done", "c": "missing"}
    run.apply(WatchEvent("delete", KeyValue(RUN.addend(barrier % 3, "b.of-b"), b"", 0, 12, 0, 0)))
    assert stand_in(run) == {"a": "here", "b": "missing", "c": "missing"}


MEMBERSHIP_RUN = "digits"
MEMBERSHIP_WORLD = Round(
    3, complete=True, frozen=tuple(Seat(name, f"of-{name}", 1) for name in "abc")
)


def seen(
    *drains: Drain,
    members: str = "abc",
    commit: Commit | None = None,
    incarnations: tuple[Incarnation, ...] = (),
    replaced: str = "",
    fenced: str | None = None,
    current: Round = MEMBERSHIP_WORLD,
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
    return run_membership(snapshot, listing_of(snapshot), MEMBERSHIP_RUN, current, fenced)


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
    assert run_membership(snapshot, listing_of(snapshot), MEMBERSHIP_RUN, Round()).blocks == {
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
    commit = Commit(4, MEMBERSHIP_RUN, 3, "done", 40, ("uid-a", "uid-b"), granted=("uid-b",))
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
    commit = Commit(4, MEMBERSHIP_RUN, 3, "commit", 40, ("uid-b",))
    saved = Vote(4, 3, "uid-b", 40, acked=40)
    snapshot = Snapshot(9, Job(JobPolicy(2, 3)), drains={"uid-b": drain("b")}, commit=commit)
    stays = {"a": Vote(4, 3, "uid-a", 40, acked=40)}
    assert savers(snapshot, {"b": saved, **stays}, MEMBERSHIP_RUN, 3) == {"uid-b": "b"}
    for other in (replace(saved, acked=None), replace(saved, epoch=3), replace(saved, pod_uid="")):
        assert savers(snapshot, {"b": other}, MEMBERSHIP_RUN, 3) == {}
    assert savers(snapshot, {"b": saved}, MEMBERSHIP_RUN, 4) == {}
    done = replace(snapshot, commit=replace(commit, phase="done"))
    assert savers(done, {"b": saved}, MEMBERSHIP_RUN, 3) == {}


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
    lost = replace(MEMBERSHIP_WORLD, restored=True, restored_at=30)
    one = seen(former, members="ac", incarnations=names, current=lost)
    assert (one.leaving, one.granted) == (frozenset(), frozenset())
    # Nor does its outcome, which may be written since, make it one.
    late = seen(replace(former, mod_revision=40), members="ac", incarnations=names, current=lost)
    assert late.granted == frozenset()
    for drained, current in [
        (replace(former, created_revision=31), lost),
        (former, replace(lost, frozen=lost.frozen[:1])),
        (former, MEMBERSHIP_WORLD),
    ]:
        one = seen(drained, members="ac", incarnations=names, current=current)
        assert (one.leaving, one.granted) == (frozenset("b"), frozenset("b"))


@pytest.mark.parametrize(
    ("commit", "waits", "ends"),
    [
        (None, True, False),
        (Commit(4, MEMBERSHIP_RUN, 3, "hold", joins=True), True, False),
        (Commit(4, MEMBERSHIP_RUN, 3, "commit", 40, joins=True), True, False),
        (Commit(4, MEMBERSHIP_RUN, 3, "done", 40, joins=True, admitted=True), False, True),
        (Commit(4, MEMBERSHIP_RUN, 3, "done", 40, ("uid-b",), granted=("uid-b",)), True, True),
        (Commit(4, MEMBERSHIP_RUN, 3, "void", refused=True, joins=True), False, False),
        (Commit(4, MEMBERSHIP_RUN, 3, "void", leaving=("uid-b",), refused=True), True, False),
        (Commit(4, MEMBERSHIP_RUN, 2, "done", 40, joins=True, admitted=True), True, False),
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
