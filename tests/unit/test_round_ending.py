# SPDX-License-Identifier: Apache-2.0
"""A commit that ends its round, a store that was restored, and rounds of a torchrun's own."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.drain.decisions import DrainView
from agent.verdict.runs import RunView
from launcher_shim.c10d.agent import TorchAgent
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.place import Claim
from launcher_shim.c10d.rounds.records import OWN_ROUNDS, Node, Round, Seat, own_round
from launcher_shim.c10d.rounds.stages import made_up
from launcher_shim.c10d.rounds.views import hand, portray, view
from launcher_shim.c10d.state_codec import Flavour, NodeDesc, decode, encode
from rdzv.drain.decision import DrainDecision, decide
from rdzv.drain.gate import Gate, Here, RoundEnding, ending_in, local
from rdzv.drain.inputs import (
    DrainingSnapshot,
    DrainObservations,
    DrainPolicy,
    LiveRound,
    LiveRounds,
)
from rdzv.records.drain import Commit, LastCommit
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.records.shards import Plan, PodShards, ShardWorld, Share, TrainedShards
from rdzv.records.world import WorldChange
from rdzv.shard_ledger import ShardLedger
from rdzv.snapshot import Snapshot, listing_of
from rdzv.store import KeyValue

ROUND = LiveRound("digits", 3, True, ("a", "b"), master="10.0.0.1:4711")
ENDS = Commit(5, "digits", 3, "done", 9, joins=True, admitted=True, mod_revision=40)
LAST = LastCommit(9, 3, 5, run="digits", mod_revision=40)
EARLIER = LastCommit(4, 2, 3, run="digits", mod_revision=20)
HELD = replace(ENDS, epoch=7, phase="hold", step=None, admitted=False)


def membership(
    commit: Commit | None, last: LastCommit | None = None, generation: int = 1
) -> Snapshot:
    return Snapshot(
        90, Job(JobPolicy(1, 4), generation=generation), commit=commit, last_commit=last
    )


def ending() -> RoundEnding:
    seen = ending_in(membership(ENDS, LAST), [ROUND])
    assert seen is not None
    return seen


@pytest.mark.parametrize(
    "commit", [None, HELD, replace(HELD, round=2), replace(ENDS, admitted=False)]
)
def test_i3_a_store_that_has_lost_an_ending_is_given_it_again(commit: Commit | None) -> None:
    put_back = ending().put_back_into(membership(commit, EARLIER), [ROUND])
    epoch = 7 if commit is not None and commit.epoch == 7 else 5
    assert put_back == (replace(ENDS, epoch=epoch), LAST)


@pytest.mark.parametrize(
    "round",
    [
        replace(ROUND, number=4),
        replace(ROUND, run="other"),
        replace(ROUND, members=("a", "c")),
        replace(ROUND, master="10.0.0.2:4711"),
        replace(ROUND, closed=True),
        replace(ROUND, complete=False),
    ],
)
def test_an_ending_is_of_one_world_alone(round: LiveRound) -> None:
    assert ending().put_back_into(membership(None), [round]) is None


def test_a_world_is_known_before_its_ranks_have_an_address() -> None:
    unnamed = replace(ROUND, master="")
    assert ending().put_back_into(membership(None), [unnamed]) is not None


def test_an_ending_is_put_back_once_and_in_its_own_life() -> None:
    assert ending().put_back_into(membership(ENDS), [ROUND]) is None
    assert ending().put_back_into(membership(None, generation=2), [ROUND]) is None


def test_i7_a_leave_that_was_granted_is_granted_anew() -> None:
    left = replace(ENDS, joins=False, admitted=False, granted=("uid-b",))
    seen = ending_in(membership(left, LAST), [ROUND])
    assert seen is not None
    assert seen.put_back_into(membership(None), [ROUND]) == (
        replace(left, granted=(), admitted=True),
        LAST,
    )


class Stored:
    """A sidecar's view of a store, and of its one world."""

    mirror = SimpleNamespace(certain_revision=90)

    def __init__(self) -> None:
        self.snapshot_now = membership(ENDS, LAST)
        self.membership = SimpleNamespace(
            snapshot=lambda: self.snapshot_now, votes=dict, saves=dict
        )

    async def caught_up(self) -> None:
        """The rounds are those of the present generation."""

    def live_rounds(self) -> LiveRounds:
        return LiveRounds(ROUND, ROUND)


async def test_i3_a_sidecar_remembers_an_ending_that_its_store_has_lost() -> None:
    """A story of the simulation finds it in one of a thousand seeds."""
    stored = cast(Any, Stored())
    view = DrainView(stored, stored, "uid-a", cast(Any, SimpleNamespace(commands=dict)))
    assert (await view.snapshot()).lost is None
    stored.snapshot_now = membership(None, EARLIER)
    assert (await view.snapshot()).lost == (ENDS, LAST)


