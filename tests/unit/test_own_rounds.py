# SPDX-License-Identifier: Apache-2.0
"""Rounds of a torchrun's own, beside a world that changes in place."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from agent.verdict.runs import RunView
from launcher_shim.c10d.agent import TorchAgent
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.place import Claim
from launcher_shim.c10d.rounds.records import OWN_ROUNDS, Node, Round, Seat, own_round
from launcher_shim.c10d.rounds.stages import made_up
from launcher_shim.c10d.rounds.views import hand, portray, view
from launcher_shim.c10d.state_codec import Flavour, NodeDesc, decode, encode
from rdzv.records.world import WorldChange
from rdzv.store import KeyValue

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
