# SPDX-License-Identifier: Apache-2.0
"""A run as the mirror shows it, of a store that was restored."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from launcher_shim.c10d.rounds.decision import decide
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy
from launcher_shim.c10d.rounds.mirrored_run import MirroredRun
from launcher_shim.c10d.rounds.observations import RoundObservations, Standing, observe, stand
from launcher_shim.c10d.rounds.records import ClosedWhy, Node, Round, Seat
from rdzv.keys import JobKeys
from rdzv.store import KeyValue, WatchEvent

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