def test_i3_a_last_commit_never_goes_back() -> None:
    anothers = replace(LAST, step=4, epoch=6, run="other")
    assert ending().put_back_into(membership(None, anothers), [ROUND]) == (ENDS, None)
    # The save was forgotten, or another run's was put on record, before the ending was seen.
    unseen = ending_in(membership(ENDS, anothers), [ROUND])
    assert unseen is not None
    assert unseen.last_commit is None


@pytest.mark.parametrize(
    "later",
    [
        replace(LAST, step=12, epoch=6),
        # As a periodic save has it, which begins no epoch.
        replace(LAST, step=12, epoch=3, periodic=True),
    ],
)
def test_i3_a_world_that_has_saved_a_later_step_is_not_ended_after_the_earlier_one(
    later: LastCommit,
) -> None:
    assert ending().put_back_into(membership(None, later), [ROUND]) is None
    assert ending().put_back_into(membership(HELD, later), [ROUND]) is None
    earlier = replace(later, round=2)
    assert ending().put_back_into(membership(None, earlier), [ROUND]) is not None


def test_a_world_that_ends_without_a_save_is_not_ended_after_one() -> None:
    unsaved = ending_in(membership(replace(ENDS, step=None), EARLIER), [ROUND])
    assert unsaved is not None
    assert unsaved.put_back_into(membership(None, EARLIER), [ROUND]) is not None
    assert unsaved.put_back_into(membership(None, replace(LAST, step=1)), [ROUND]) is None


@pytest.mark.parametrize(
    "commit", [None, HELD, replace(ENDS, admitted=False), replace(ENDS, round=2)]
)
def test_only_a_grant_in_a_live_round_is_an_ending(commit: Commit | None) -> None:
    assert ending_in(membership(commit), [ROUND]) is None
    assert ending_in(membership(ENDS), [replace(ROUND, closed=True)]) is None


def lost(*ledgers: ShardLedger) -> DrainingSnapshot:
    stored = membership(None, EARLIER)
    return DrainingSnapshot(
        stored,
        listing_of(stored),
        ROUND,
        {},
        "uid-a",
        revision=90,
        ledgers=ledgers,
        lost=(ENDS, LAST),
    )


def put_back(snapshot: DrainingSnapshot) -> DrainDecision:
    return decide(0.0, snapshot, DrainObservations(), DrainPolicy())


def test_i3_the_gate_stays_shut_until_the_ending_is_put_back() -> None:
    move = local(
        Here("a", "uid-a", Gate(), ()),
        commit=lost().commit_in_force,
        round=ROUND,
        drain=None,
        vote=None,
        last_commit=None,
    )
    assert move.gate is not None
    assert (move.gate.phase, move.gate.step) == ("done", 9)

    decision = put_back(lost())
    assert decision.commit is not None
    assert replace(decision.commit, reason="") == ENDS
    assert decision.last_commit == LAST
    assert decision.drains == {}


def test_a_save_is_not_put_back_if_the_store_has_lost_the_shards_in_it() -> None:
    world = ShardWorld("digits 3", Plan(100, 10, None), 2, 5, "digits", 3)
    pods = {name: PodShards(name, "", {0: Share(held=((0, 1),))}) for name in "ab"}
    decision = put_back(lost(ShardLedger(world, trained=TrainedShards(base=5), pods=pods)))
    assert decision.commit is not None
    assert decision.last_commit is None


POLICY = RoundPolicy(1, 4)
FROZEN = (Seat("a", "n", 1), Seat("b", "n", 1))
TRAINS = Round(5, True, frozen=FROZEN, world=2, mod_revision=9)
A, B = (Node(name, "in", "n", 1, f"10.0.0.{name}", 1, 0, round=5) for name in "ab")
C = Node("c", "asking", "n", 1, "10.0.0.c", 1, 0)


def snapshot(current: Round, *nodes: Node, leaving: str = "") -> RunSnapshot:
    members = RoundMembers(listed=frozenset("abc"), leaving=frozenset(leaving))
    return RunSnapshot(9, current, {node.member: node for node in nodes}, members)


def test_a_newcomer_is_handed_a_round_of_its_own_at_once() -> None:
    handed = hand(snapshot(TRAINS, A, B, C), C)
    assert handed is not None
    assert (handed.state, handed.own, handed.round) == ("in", True, own_round(C.seat))
    assert hand(snapshot(replace(TRAINS, world=0), A, B, C), C) is None
    assert hand(snapshot(replace(TRAINS, ends="it must"), A, B, C), C) is None
    assert hand(snapshot(TRAINS, A, B, C, leaving="c"), C) is None


def test_no_two_requests_share_a_round_and_none_is_a_real_one() -> None:
    seats = [Seat(member, nonce, ask) for member in "abc" for nonce in "xy" for ask in (1, 2, 3)]
    numbers = {own_round(seat) for seat in seats}
    assert len(numbers) == len(seats)
    assert min(numbers) >= OWN_ROUNDS
    assert max(numbers) < 10**18


