# SPDX-License-Identifier: Apache-2.0
"""Drains that have too little time, too few others, or no end behind them."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

import agent.drain.notice
from agent.drain.notice import Notice, OwnDrainRecord, Source
from agent.process import boot_s
from launcher_shim.c10d.rounds.records import Node, Round
from launcher_shim.pod.hold import reserve_s
from rdzv.drain.transactions import cancel, change
from rdzv.records.drain import Drain
from rdzv.store import Put
from rdzv.store.memory.client import MemoryStore
from tests.support.sidecars.drains import HERE, RUN, Pod, job
from tests.support.sidecars.jobs import KEYS
from tests.support.sidecars.ranks import Loop

pytestmark = pytest.mark.virtual


async def test_i10_below_min_nobody_is_released_before_its_deadline() -> None:
    async with job("ab", least=2, trains="ab") as one:
        began = one.clock()
        client = one.pods["b"].notice("sigterm", 4)
        line = await client.last()
        # The reserve of so short a grace is a third of it.
        assert 2.6 <= one.clock() - began < 4
        assert line.outcome == "committed"
        await client.release()
        await one.until(lambda: one.commit.granted == ("uid-b",))
        assert client.phases[-2:] == ["saved", "released"]


async def test_below_min_a_pod_in_which_nothing_was_trained_goes_at_once() -> None:
    async with job("a") as one:
        # Nobody waits here for as long as this deadline is away.
        assert (await one.pods["a"].notice("sigterm", 3600).last()).outcome == "uncommitted"


async def test_a_drain_is_written_once_though_its_own_sidecar_sees_it_late() -> None:
    async def late() -> None:
        await asyncio.sleep(1.5)

    async with job("ab", least=2, trains="ab") as one:
        one.pods["b"].cable.delivering = late  # type: ignore[method-assign]
        one.pods["b"].notice("sigterm", 30)
        await one.until(lambda: "uid-b" in one.snapshot.drains)
        began = one.clock()
        await one.pods["a"].soon(lambda: one.clock() - began > 5)
        assert one.mirror.kvs[HERE.drain("uid-b")].version == 1


async def test_i10_below_min_it_is_released_at_once_where_the_policy_says_so() -> None:
    async with job("ab", least=2, below_min="commit", trains="ab") as one:
        # Nobody waits here for as long as this deadline is away.
        assert await one.pods["b"].notice("sigterm", 3600).release() == "committed"


async def test_i10_a_replacement_lets_it_go_once_its_launcher_asks() -> None:
    async with job("ab", least=2, trains="ab") as one:
        # Nobody waits here for as long as this deadline is away.
        client = one.pods["b"].notice("sigterm", 3600)
        await one.until(one.phase_is("done"))
        await one.add("c")
        assert "released" not in client.phases
        await one.ask("c")
        assert await client.release() == "committed"


async def test_i10_a_pod_that_makes_room_waits_for_no_replacement() -> None:
    async with job("ab", least=2, trains="ab") as one:
        # Nobody waits here for as long as this deadline is away.
        client = one.pods["b"].notice("sigterm", 3600)
        await one.until(one.phase_is("done"))
        assert "released" not in client.phases
        held = one.snapshot.drains["uid-b"]
        _, writes = change(KEYS, one.snapshot, replace(held, preempted=True))
        await one.put(*writes)
        assert await client.release() == "committed"


async def test_i10_when_every_member_is_drained_all_save_and_go() -> None:
    async with job("ab", trains="ab") as one:
        # Nobody waits here for as long as this deadline is away.
        clients = [one.pods[name].notice("sigterm", 3600) for name in "ab"]
        assert {await client.release() for client in clients} == {"committed"}
        assert len(one.done) == 1
        assert {commit.epoch for commit in one.commits} == {1}


async def test_a_save_longer_than_the_grace_is_out_of_time() -> None:
    async with job("abc", trains="abc", b=Loop(save_s=300)) as one:
        began = one.clock()
        line = await one.pods["b"].notice("sigterm", 5).last()
        assert 2.8 <= one.clock() - began < 5
        assert (line.outcome, one.done) == ("expired", [])
        drain = one.pods["b"].drain
        assert drain is not None
        await one.until(lambda: one.snapshot.drains["uid-b"].outcome == "expired")


async def test_i7_the_others_finish_their_save_after_the_deadline_of_one_that_has_saved() -> None:
    async with job("abc", trains="abc", a=Loop(save_s=5)) as one:
        stays, leaver = one.pods["a"], one.pods["b"]
        client = leaver.notice("sigterm", 6)
        await one.until(one.phase_is("commit"))
        stays.stop_ranks()
        outcome = await client.release()
        assert outcome == "expired"
        await leaver.kill()
        left = Node("b", "left", "n", 1, "127.0.0.1", 1, 0, left_reason="closed")
        await one.put(Put(HERE.run(RUN).node("b"), left.to_json()))
        began = one.clock()
        await stays.soon(lambda: one.clock() - began > 1)
        assert (one.commit.phase, one.snapshot.drains["uid-b"].outcome) == ("commit", "")
        stays.resume_ranks()
        await one.until(lambda: one.snapshot.drains["uid-b"].outcome != "")
        ((_, step),) = one.done
        drain = one.snapshot.drains["uid-b"]
        assert (drain.outcome, drain.step) == ("committed", step)
        assert [entry.details["outcome"] for entry in one.history()] == ["committed"]


async def test_a_step_longer_than_the_grace_is_out_of_time_and_stops_nobody() -> None:
    async with job("abc", trains="abc") as one:
        one.pods["c"].stop_ranks()
        # Its sidecar votes for a rank that is within a step: the save is agreed on, and not made.
        outcome = await one.pods["b"].notice("sigterm", 2).release()
        assert (outcome, one.done) == ("expired", [])
        one.pods["c"].resume_ranks()


@pytest.mark.parametrize("answers", [True, False])
async def test_while_the_store_is_away_the_end_of_the_time_is_told(answers: bool) -> None:
    async with job("ab", trains="ab") as one:
        if answers:
            one.pods["b"].cable.cut()
        else:
            one.pods["b"].cable.jam(HERE.drains)
        began = one.clock()
        client = one.pods["b"].notice("sigterm", 4)
        line = await client.last()
        assert 1.9 <= one.clock() - began < 4
        assert (line.name, line.outcome) == ("released", "expired")
        one.pods["b"].cable.mend()
        await one.until(lambda: one.pods["b"].drain is not None)


async def test_more_drains_may_end_at_once_than_one_transaction_holds() -> None:
    async with job("a") as one:
        drains = [Drain(f"uid-{n}", f"gone-{n}", "all go", "prestop", 1, 1) for n in range(100)]
        await one.put(*(Put(HERE.drain(drain.pod_uid), drain.to_json()) for drain in drains))
        await one.until(lambda: len(one.history()) == 100)
        assert {drain.outcome for drain in one.snapshot.drains.values()} == {"expired"}


async def test_two_pods_of_one_name_may_end_their_drains_at_once() -> None:
    """As where the node of the first has vanished, and the store was away over both deadlines."""
    async with job("a") as one:
        drains = [Drain(f"uid-{n}", "gone", "all go", "prestop", 1, 1) for n in range(2)]
        await one.put(*(Put(HERE.drain(drain.pod_uid), drain.to_json()) for drain in drains))
        await one.until(lambda: len(one.history()) == 2)
        assert {drain.outcome for drain in one.snapshot.drains.values()} == {"expired"}


async def test_a_pod_whose_container_alone_was_stopped_is_listed_again() -> None:
    """No preStop hook of the sidecar has run, as where a probe fails or somebody kills it."""
    async with job("ab", grace_s=1.1) as one:
        drained = one.pods["b"]
        for source in ("hold", "sigterm"):
            await drained.notice(source, 1).last()
        assert drained.drain is not None
        await one.until(lambda: drained.drain is None)
        await drained.soon(lambda: not drained.drains.own.active)
        assert [entry.details["outcome"] for entry in one.history()] == ["uncommitted", "cancelled"]


async def test_a_sidecar_that_alone_was_stopped_is_listed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent.drain.notice, "OUTLIVED_S", 1e6)
    async with job("ab") as one:
        drained = one.pods["b"]
        assert (await drained.notice("prestop").last()).outcome == "uncommitted"
        await drained.kill()
        await drained.start()
        assert drained.drains.own.active
        notes = drained.drains.own.notes
        assert notes is not None
        assert notes.deadline_boot_s is not None
        # It reckons anew when to look again: nothing but that timer can list it then.
        ahead_s = one.clock() - notes.deadline_boot_s + 1.0
        monkeypatch.setattr(agent.drain.notice, "OUTLIVED_S", ahead_s)
        drained.drains.own.wake()
        await one.until(lambda: drained.drain is None)
        await drained.soon(lambda: not drained.drains.own.active)
        await drained.soon(lambda: drained.kept() is None)
        outcomes = [entry.details["outcome"] for entry in one.history()]
        assert outcomes == ["uncommitted", "cancelled"]
        assert (await drained.notice("sigterm", 120).last()).outcome == "uncommitted"


@pytest.mark.parametrize("other", ["sigterm", "hold"])
async def test_a_pod_that_is_being_ended_stays_drained(
    other: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.drain.notice, "OUTLIVED_S", 0.1)
    async with job("ab", grace_s=1.1) as one:
        drained = one.pods["b"]
        await drained.notice("prestop").last()
        await drained.notice(other, 1).last()
        told = one.clock()
        await drained.soon(lambda: one.clock() - told > 1.5)
        assert drained.drain is not None


def asked_for(pod: Pod, source: str, left_s: float = 10) -> Put:
    asked = Drain(pod.uid, pod.name, "its node is cordoned", source, left_s, 2, source)
    return Put(HERE.drain(pod.uid), asked.to_json())


async def test_a_pod_that_outlives_the_deadline_of_a_sign_is_listed_again() -> None:
    """As a pod of a node that is cordoned, and that no eviction follows."""
    async with job("ab", trains="ab") as one:
        drained = one.pods["b"]
        await one.put(asked_for(drained, "controller"))
        await one.until(lambda: one.commit.granted == (drained.uid,))
        await one.until(lambda: drained.drain is None)
        await drained.soon(lambda: not drained.drains.own.active)
        assert [entry.details["outcome"] for entry in one.history()] == ["committed", "cancelled"]
        # The round that it left is over, whatever has become of the drain.
        assert (one.commit.granted, one.commit.admitted) == ((), True)


@pytest.mark.parametrize("by", ["operator", "taken over", "notice.sock"])
async def test_an_order_stays_until_it_is_cancelled(by: str) -> None:
    """A machine that somebody announced the end of may end later, without a sign of Kubernetes."""
    async with job("ab", trains="ab") as one:
        drained = one.pods["b"]
        if by == "notice.sock":
            drained.notice("control", 10)
        else:
            await one.put(asked_for(drained, "controller" if by == "taken over" else "operator"))
        await one.until(lambda: one.commit.granted == (drained.uid,))
        if by == "taken over":
            held = one.snapshot.drains[drained.uid]
            await one.put(Put(HERE.drain(drained.uid), replace(held, source="operator").to_json()))
        began = one.clock()
        await drained.soon(lambda: one.clock() - began > 60)
        assert drained.drain is not None
        planned = cancel(KEYS, one.snapshot, drained.uid)
        assert not isinstance(planned, str)
        assert (await MemoryStore(one.engine).txn(*planned)).succeeded
        await drained.soon(lambda: not drained.drains.own.active)
        # A later end is another drain: nothing of the first one is said of it.
        client = drained.notice("prestop", 20)
        assert (await client.last()).name == "released"


async def test_an_end_that_comes_after_the_grant_is_not_taken_back() -> None:
    async with job("ab", trains="ab") as one:
        drained = one.pods["b"]
        await one.put(asked_for(drained, "controller", 600))
        await one.until(lambda: one.commit.granted == (drained.uid,))
        await drained.notice("prestop", 20).last()
        await one.until(lambda: one.snapshot.drains[drained.uid].ends)
        assert "is being ended" in str(cancel(KEYS, one.snapshot, drained.uid))


def notice(source: str, left_s: float | None) -> Notice:
    return Notice(source, "why", left_s)  # type: ignore[arg-type]


def due_boot_s(notes: OwnDrainRecord) -> float:
    assert notes.deadline_boot_s is not None
    return notes.deadline_boot_s - notes.reserve_s


def test_the_reserve_is_a_third_of_a_short_grace_and_at_least_a_second() -> None:
    assert [reserve_s(grace_s) for grace_s in (1, 5, 15, 30, 600)] == [1, 5 / 3, 5, 5, 5]


def noticed(notes: OwnDrainRecord, another: Notice, now_boot_s: float) -> OwnDrainRecord:
    return notes.joined(OwnDrainRecord.of_notice("uid", another, now_boot_s, 30))


def test_the_earliest_deadline_counts_with_its_own_reserve() -> None:
    notes = OwnDrainRecord.of_notice("uid", notice("control", 600), 100, 30)
    assert due_boot_s(notes) == 695
    sooner = noticed(notes, notice("sigterm", 5), 100)
    assert due_boot_s(sooner) == pytest.approx(105 - 5 / 3)
    assert sooner.sources == ("control", "sigterm")
    assert due_boot_s(noticed(sooner, notice("prestop", None), 100)) == due_boot_s(sooner)


def test_a_notice_that_is_repeated_changes_nothing() -> None:
    notes = OwnDrainRecord.of_notice("uid", notice("sigterm", 30), 100, 30)
    for left_s in (29, 12, 3, 0.5):
        again = noticed(notes, notice("sigterm", left_s), 130 - left_s - 0.1)
        assert again == notes


def test_an_operators_drain_without_end_takes_the_time_of_a_notice() -> None:
    notes = OwnDrainRecord("uid", ("operator",), "by hand", None, 0)
    assert due_boot_s(noticed(notes, notice("prestop", None), 50)) == 75


def test_notes_survive_the_file() -> None:
    now_s = boot_s()
    notes = OwnDrainRecord.of_notice("uid", notice("sigterm", 30), now_s, 30)
    assert OwnDrainRecord.from_json(notes.to_json()) == notes
    assert notes.outlived_boot_s == now_s + 30 + agent.drain.notice.OUTLIVED_S
    assert math.isclose(notes.record("a", now_s).seconds_left or 0, 30, abs_tol=0.1)


async def test_while_the_job_is_finishing_a_pod_has_its_whole_grace_and_nothing_to_save() -> None:
    async with job("ab", trains="ab", b=Loop(save_s=300)) as one:
        key = HERE.run(RUN).round
        current = Round.from_kv(one.mirror.kvs[key])
        await one.put(Put(key, replace(current, finishing=True).to_json()))
        began = one.clock()
        client = one.pods["b"].notice("sigterm", 30)
        line = await client.last()
        assert 28 <= one.clock() - began < 30
        assert "finishing" in client.phases
        assert line.outcome == "uncommitted"
        assert "nothing is to be saved" in line.sentence
        assert one.done == []
        await one.until(lambda: one.snapshot.drains["uid-b"].outcome == "uncommitted")
