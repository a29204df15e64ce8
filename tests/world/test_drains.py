# SPDX-License-Identifier: Apache-2.0
"""Drains from the notice to the release, beside whatever else happens.

That all ranks save one step, that it is on record before anybody goes, and that the next world
begins there, is looked at in each (I2, I3, I7, I10).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations

import pytest

from agent.drain.notice import Source
from rdzv.drain.transactions import cancel, change, take_over
from rdzv.records.drain import Drain
from rdzv.store import Delete, Put
from rdzv.store.memory.client import transact
from tests.simulation.nodes import KEYS
from tests.world.world import HERE, Job, ScriptedPod, World


async def test_i1_two_leave_while_one_joins(world: World) -> None:
    job = await world.job("abc", least=2)
    await job.trains(20)
    job["a"].sigterm(grace_s=30)
    job["b"].sigterm(grace_s=30)
    job.add("d")
    await job.settles()
    assert job.lost == 0
    assert job.world == "cd"


async def test_two_leaves_at_once_are_one_save_and_one_new_round(world: World) -> None:
    job = await world.job("abcd")
    await job.trains()
    job["a"].sigterm(grace_s=120)
    job["c"].sigterm(grace_s=120)
    await job.ends("a", "c")
    await job.settles()
    assert (job.formed, job.lost, len(set(job.done))) == (["abcd", "bd"], 0, 1)


async def test_a_leave_and_a_replacement_are_one_new_round(world: World) -> None:
    job = await world.job("abc", least=3)
    await job.trains()
    job["b"].sigterm(grace_s=600)
    job.when(lambda: job.commit.phase == "hold", lambda: job.add("d"))
    await job.ends("b")
    await job.settles()
    assert (job.formed, job.lost) == (["abc", "acd"], 0)


async def test_a_second_leave_while_the_others_form_again_keeps_nobody_waiting(
    world: World,
) -> None:
    job = await world.job("abcd")
    await job.trains()
    job["a"].sigterm(grace_s=120)
    job.when(lambda: not job.world, lambda: job["b"].sigterm(grace_s=120))
    await job.ends("a", "b")
    await job.settles()
    assert (job.world, job.lost) == ("cd", 0)


async def test_a_loss_during_a_drain_forms_a_world_without_the_leaver(world: World) -> None:
    job = await world.job("abcd")
    await job.trains()
    job["b"].training.save_s = (20.0, 20.0)
    job["b"].sigterm(grace_s=120)
    await job.phase("commit")
    job["a"].end_container()
    await job.until(lambda: job.world == "cd")
    await job.ends("b")
    assert job.formed == ["abcd", "cd"]


@pytest.mark.parametrize("how", ["rejoin", "fail"])
async def test_a_leaver_that_asks_or_closes_the_run_is_parked_and_closes_nothing(
    world: World, how: str
) -> None:
    """As torch 2.3 to 2.7 closes at SIGTERM, and any torch whose workers failed for good."""
    job = await world.job("abc")
    await job.trains()
    job["b"].training.save_s = (20.0, 20.0)
    job["b"].drained(120)
    await job.phase("commit")
    job["b"].order(how)
    await job.until(lambda: job.world == "ac")
    await job.passes(20)
    assert job.formed == ["abc", "ac"]
    assert not job.invariants.rounds.round.closed
    if how == "rejoin" and not job["b"].outcome:
        job.cancel("b")
        await job.until(lambda: job.world == "abc")


async def test_all_save_one_step_and_the_pod_goes(world: World) -> None:
    job = await world.job("abc")
    await job.trains()
    job["b"].sigterm(grace_s=120)
    await job.ends("b")
    (step,) = set(job.done)
    assert (job["b"].outcome, job["b"].phases[-1]) == ("committed", "saved")
    (entry,) = job.history()
    assert entry.member == "b"
    assert {"outcome": "committed", "step": step}.items() <= entry.details.items()
    assert "took_s" in entry.details
    await job.trains()
    assert (job.world, job["a"].start_step, job.lost) == ("ac", step, 0)


@pytest.mark.parametrize("order", list(permutations(["prestop", "sigterm", "hold"]))[::2])
async def test_notices_in_any_order_are_one_drain(world: World, order: tuple[Source, ...]) -> None:
    job = await world.job("ab", least=1)
    await job.trains()
    job["b"].drained(3600)
    for source in order:
        job["b"].notify(source, None if source == "prestop" else 25)
    await job.until(lambda: job["b"].outcome)
    drain = job["b"].drain
    assert drain is not None
    assert drain.seconds_left is not None
    assert 15 < drain.seconds_left <= 30
    assert [(entry.member, entry.details["outcome"]) for entry in job.history()] == [
        ("b", "committed")
    ]
    assert len(set(job.done)) == 1


async def test_an_earlier_deadline_shortens_the_drain_in_every_sidecar(world: World) -> None:
    job = await world.job("ab", least=2)
    await job.trains()
    job["b"].drained(600)
    await job.phase("done")
    began_s = job.loop.time()
    job["b"].notify("sigterm", 3)
    await job.until(lambda: job["b"].outcome)
    assert job.loop.time() - began_s <= 3
    await job.until(lambda: (drain := job["b"].drain) is not None and drain.reserve_s == 1)


def asked(pod: ScriptedPod, source: Source | str = "operator", left_s: float = 60.0) -> Put:
    drain = Drain(pod.pod_uid, pod.name, "by hand", source, left_s, 2, requested_by="me@here")
    return Put(HERE.drain(pod.pod_uid), drain.to_json())


async def test_an_operators_drain_is_told_to_whoever_asks_later(world: World) -> None:
    job = await world.job("ab")
    await job.trains()
    job.put(asked(job["b"]))
    job["b"].sigterm(grace_s=120)
    await job.ends("b")
    assert job["b"].outcome == "committed"
    assert len(set(job.done)) == 1


async def test_a_drain_that_comes_during_a_save_is_served_by_it(world: World) -> None:
    job = await world.job("abcd")
    await job.trains()
    job["a"].sigterm(grace_s=120)
    await job.phase("commit")
    job["c"].sigterm(grace_s=120)
    await job.ends("a", "c")
    assert (job["a"].outcome, job["c"].outcome, job.commit.epoch) == ("committed",) * 2 + (1,)


async def test_a_newcomer_is_let_in_after_a_save(world: World) -> None:
    job = await world.job("ab")
    await job.trains()
    job.add("c")
    await job.until(lambda: job.commit.admitted)
    await job.until(lambda: job.world == "abc")
    await job.trains()
    assert {job[name].start_step for name in "abc"} == {job.done[-1]}


async def test_a_script_that_takes_no_part_is_let_go_without_a_save(world: World) -> None:
    job = await world.job("ab")
    job["b"].training.takes_part = False
    await job.trains()
    job["a"].sigterm(grace_s=120)
    await job.ends("a")
    assert (job["a"].outcome, job.done) == ("uncommitted", [])
    assert any(commit.refused for commit in job.commits)


async def test_a_spare_is_let_go_at_once(world: World) -> None:
    job = await world.job("abc", most=2)
    await job.trains()
    await job.until(lambda: len(job.snapshot.members) == 3)
    (spare,) = set("abc") - set(job.world)
    job[spare].sigterm(grace_s=3600)
    await job.ends(spare)
    assert (job[spare].outcome, job.commit.epoch) == ("uncommitted", 0)


async def test_a_save_that_comes_to_nothing_is_tried_again(world: World) -> None:
    job = await world.job("ab")
    await job.trains()
    job["a"].training.save_errors = 2
    job["b"].sigterm(grace_s=300)
    await job.phase("void")
    assert "the disk is full" in job.commit.reason
    await job.ends("b")
    assert (job["b"].outcome, job.commit.epoch, len(set(job.done))) == ("committed", 3, 1)


async def test_cancelled_before_it_is_granted_training_goes_on(world: World) -> None:
    job = await world.job("ab")
    await job.trains()
    job["b"].training.save_s = (2.0, 2.0)
    job["b"].drained(120)
    await job.phase("commit")
    job.cancel("b")
    await job.until(lambda: job.commit.phase in ("void", "idle"))
    await job.until(lambda: not job["b"].terminating)
    assert job["b"].run_dir.content("drain.json") is None
    await job.trains()
    assert job.formed == ["ab"]
    job["b"].sigterm(grace_s=120)
    await job.ends("b")
    assert job["b"].outcome == "committed"


async def test_the_end_of_a_pod_outlives_the_cancellation_of_what_an_operator_asked_for(
    world: World,
) -> None:
    """Its sidecar is told of the end while it does not see yet that the other drain is gone."""
    job = await world.job("ab")
    await job.trains()
    job["b"].training.save_s = (2.0, 2.0)
    job.put(asked(job["b"], left_s=120.0))
    await job.phase("commit")
    job["b"].cut()
    job.cancel("b")
    job["b"].sigterm(grace_s=60)
    await job.passes(0.5)
    job["b"].mend()
    await job.ends("b")
    assert job["b"].outcome == "committed"


async def test_a_drain_that_is_taken_over_with_less_time_has_that_time(world: World) -> None:
    job = await world.job("ab", least=2)
    await job.trains()
    job.put(asked(job["b"], "controller", 600.0))
    sidecar = job["b"].sidecar
    assert sidecar is not None
    await job.until(lambda: sidecar.own.active)
    theirs = replace(job.snapshot.drains[job["b"].pod_uid], source="operator", seconds_left=60.0)
    planned = take_over(KEYS, job.snapshot, theirs)
    assert planned is not None
    assert transact(job.engine, *planned).succeeded
    soonest_s = sidecar.clock() + 60
    await job.until(lambda: (due_s := sidecar.own.due_boot_s) is not None and due_s < soonest_s)


async def test_i10_below_min_nobody_is_released_before_its_deadline(world: World) -> None:
    job = await world.job("ab", least=2)
    await job.trains()
    began_s = job.loop.time()
    job["b"].sigterm(grace_s=15)
    await job.until(lambda: job["b"].outcome)
    # The reserve of so short a grace is a third of it.
    assert 9.9 <= job.loop.time() - began_s < 11
    assert job["b"].phases[-1] == "saved"
    assert set(job.done) <= job["b"].saved()


async def test_below_min_a_pod_in_which_nothing_was_trained_goes_at_once(world: World) -> None:
    job = await world.job("a", least=2)
    await job.until(lambda: job.snapshot.members)
    job["a"].sigterm(grace_s=3600)
    await job.ends("a")
    assert job["a"].outcome == "uncommitted"


async def test_i10_it_is_released_at_once_where_the_policy_says_so(world: World) -> None:
    job = await world.job("ab", least=2, below_min="commit")
    await job.trains()
    job["b"].sigterm(grace_s=3600)
    await job.ends("b")
    assert job["b"].outcome == "committed"


async def test_i10_a_replacement_lets_it_go_once_its_launcher_asks(world: World) -> None:
    job = await world.job("ab", least=2, launchers={"c": "absent"})
    await job.trains()
    job["b"].sigterm(grace_s=3600)
    await job.phase("done")
    job.add("c")
    await job.until(lambda: "c" in job.snapshot.members)
    await job.passes(30)
    assert not job["b"].gone
    del job.launchers["c"]
    job["c"].start_container()
    await job.ends("b")
    assert job["b"].outcome == "committed"
    await job.settles()
    assert (job.world, job.lost) == ("ac", 0)


async def test_i10_a_pod_that_makes_room_waits_for_no_replacement(world: World) -> None:
    job = await world.job("ab", least=2)
    await job.trains()
    job["b"].sigterm(grace_s=3600)
    await job.phase("done")
    assert not job["b"].gone
    held = job["b"].drain
    assert held is not None
    transact(job.engine, *change(KEYS, job.snapshot, replace(held, preempted=True)))
    await job.ends("b")
    assert job["b"].outcome == "committed"


async def test_i10_when_every_member_is_drained_all_save_and_go(world: World) -> None:
    job = await world.job("ab")
    await job.trains()
    for name in "ab":
        job[name].sigterm(grace_s=3600)
    await job.ends("a", "b")
    assert [job[name].outcome for name in "ab"] == ["committed", "committed"]
    assert (len(set(job.done)), {commit.epoch for commit in job.commits}) == (1, {1})


async def test_a_save_longer_than_the_grace_is_out_of_time(world: World) -> None:
    job = await world.job("abc")
    await job.trains()
    job["b"].training.save_s = (300.0, 300.0)
    began_s = job.loop.time()
    job["b"].sigterm(grace_s=15)
    await job.until(lambda: job["b"].outcome)
    assert 9.9 <= job.loop.time() - began_s < 15
    assert (job["b"].outcome, job.done) == ("expired", [])
    await job.until(lambda: [entry.details["outcome"] for entry in job.history()] == ["expired"])


async def test_i7_the_others_finish_their_save_after_the_deadline_of_one_that_has_saved(
    world: World,
) -> None:
    job = await world.job("abc")
    await job.trains()
    job["a"].training.save_s = (12.0, 12.0)
    job["b"].sigterm(grace_s=15)
    await job.ends("b")
    assert (job["b"].outcome, job.commit.phase) == ("expired", "commit")
    await job.until(lambda: job.history())
    (entry,) = job.history()
    assert (entry.details["outcome"], entry.details["step"]) == ("committed", job.done[-1])
    await job.settles()
    assert job.lost == 0


async def test_a_step_longer_than_the_grace_is_out_of_time_and_stops_nobody(world: World) -> None:
    job = await world.job("abc")
    await job.trains()
    job["c"].training.goes.clear()
    job["b"].sigterm(grace_s=2)
    await job.ends("b")
    assert (job["b"].outcome, job.done) == ("expired", [])
    job["c"].training.goes.set()
    await job.settles()


@pytest.mark.parametrize("answers", [True, False])
async def test_while_the_store_is_away_the_end_of_the_time_is_told(
    world: World, answers: bool
) -> None:
    job = await world.job("ab")
    await job.trains()
    if answers:
        job["b"].cut()
    else:
        job["b"].refuse_writes(HERE.drains)
    began_s = job.loop.time()
    job["b"].sigterm(grace_s=9)
    await job.until(lambda: job["b"].outcome)
    assert 5.9 <= job.loop.time() - began_s < 9
    assert job["b"].outcome == "expired"


async def test_more_drains_may_end_at_once_than_one_transaction_holds(world: World) -> None:
    """Also of pods of one name, as where the node of the first has vanished."""
    job = await world.job("a")
    await job.trains()
    drains = [Drain(f"uid-{n}", f"gone-{n // 2}", "all go", "prestop", 1, 1) for n in range(100)]
    job.put(*(Put(HERE.drain(drain.pod_uid), drain.to_json()) for drain in drains))
    await job.until(lambda: len(job.history()) == 100)
    assert {drain.outcome for drain in job.snapshot.drains.values()} == {"expired"}


async def test_a_pod_whose_container_alone_was_stopped_is_listed_again(world: World) -> None:
    """No preStop hook of the sidecar has run, as where a probe fails or somebody kills it."""
    job = await world.job("ab", grace_s=1.1)
    await job.trains()
    for source in ("hold", "sigterm"):
        job["b"].notify(source, 1)
    await job.until(lambda: job["b"].drain is not None)
    await job.until(lambda: job["b"].drain is None)
    assert [entry.details["outcome"] for entry in job.history()][-1] == "cancelled"
    await job.settles()
    assert job.world == "ab"


@pytest.mark.parametrize("other", ["sigterm", "hold"])
async def test_a_pod_that_is_being_ended_stays_drained(world: World, other: Source) -> None:
    job = await world.job("ab", grace_s=1.1)
    await job.trains()
    job["b"].notify("prestop")
    job["b"].notify(other, 1)
    await job.until(lambda: job["b"].drain is not None)
    await job.passes(60)
    assert job["b"].drain is not None


async def test_a_sidecar_that_alone_was_stopped_is_listed_again(world: World) -> None:
    job = await world.job("ab")
    await job.trains()
    job["b"].notify("prestop")
    await job.until(lambda: (drain := job["b"].drain) is not None and drain.outcome)
    job["b"].restart()
    await job.until(lambda: job["b"].drain is None)
    await job.until(lambda: job["b"].run_dir.content("drain.json") is None)
    assert [entry.details["outcome"] for entry in job.history()] == ["committed", "cancelled"]
    await job.settles()
    assert job.world == "ab"


async def test_a_pod_that_outlives_the_deadline_of_a_sign_is_listed_again(world: World) -> None:
    """As a pod of a node that is cordoned, and that no eviction follows."""
    job = await world.job("ab")
    await job.trains()
    job.put(asked(job["b"], "controller", 10.0))
    await job.until(lambda: job.commit.granted == (job["b"].pod_uid,))
    await job.until(lambda: job["b"].drain is None)
    assert [entry.details["outcome"] for entry in job.history()] == ["committed", "cancelled"]
    await job.settles()
    assert (job.world, job.lost) == ("ab", 0)


@pytest.mark.parametrize("by", ["operator", "taken over", "notice.sock"])
async def test_an_order_stays_until_it_is_cancelled(world: World, by: str) -> None:
    """A machine that somebody announced the end of may end later, without a sign of Kubernetes."""
    job = await world.job("ab")
    await job.trains()
    pod = job["b"]
    if by == "notice.sock":
        pod.notify("control", 10)
    else:
        job.put(asked(pod, "controller" if by == "taken over" else "operator", 10.0))
    await job.until(lambda: job.commit.granted == (pod.pod_uid,))
    if by == "taken over":
        held = job.snapshot.drains[pod.pod_uid]
        job.put(Put(HERE.drain(pod.pod_uid), replace(held, source="operator").to_json()))
    await job.passes(60)
    assert pod.drain is not None
    job.cancel("b")
    await job.settles()
    assert job.world == "ab"
    # A later end is another drain: nothing of the first one is said of it.
    pod.sigterm(grace_s=30)
    await job.ends("b")
    assert (pod.outcome, job.lost) == ("committed", 0)


async def test_an_end_that_comes_after_the_grant_is_not_taken_back(world: World) -> None:
    job = await world.job("ab")
    await job.trains()
    pod = job["b"]
    job.put(asked(pod, "controller", 600.0))
    await job.until(lambda: job.commit.granted == (pod.pod_uid,))
    pod.notify("prestop", 20)
    await job.until(lambda: job.snapshot.drains[pod.pod_uid].ends)
    assert "is being ended" in str(cancel(KEYS, job.snapshot, pod.pod_uid))


async def test_a_drain_whose_record_the_store_has_lost_goes_on(world: World) -> None:
    """Restored to before the drain, its revision is no lower than that of the drain's record."""
    job = await world.job("abc")
    await job.trains()
    job["b"].training.save_s = (0.4, 0.4)
    job["b"].sigterm(grace_s=120)
    await job.phase("commit")
    job.put(Delete(HERE.drain(job["b"].pod_uid)))
    await job.ends("b")
    assert job["b"].outcome == "committed"


