# SPDX-License-Identifier: Apache-2.0
"""torch's own handlers behind a sidecar that comes back when its lease is gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

from launcher_shim.c10d.rounds.records import Node, Note, Round, Seat
from tests.support.sidecars.rendezvous import QUICK, job

pytestmark = pytest.mark.virtual


async def test_one_that_was_given_fillers_leaves_its_world_though_all_of_it_are_back() -> None:
    async with job(replace(QUICK, return_s=0.5), ttl_s=1.0) as one:
        for name in "ab":
            await one.sidecar(name)
        first, other = one.torchrun("a"), one.torchrun("b")
        first.line.stores.clear()
        other.awake.clear()
        seen = one.sidecars["b"]
        await one.until(lambda: "a" in seen.nodes and seen.nodes["a"].state == "in")
        # It waits for the address of the first rank, whose sidecar is gone for long enough.
        await one.stop_sidecar("a")
        await one.until(lambda: "a" not in seen.nodes)
        await one.until(lambda: bool(other.worlds))
        await one.come_back("a")
        await one.until(lambda: "a" in seen.nodes)
        first.line.stores.set()
        await one.until(lambda: bool(first.worlds))
        other.awake.set()
        await one.until(lambda: len(other.worlds) == len(first.worlds) == 2)
        assert await one.world("ab") == 1


async def test_one_that_has_finished_by_an_older_sidecar_is_done_by_the_next_one_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with job(replace(QUICK, max_nodes=3), world="abc") as one:
        done, trains, fails = one.everyone
        # An older sidecar notes for its relay that a torchrun has finished, and not in its record.
        monkeypatch.setattr(one.sidecars["a"].rendezvous.place, "finish", lambda claim: None)
        done.order("wait")
        await one.until(lambda: one.sidecars["b"].rendezvous.round.finishing)
        await one.stop_sidecar("a")
        await one.come_back("a")
        trains.can_stop.clear()
        fails.kill()
        await one.until(lambda: trains.restarts == 1)
        await one.passed(0.5)
        # Else it would take its barrier for over, and close the run while one is yet to leave it.
        assert not done.ended
        trains.can_stop.set()
        one.torchrun("c")
        assert await one.world("bc") == 1
        await one.until(lambda: done.ended)
        assert one.sidecars["b"].rendezvous.round.closed == ""
        assert [done.failure, trains.failure] == [None, None]


def test_a_note_that_is_none_of_ours_begins_a_new_client() -> None:
    node = Node("w-0", "in", "nonce", 1, "10.0.0.1", 7, 0, round=3, flavour="aware")
    note = Note("run/ü", 2, node, finished_round=3)
    assert Note.read(note.encode()) == note
    assert Note.read(Note("run", 1).encode()) == Note("run", 1)
    world = Round(3, complete=True, frozen=(node.seat, node.seat._replace(member="w-1")))
    assert Note.read(replace(note, world=world).encode()) == replace(note, world=world)
    assert Note.read(b"") is None
    large = replace(world, frozen=tuple(Seat(f"w-{n}", "n" * 32, 1) for n in range(200)))
    assert Note.read(replace(note, world=large).encode()) == note
    for content in (b"{", b"[]", b'{"schema": 1}', note.encode()[:-9], b"\xff"):
        assert Note.read(content) is None