def test_it_is_the_last_there_and_torch_reads_the_number() -> None:
    handed = hand(snapshot(TRAINS, A, B, C), C)
    assert handed is not None
    shown = view(snapshot(TRAINS, A, B, handed), POLICY, handed, parked=False, parks=True)
    me = NodeDesc(C.addr, C.pid, C.local_id)
    state = decode(encode(portray(shown, me, "c", 4), Flavour(aware=True, redundancy=True)))[0]
    assert (state.round, state.complete, state.participants[me]) == (handed.round, True, 2)
    assert not state.wait_list


def test_the_torchruns_of_a_world_are_shown_its_first_seats_for_ever() -> None:
    before = view(snapshot(TRAINS, A, B), POLICY, A, parked=False, parks=True)
    came = replace(hand(snapshot(TRAINS, A, B, C), C) or C)
    after = replace(TRAINS, frozen=(FROZEN[0], came.seat), began=FROZEN, world=3)
    seen = view(snapshot(after, A, B, came), POLICY, A, parked=False, parks=True)
    assert (seen.role, seen.round.frozen, seen.round.number) == ("participant", FROZEN, 5)
    assert (seen.phantom, before.round.frozen) == (False, FROZEN)


def test_one_that_leaves_in_place_is_shown_no_waiter() -> None:
    after = replace(TRAINS, frozen=FROZEN[1:], began=FROZEN, world=3)
    assert not view(snapshot(after, A, B, leaving="a"), POLICY, A, parked=False, parks=True).phantom


def test_a_world_that_falls_back_releases_newcomers_beside_it() -> None:
    came = hand(snapshot(TRAINS, A, B, C), C)
    assert came is not None
    over = snapshot(replace(TRAINS, world=0), A, B, came)
    assert view(over, POLICY, came, parked=False, parks=True).phantom
    ended = snapshot(replace(TRAINS, frozen=(*FROZEN, came.seat), ends="why"), A, B, came)
    assert view(ended, POLICY, came, parked=False, parks=True).phantom


def test_the_records_keep_it() -> None:
    came = hand(snapshot(TRAINS, A, B, C), C)
    assert came is not None
    assert Node.from_kv(KeyValue("k/c", came.to_json(), 1, 1, 1, 0)).own
    assert b'"own"' not in A.to_json()
    changed = replace(TRAINS, began=FROZEN)
    read = Round.from_kv(KeyValue("k/round", changed.to_json(), 9, 9, 1, 0))
    assert read == changed
    assert b'"world"' not in replace(TRAINS, world=0).to_json()


def test_its_ranks_are_numbered_as_the_last_and_name_their_world_as_all_do() -> None:
    prefix, own = "/torch.rendezvous.job", own_round(C.seat)
    stored = {
        f"{prefix}.5/MASTER_ADDR".encode(): b"10.0.0.a",
        f"{prefix}.{own}/torchelastic/role_info/2".encode(): b'{"local_world_size": 4}',
    }
    ranks = made_up(b"torchelastic/assigned_ranks/2", "job", own, 5, stored.get)
    assert json.loads(ranks or b"") == [8, 12, 8, 12]
    assert made_up(b"MASTER_ADDR", "job", own, 5, stored.get) == b"10.0.0.a"
    assert made_up(b"torchelastic/role_info/2", "job", own, 5, stored.get) is None


def test_status_says_that_it_changes_in_place_or_why_not() -> None:
    change = WorldChange(4, "train", 5, 2)
    assert RunView("job", TRAINS, (), change).in_place.endswith("its ranks are in world 2")
    fell = WorldChange(5, "fall-back", 5, 2, reason="b takes no part")
    back = RunView("job", replace(TRAINS, world=0), (), fell)
    assert back.in_place == "job changes by a save and a restart: b takes no part"
    assert RunView("job", replace(TRAINS, number=6, world=0), (), fell).in_place == ""
    assert RunView("job", TRAINS, ()).in_place == ""


def test_the_exit_barrier_of_a_world_in_place_is_counted_by_node() -> None:
    nobody = SimpleNamespace(live_node=lambda claim: None, own_node=lambda claim: None)
    run: Any = SimpleNamespace(
        counts_apart=True, all_are_done=False, place=nobody, round=TRAINS, run_id="job"
    )
    agent = TorchAgent(run, Claim("n", 0.0, 0.0))
    last = b"/torch.rendezvous.job.5/torchelastic/agent/terminal_state/last_member"
    assert asyncio.run(agent.exit_barrier()) == -1
    assert agent.filler(last) is None
    run.all_are_done = True
    assert agent.filler(last) == b""
    run.counts_apart = False
    assert asyncio.run(agent.exit_barrier()) is None