@pytest.mark.parametrize("lost", ["amid the save", "after it"])
async def test_a_drain_outlives_a_store_that_has_lost_it(world: World, lost: str) -> None:
    job = await world.job("abc")
    await job.trains()
    backup = job.engine.backup()
    job["b"].training.save_s = (1.0, 1.0)
    if lost == "amid the save":
        job["b"].sigterm(grace_s=120)
        await job.until(lambda: job.commit.phase == "commit" and job["a"].saved())
        job.lose_store(backup)
        await job.ends("b")
        assert job["b"].outcome == "committed"
    else:
        job.put(asked(job["b"], left_s=3600.0))
        await job.until(lambda: (drain := job["b"].drain) is not None and drain.outcome)
        await job.until(lambda: job.world == "ac")
        job.lose_store(backup)
        await job.until(lambda: (drain := job["b"].drain) is not None and drain.outcome)
        await job.passes(30)
        assert job["b"].drain is not None
        assert job.history() == [], "its end is not announced once more"


async def test_a_sidecar_that_dies_with_no_drain_going_stops_no_step(world: World) -> None:
    job = await world.job("ab")
    await job.trains()
    number = job.round
    job["a"].crash()
    await job.trains()
    job["a"].start()
    await job.trains()
    assert (job.commit.epoch, job.snapshot.drains, job.round) == (0, {}, number)


