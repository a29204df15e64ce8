# SPDX-License-Identifier: Apache-2.0
"""Drains from the notice to the release, with ranks that are real processes."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from functools import partial
from itertools import permutations

import pytest

import agent.parts
from agent.drain.notice import Source
from rdzv.drain.inputs import DrainPolicy
from rdzv.drain.transactions import cancel, take_over
from rdzv.records.drain import Drain
from rdzv.store import Delete, Put
from rdzv.store.interface import Interval
from rdzv.store.memory.client import MemoryStore
from tests.support.sidecars.drains import HERE, RUN, Job, Pod, job
from tests.support.sidecars.jobs import KEYS, begin_next_life
from tests.support.sidecars.ranks import Loop

pytestmark = pytest.mark.virtual

SLOW_SAVE = Loop(save_s=0.4)


def committed_step(one: Job) -> int:
    """The one step that has been committed, and that every rank has saved last."""
    ((_, step),) = one.done
    return step


async def test_all_save_the_same_step_and_the_pod_is_let_go() -> None:
    async with job("abc", trains="abc") as one:
        last = await one.pods["b"].notice("sigterm", 120).last()
        step = committed_step(one)
        assert (last.outcome, last.step) == ("committed", step)
        drain = one.pods["b"].drain
        assert drain is not None
        assert (drain.outcome, drain.step, drain.source) == ("committed", step, "sigterm")
        (entry,) = one.history()
        assert entry.member == "b"
        assert {"outcome": "committed", "step": step}.items() <= entry.details.items()
        assert "took_s" in entry.details
        await one.form("ac")
        await one.training()
        assert one.pods["a"].steps("begin") == [step]
        assert (one.pods["c"].steps("step"))[0] == step + 1


async def test_i7_when_sigterm_is_released_every_acknowledgement_is_on_record() -> None:
    async with job("abc", trains="abc", loop=Loop(save_s=0.1)) as one:
        client = one.pods["b"].notice("sigterm", 120)
        assert (await client.last()).outcome == "committed"
        told = client.told[-1]
        assert told.last_commit is not None
        assert {name: vote.acked for name, vote in told.votes.items()} == dict.fromkeys(
            "abc", told.last_commit.step
        )


async def test_i2_no_watched_snapshot_lists_a_member_after_its_drain_began() -> None:
    async with job("abc") as one:
        looks = 0

        def looked(events: object) -> None:
            nonlocal looks
            looks += 1

        await one.form("abc", loop=SLOW_SAVE)
        await one.training()
        client = one.pods["c"].notice("sigterm", 120)
        await one.until(lambda: one.pods["c"].drain is not None)
        for pod in one.pods.values():
            pod.mirror.subscribe(looked)
        await client.release()
        await one.form("ab")
        await one.goes_on()
        # Each pod's mirror is looked at with every batch, and whoever was listed wrongly is found
        # at the end of this test, as of every other.
        assert looks > 10
        assert one.drained == {"uid-c"}


@pytest.mark.parametrize("seed", range(3))
async def test_i3_two_processes_in_each_of_two_pods_save_the_same_step(seed: int) -> None:
    async with job("ab") as one:
        one.number += seed
        await one.form("ab", a=Loop(step_s=0.004, ranks=2), b=Loop(step_s=0.03, ranks=2))
        await one.training(2 + seed)
        await one.pods["b"].notice("sigterm", 120).release()
        step = committed_step(one)
        for name in "ab":
            for local_rank in (0, 1):
                assert one.pods[name].steps("save", None, local_rank) == [step]


@pytest.mark.parametrize("order", list(permutations(["prestop", "sigterm", "hold"]))[::2])
async def test_notices_in_any_order_are_one_drain(order: tuple[Source, ...]) -> None:
    async with job("ab", trains="ab") as one:
        clients = [
            one.pods["b"].notice(source, None if source == "prestop" else 25) for source in order
        ]
        clients += [one.pods["b"].notice("control", 3600) for _ in range(2)]
        lines = [await client.last() for client in clients]
        assert {line.outcome for line in lines} == {"committed"}
        committed_step(one)
        drain = one.pods["b"].drain
        assert drain is not None
        assert drain.seconds_left is not None
        assert 15 < drain.seconds_left <= 30
        assert [entry.member for entry in one.history()] == ["b"]


async def test_an_earlier_deadline_shortens_the_drain_in_every_sidecar() -> None:
    async with job("ab", least=2, trains="ab") as one:
        first = one.pods["b"].notice("control", 600)
        await one.until(lambda: one.commit.phase in ("done", "idle") and one.commit.epoch > 0)
        assert first.phases[-1] != "released"
        second = one.pods["b"].notice("sigterm", 3)
        assert (await second.last()).outcome in ("committed", "expired")
        assert await first.last() == await second.last()
        await one.until(lambda: (now := one.pods["b"].drain) is not None and now.reserve_s == 1)
        drain = one.pods["b"].drain
        assert drain is not None
        assert drain.seconds_left is not None
        assert drain.seconds_left <= 3


async def test_an_operators_drain_is_told_to_whoever_asks_later() -> None:
    async with job("ab", trains="ab") as one:
        drain = replace(_by_hand("b"), seconds_left=60.0)
        await one.put(Put(HERE.drain(drain.pod_uid), drain.to_json()))
        assert await one.pods["b"].notice("sigterm", 120).release() == "committed"
        committed_step(one)


def _by_hand(name: str) -> Drain:
    return Drain(f"uid-{name}", name, "by hand", "operator", reserve_s=5, requested_by="me@here")


async def test_a_drain_that_comes_during_a_save_is_served_by_it() -> None:
    async with job("abcd", trains="abcd", loop=SLOW_SAVE) as one:
        first = one.pods["a"].notice("sigterm", 120)
        await one.until(one.phase_is("commit"))
        second = one.pods["c"].notice("sigterm", 120)
        assert await first.release() == "committed"
        assert await second.release() == "committed"
        committed_step(one)
        assert one.commit.epoch == 1


async def test_a_newcomer_is_let_in_after_a_save() -> None:
    async with job("abc", trains="ab") as one:
        await one.ask("c")
        await one.until(lambda: one.commit.admitted)
        step = committed_step(one)
        await one.form("abc")
        await one.training()
        assert {(pod.steps("begin"))[0] for pod in one.pods.values()} == {step}


async def test_a_script_that_takes_no_part_is_let_go_without_a_save() -> None:
    async with job("ab") as one:
        await one.form("ab", b=Loop(drains=False))
        await one.pods["a"].soon(lambda: len(one.pods["a"].steps("step")) > 2)
        outcome = await one.pods["a"].notice("sigterm", 120).release()
        assert (outcome, one.done) == ("uncommitted", [])
        assert one.commit.refused


async def test_a_pod_in_no_round_is_let_go_at_once() -> None:
    async with job("abc", trains="ab") as one:
        outcome = await one.pods["c"].notice("sigterm", 120).release()
        assert (outcome, one.commit.epoch) == ("uncommitted", 0)
        await one.goes_on()


async def test_a_client_that_goes_away_leaves_its_notice_behind() -> None:
    async with job("ab") as one:
        client = one.pods["b"].notice("sigterm", 20)
        await one.until(lambda: one.pods["b"].drain is not None)
        client.leave()
        await one.until(lambda: one.snapshot.drains["uid-b"].outcome == "uncommitted")


async def test_a_save_that_comes_to_nothing_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.parts, "DrainPolicy", partial(DrainPolicy, pause_s=0.2))
    async with job("ab", trains="ab", a=Loop(save_errors=2)) as one:
        outcome = await one.pods["b"].notice("sigterm", 120).release()
        assert outcome == "committed"
        assert one.commit.epoch == 3
        assert len(one.pods["a"].steps("error")) == 2
        step = committed_step(one)
        assert (one.pods["b"].steps("save"))[-1] == step


async def test_a_rank_whose_save_raises_fails_the_attempt_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent.parts, "DrainPolicy", partial(DrainPolicy, pause_s=300))
    async with job("ab", trains="ab", a=Loop(save_errors=1, save_errors_end_it=True)) as one:
        client = one.pods["b"].notice("sigterm", 60)
        await one.until(one.phase_is("void"))
        assert "OSError: no space left" in one.commit.reason
        one.pods["b"].notice("sigterm", 2)
        assert await client.release() == "expired"
        assert one.done == []


async def test_cancelled_before_it_is_granted_training_goes_on() -> None:
    async with job("ab", trains="ab", loop=Loop(save_s=2)) as one:
        client = one.pods["b"].notice("control", 120)
        await one.until(one.phase_is("commit"))
        await _cancel(one, "b")
        assert (await client.last()).name == "cancelled"
        await one.until(lambda: one.commit.phase in ("void", "idle"))
        await one.goes_on()
        assert one.pods["b"].kept() is None
        again = one.pods["b"].notice("sigterm", 120)
        assert await again.release() == "committed"


async def test_the_end_of_the_pod_outlives_the_cancellation_of_what_an_operator_asked_for() -> None:
    """Its sidecar is told of the end while it does not see yet that the other drain is gone."""
    async with job("ab", trains="ab", loop=Loop(save_s=2)) as one:
        leaver = one.pods["b"]
        asked = Drain(leaver.uid, "b", "for a reason", "operator", 120, 5, requested_by="ops")
        await one.put(Put(HERE.drain(leaver.uid), asked.to_json()))
        await one.until(one.phase_is("commit"))
        leaver.cable.cut()
        await _cancel(one, "b")
        client = leaver.notice("sigterm", 60)
        await leaver.soon(lambda: client.told)
        leaver.cable.mend()
        assert await client.release() == "committed"
        assert leaver.kept() is not None


async def test_a_drain_that_is_taken_over_with_less_time_has_that_time() -> None:
    async with job("ab", least=2, trains="ab") as one:
        leaver = one.pods["b"]
        asked = Drain(leaver.uid, "b", "a taint", "controller", 600, 5, requested_by="controller")
        await one.put(Put(HERE.drain(leaver.uid), asked.to_json()))
        await leaver.soon(lambda: leaver.drains.own.active)
        theirs = replace(asked, source="operator", seconds_left=60, requested_by="ops")
        planned = take_over(KEYS, one.snapshot, theirs)
        assert planned is not None
        assert (await MemoryStore(one.engine).txn(*planned)).succeeded
        soonest = one.clock() + 60

        def has_that_time() -> bool:
            due_s = leaver.drains.own.due_boot_s
            return due_s is not None and due_s < soonest

        await leaver.soon(has_that_time)


async def _cancel(one: Job, name: str) -> None:
    while True:
        planned = cancel(KEYS, one.snapshot, one.pods[name].uid)
        assert not isinstance(planned, str), planned
        result = await MemoryStore(one.engine).txn(*planned)
        if result.succeeded:
            return
        await one.mirror.reached(result.revision)


async def test_a_drain_goes_on_in_the_jobs_next_life() -> None:
    async with job("ab", least=2, trains="ab") as one:
        client = one.pods["b"].notice("sigterm", 60)
        await one.until(lambda: one.pods["b"].drain is not None)
        assert one.snapshot.job is not None
        await begin_next_life(MemoryStore(one.engine), KEYS, one.snapshot.job)
        await one.until(lambda: one.snapshot.job is not None and one.snapshot.job.generation == 2)
        await one.until(lambda: one.pods["b"].drain is not None)
        drain = one.pods["b"].drain
        assert drain is not None
        assert drain.seconds_left is not None
        assert drain.seconds_left < 60
        # Nothing has been trained in this life.
        assert await client.release() == "uncommitted"


async def test_a_drain_outlives_a_store_that_is_emptied() -> None:
    async with job("abc", trains="abc", loop=replace(SLOW_SAVE, save_s=0.8)) as one:
        client = one.pods["b"].notice("sigterm", 120)
        await one.until(one.phase_is("commit"))
        await one.lose_store()
        await one.until(lambda: one.pods["b"].drain is not None)
        round_key = HERE.run(RUN).round
        await one.until(lambda: round_key in one.mirror.kvs)
        assert await client.release() == "committed"


async def test_the_outcome_of_a_drain_outlives_a_store_that_is_emptied() -> None:
    async with job("abc", trains="abc") as one:
        step = (await one.pods["b"].notice("control", 3600).last()).step
        await one.form("ac")
        await one.training()
        await one.lose_store()
        key = Interval.of(HERE.drain(one.pods["b"].uid), prefix=True)
        await one.until(lambda: bool(one.engine.read(key)))
        await one.goes_on()
        await asyncio.sleep(30)
        (drain,) = map(Drain.from_kv, one.engine.read(key))
        assert (drain.outcome, drain.step) == ("committed", step)
        assert one.history() == [], "its end is not announced once more"


async def test_a_drain_that_nobody_has_cancelled_outlives_a_store_that_has_come_as_far_again() -> (
    None
):
    """Restored to before the drain, its revision is no lower than that of the drain's record."""
    async with job("abc", trains="abc", loop=SLOW_SAVE) as one:
        client = one.pods["b"].notice("sigterm", 120)
        await one.until(one.phase_is("commit"))
        await one.put(Delete(HERE.drain(one.pods["b"].uid)))
        assert await client.release() == "committed"