async def test_drain_notes_of_another_pod_drain_nobody(world: World) -> None:
    job = await world.job("ab")
    await job.trains()
    job["b"].sigterm(grace_s=120)
    await job.ends("b")
    kept = job["b"].run_dir.files["drain.json"]
    pod = job.add("b")
    pod.run_dir.files["drain.json"] = kept
    pod.restart()
    await job.settles()
    assert (job.world, pod.drain) == ("ab", None)


async def test_a_notice_before_the_store_has_been_read_is_kept(world: World) -> None:
    job = await world.job("ab")
    await job.trains()
    job["b"].cut()
    job["b"].restart()
    job["b"].sigterm(grace_s=120)
    await job.until(lambda: job["b"].phases[-1] == "noted")
    assert job["b"].run_dir.content("drain.json") is not None
    job["b"].mend()
    await job.ends("b")
    assert (job["b"].outcome, job.lost) == ("committed", 0)


@pytest.mark.parametrize("world", [0], indirect=True)
async def test_many_drains_in_a_row_each_with_a_pod_in_its_place(world: World) -> None:
    job = await world.job("abc")
    for drained in range(10):
        await job.trains(2)
        for name in job.world[: 2 if drained % 5 == 4 else 1]:
            job[name].sigterm(grace_s=120)
        leavers = [pod for pod in job.present() if pod.terminating]
        await job.until(lambda leavers=leavers: all(pod.gone for pod in leavers))  # type: ignore[misc]
        for pod in leavers:
            assert pod.outcome == "committed"
            job.add(pod.name)
        await job.until(lambda: job.world == "abc")
    await job.settles()
    assert (job.lost, len(job.history())) == (0, 12)


Mishap = Callable[[Job], object]


def dies_before(who: str, prefix: str, job: Job) -> None:
    job[who].crash_at_write(prefix)


def dies_once(who: str, holds: Callable[[Job], object], job: Job) -> None:
    """Let sidecars die as something is so, and come back when another has saved."""

    def die() -> None:
        for name in who:
            job[name].crash()
            job.when(lambda: job["c"].saved(), job[name].start)

    job.when(lambda: holds(job), die)


def away(phase: str, job: Job) -> None:
    """The store is away for three seconds."""

    def go() -> None:
        job.cut()
        job.loop.call_later(3.0, job.mend, context=job.director.context)

    job.when(lambda: job.commit.phase == phase, go)


def unreadable(key: str, job: Job) -> None:
    job.put(Put(key, b"\xff{not json"))


def unreadable_file(name: str, content: bytes, job: Job) -> None:
    """A sidecar that has voted finds this, started again."""

    def damage() -> None:
        job["b"].run_dir.files[name] = content
        job["b"].restart()

    job.when(lambda: HERE.vote(1, "b") in job.invariants.truth.kvs, damage)


def voted(who: str, job: Job) -> bool:
    return HERE.vote(1, who) in job.invariants.truth.kvs


def in_phase(phase: str, job: Job) -> bool:
    return all(job[name].gate == phase for name in "abc")