async def test_what_was_saved_before_the_store_was_emptied_does_not_count_after() -> None:
    async with job("abc", trains="abc", b=Loop(save_s=3)) as one:
        client = one.pods["b"].notice("sigterm", 60)
        await one.until(lambda: len(one.pods["a"].membership.votes()) == 3)
        await one.pods["a"].soon(partial(one.pods["a"].steps, "save"))
        await one.lose_store()
        assert await client.release() == "committed"
        assert (one.commit.epoch, one.commit.failures) == (2, 0)


def phase_shown(pod: Pod, phase: str) -> bool:
    return pod.shown() == phase


async def test_i3_a_world_that_has_let_somebody_in_stands_still_in_a_store_that_has_lost_that() -> (
    None
):
    async with job("abc", trains="ab") as one:
        await one.ask("c")
        await one.until(lambda: one.commit.admitted)
        a, b = one.pods["a"], one.pods["b"]
        for pod in (a, b):
            await pod.soon(partial(phase_shown, pod, "done"))
            pod.cable.jam(HERE.commit)  # it is put back late
        # As if it were restored to before the join.
        await one.put(Delete(HERE.commit), Delete(KEYS.last_commit))
        await asyncio.sleep(30)
        assert not one.commit.admitted
        assert (a.shown(), b.shown()) == ("done", "done")
        for pod in (a, b):
            pod.cable.mend()
        await one.until(lambda: one.commit.admitted)
        # Beyond the step that was saved nobody has trained: that is looked at in each test.


async def test_a_sidecar_says_what_an_operator_wants_to_know(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        async with job("a", below_min="commit") as one:
            await one.form("a")
            await one.training()
            await one.pods["a"].notice("sigterm", 20.02, "the node is drained").release()
            step = committed_step(one)
    said = [
        r.getMessage() for r in caplog.records if r.name.startswith(("agent.", "rdzv.reconcile"))
    ]
    told = r"draining, this pod has to go within (1[5-9]|20)\.\d s \(sigterm\): the node is drained"
    assert re.fullmatch(told, said[0])
    assert said[1:5] == [
        "the gate is hold: holding the ranks: a leaves",
        f"votes in epoch 1: step {step}",
        f"the gate is commit: all save step {step}: a leaves",
        f"all ranks saved step {step}",
    ]
    # Who holds SIGTERM is told first.
    rest = [sentence for sentence in said[5:] if not sentence.startswith("the gate is done: ")]
    assert rest == [f"a may go: all ranks saved step {step}"]