MISHAPS: dict[str, Mishap] = {
    "b dies, noted": partial(dies_before, "b", HERE.drains),
    "b dies, on record": partial(dies_once, "b", lambda job: job["b"].drain),
    **{f"{who} dies before its vote": partial(dies_before, who, HERE.votes_of(1)) for who in "ab"},
    **{f"{who} dies after its vote": partial(dies_once, who, partial(voted, who)) for who in "ab"},
    **{
        f"{who} die in {phase}": partial(dies_once, who, partial(in_phase, phase))
        for phase in ("commit", "done")
        for who in ("a", "b", "ab")
    },
    **{f"away in {phase}": partial(away, phase) for phase in ("hold", "commit", "done")},
    **{
        key.rpartition("/")[2]: partial(unreadable, key)
        for key in (HERE.commit, HERE.vote(1, "a"), KEYS.last_commit)
    },
    **{
        f"{name} is {content[:12]!r}": partial(unreadable_file, name, content)
        for name in ("drain.json", "gate.json", "gate.page")
        for content in (b"", b"\xff\xfe", b'{"schema":1}')
    },
}


@pytest.mark.parametrize("world", [0], indirect=True)
@pytest.mark.parametrize("leavers", ["b", "ab"])
@pytest.mark.parametrize("mishap", MISHAPS.values(), ids=MISHAPS)
async def test_a_drain_is_seen_through_whatever_happens(
    world: World, mishap: Mishap, leavers: str
) -> None:
    job = await world.job("abc")
    await job.trains()
    mishap(job)
    for name in leavers:
        job[name].sigterm(grace_s=120)
    await job.ends(*leavers)
    assert {job[name].outcome for name in leavers} == {"committed"}
    await job.settles()
    assert job.lost == 0
    assert sorted(entry.member for entry in job.history()) == [*leavers]
