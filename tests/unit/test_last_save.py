# SPDX-License-Identifier: Apache-2.0
"""The newest step that all ranks have saved, for whatever cause: who names it, when it counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.saved_steps import SPREAD, SavedSteps
from rdzv.drain.inputs import DrainingSnapshot, LiveRound
from rdzv.drain.saves import newest_saved, newest_transaction, of_central, saves_of, timed
from rdzv.keys import JobKeys
from rdzv.records.drain import NO_CURSOR, Commit, LastCommit, Phase
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.records.progress import CENTRAL_RUN, PodSaves, RankProgress
from rdzv.records.shards import Plan, PodShards, Saved, ShardWorld, Share, TrainedShards
from rdzv.shard_ledger import ShardLedger
from rdzv.snapshot import Snapshot, listing_of
from rdzv.store import Compare, KeyValue, Put
from tests.support.records import member

KEYS = JobKeys("team", "digits")
HERE = KEYS.in_generation(1)
ROUND = LiveRound("run", 3, True, ("a", "b"), master="10.0.0.1:29500", mod_revision=70)
IDLE = Commit(4, "run", 3, mod_revision=60)
LAST = LastCommit(10, 2, 4, mod_revision=50)


def scene(
    last: LastCommit | None = None, commit: Commit | None = IDLE, live: LiveRound | None = ROUND
) -> DrainingSnapshot:
    members = {name: member(name, at) for at, name in enumerate("abc", 1)}
    job = Job(JobPolicy(1, 4), uid="uid-now", mod_revision=7)
    membership = Snapshot(90, job, members, commit=commit, last_commit=last)
    listed = listing_of(membership)
    return DrainingSnapshot(membership, listed, live, {}, "uid-a", revision=90)


def pod(name: str, *steps: int, **changes: object) -> PodSaves:
    one = PodSaves(name, f"uid-{name}", "run", 3, steps, max(steps, default=None), mod_revision=80)
    return replace(one, **changes)  # type: ignore[arg-type]


def found(snapshot: DrainingSnapshot, *pods: PodSaves) -> int | None:
    last, why = newest_saved(snapshot, {one.member: one for one in pods})
    assert why
    return None if last is None else last.step


@pytest.mark.parametrize(
    ("save_s", "took_s", "shown_s"),
    [(25.0, 0.0, 0.0), (40.0, 0.0, 40.0), (0.0, 40.04, 40.0), (40.0, 50.0, 50.0), (2.0, 3.0, 0.0)],
)
def test_a_save_that_takes_longer_than_a_drain_has_is_told(
    save_s: float, took_s: float, shown_s: float
) -> None:
    own = timed(pod("a", 20, save_s=save_s), took_s, 30.0, 5.0)
    assert own.save_s == shown_s
    assert PodSaves.from_kv(KeyValue("x/saves/a", own.to_json(), 1, 80, 1, 0)) == own
    assert bool(own.too_slow) == bool(shown_s)
    assert (b"save_s" in own.to_json()) == bool(shown_s)


def test_a_slow_save_names_the_numbers_and_the_setting_to_raise() -> None:
    own = timed(pod("a", 20, save_s=40.0), 0.0, 30.0, 5.0)
    assert own.too_slow == (
        "saves take 40 s, and a has 25 s in a drain (grace 30 s - 5 s reserve): drains will expire"
        " and lose steps; set terminationGracePeriodSeconds and MUSTER_GRACE_S to 60 or more"
    )


def told(*ranks: RankProgress) -> PodSaves:
    """What the pod ``a`` tells of the saves of its ranks."""
    own = saves_of(ranks, ROUND, "a", "uid-a")
    assert own is not None
    return own


def test_the_slowest_rank_of_a_pod_counts() -> None:
    assert told(rank(0, 20, save_s=3.0), rank(1, 20, save_s=7.5)).save_s == 7.5


BOTH = (pod("a", 40, 20), pod("b", 20))
TAG, UNCONFIRMED = "life00001-round000003-0a1b2c3d4e", "life00000-round000000-0a1b2c3d4e"


def test_the_newest_common_step_becomes_the_last_commit_and_keeps_the_epoch() -> None:
    saved, _ = newest_saved(scene(LAST), {one.member: one for one in BOTH})
    assert saved == LastCommit(20, 3, 4, "uid-now", periodic=True, run="run", samples=NO_CURSOR)
    compares, operations = newest_transaction(KEYS, scene(LAST), saved)
    assert set(compares) == {
        Compare(KEYS.job, "mod", "=", 7),
        Compare(HERE.commit, "mod", "=", 60),
        Compare(HERE.run("run").round, "mod", "=", 70),
        Compare(KEYS.last_commit, "mod", "=", 50),
    }
    assert operations == [Put(KEYS.last_commit, saved.to_json())]


@pytest.mark.parametrize("last", [LAST, replace(LAST, forgotten=True, round=3)])
def test_a_run_has_its_own_steps(last: LastCommit) -> None:
    """As the stages that a container runs one after the other do; both rounds may be the 3rd."""
    later = replace(last, step=600, round=3)
    assert found(scene(replace(later, run="run before")), *BOTH) == 20
    assert found(scene(replace(later, run="run")), *BOTH) is None
    assert found(scene(later), *BOTH) is None  # of an older sidecar


@pytest.mark.parametrize(
    "pods",
    [
        (pod("a", 20),),
        (pod("a", 20), pod("c", 20)),
        (pod("a", 20), pod("b", 40)),
        (pod("a", 20), pod("b", 20, round=2)),
        (pod("a", 20), pod("b", 20, run="other")),
        (pod("a", 20), pod("b", 20, pod_uid="uid-of-the-pod-before")),
    ],
    ids=["one of two", "a bystander", "no common step", "former round", "other run", "former pod"],
)
def test_i3_a_step_that_not_all_of_the_live_round_have_saved_never_counts(
    pods: tuple[PodSaves, ...],
) -> None:
    assert found(scene(), *pods) is None


def shards(round: int, *steps: int) -> ShardLedger:
    """Those of a world that began with step 5, where all ranks have told of these saves."""
    saves = tuple(Saved(step, ()) for step in steps)
    pods = {name: PodShards(name, "", {0: Share(held=((0, 1),), saves=saves)}) for name in "ab"}
    began = ShardWorld(f"run {round}", Plan(100, 10, None), 2, 5, "run", round)
    return ShardLedger(began, trained=TrainedShards(base=5), pods=pods)


RESTORED = replace(ROUND, restored=True)


@pytest.mark.parametrize(
    ("live", "ledgers", "step"),
    [
        (ROUND, [shards(3, 10, 20)], 20),
        (ROUND, [shards(3, 10)], 10),
        (ROUND, [shards(3)], None),
        (ROUND, [shards(3, 10, 20), shards(3)], None),
        (ROUND, [shards(2)], 20),
        (RESTORED, [shards(2)], None),
        (RESTORED, [], 20),
    ],
    ids=["known", "one", "none", "of another data set", "former", "restored", "no shards"],
)
def test_no_step_is_put_on_record_that_shards_cannot_begin_from(
    live: LiveRound, ledgers: list[ShardLedger], step: int | None
) -> None:
    pods = {name: pod(name, 20, 10) for name in "ab"}
    saved, why = newest_saved(replace(scene(live=live), ledgers=ledgers), pods)
    assert (saved and saved.step) == step
    assert step or "the store has lost" in why


@pytest.mark.parametrize("phase", ["hold", "commit", "done"])
def test_a_commit_under_way_goes_first(phase: Phase) -> None:
    assert found(scene(commit=replace(IDLE, phase=phase)), *BOTH) is None
    assert found(scene(commit=replace(IDLE, phase=phase, round=2)), *BOTH) == 20


@pytest.mark.parametrize(
    "live", [None, replace(ROUND, complete=False), replace(ROUND, closed=True)]
)
def test_i13_only_steps_of_a_world_that_has_formed_count(live: LiveRound | None) -> None:
    assert found(scene(live=live), *BOTH) is None


@pytest.mark.parametrize(
    ("last", "step"),
    [
        (None, 20),
        (LAST, 20),
        (replace(LAST, step=20), None),
        (replace(LAST, step=1000), None),
        (replace(LAST, step=1000, job_uid="uid-before"), 20),
        (replace(LAST, step=1000, forgotten=True), 20),
        (replace(LAST, step=1000, round=3, forgotten=True), None),
        (replace(LAST, round=3, mod_revision=79), 20),
        (replace(LAST, round=3, mod_revision=80), None),
        (replace(LAST, round=3, mod_revision=85, periodic=True), 20),
    ],
)
def test_what_is_on_record_never_goes_back_within_a_life(
    last: LastCommit | None, step: int | None
) -> None:
    assert found(scene(last), *BOTH) == step


def rank(local_rank: int, *saved: int, size: int = 2, **changes: object) -> RankProgress:
    one = RankProgress(
        local_rank, size, ROUND.master, 50, True, False, saved=saved, rank=local_rank
    )
    return replace(one, **changes)  # type: ignore[arg-type]


def test_a_pod_names_what_all_of_its_ranks_have_saved_and_the_newest_of_any() -> None:
    assert told(rank(0, 40, 20), rank(1, 20, step=51, drain=False)) == PodSaves(
        "a", "uid-a", "run", 3, (20,), 40, step=51, ranks=(0, 1)
    )
    only_rank_0 = told(rank(0, 40), rank(1))
    assert (only_rank_0.steps, only_rank_0.newest) == ((), 40)


@pytest.mark.parametrize(
    "ranks",
    [[], [rank(0, 40)], [rank(0, 40), rank(1, 40, master="10.0.0.1:1")]],
    ids=["none", "one of two", "one of a former round"],
)
def test_a_pod_whose_ranks_are_not_all_there_names_nothing(ranks: list[RankProgress]) -> None:
    assert saves_of(ranks, ROUND, "a", "uid-a") is None
    assert saves_of([rank(0, 40, size=1)], ROUND, "c", "uid-c") is None


@given(st.lists(st.integers(0, 30)), st.integers(1, 200), st.integers(0, 60))
def test_ranks_that_make_the_same_saves_name_a_common_one(
    gaps: list[int], one: int, ahead: int
) -> None:
    steps, step = [], 0
    for gap in (gaps * 300 or [1] * 300)[:300]:
        step += gap + 1
        steps.append(step)
    first, second = SavedSteps(), SavedSteps()
    for saved, count in ((first, one), (second, one + ahead)):
        for step in steps[:count]:
            saved.add(step)
        assert saved.named[0] == steps[count - 1]
        assert list(saved.named) == sorted(saved.named, reverse=True)
        assert len(saved.named) <= len(SPREAD)
    common = set(first.named) & set(second.named)
    for many in SPREAD:
        if one // many == (one + ahead) // many > 0:
            assert steps[one // many * many - 1] in common


def test_a_loop_that_counts_anew_has_saved_nothing_of_later_steps() -> None:
    saved = SavedSteps()
    for step in (20, 40, 30, 40):
        saved.add(step)
    assert saved.named == (40,)
    saved.come_to(41)
    assert saved.named == (40,)
    saved.come_to(1)
    assert not saved.named


@pytest.mark.parametrize("tags", [(TAG, TAG), (TAG, ""), ("", TAG), ("", "")])
def test_a_save_is_on_record_with_the_tag_that_its_ranks_give(tags: tuple[str, str]) -> None:
    pods = {name: pod(name, 20, tag=tag) for name, tag in zip("ab", tags, strict=True)}
    saved, _ = newest_saved(scene(LAST), pods)
    assert saved is not None
    assert saved.tag == max(tags)


def test_parts_under_two_tags_are_no_save() -> None:
    pods = {"a": pod("a", 20, tag=TAG), "b": pod("b", 20, tag=UNCONFIRMED, ranks=(1,))}
    saved, why = newest_saved(scene(LAST), pods)
    assert saved is None
    assert why.startswith("the save tags of step 20 differ: ")
    own = told(rank(0, 20, tag=TAG), rank(1, 20, tag=UNCONFIRMED))
    assert (own.steps, own.newest, own.tag) == ((), 20, "")


def reporting(number: int, step: int) -> RankProgress:
    return RankProgress(number, 2, "", step, False, False, rank=number)


def test_ranks_of_a_horovodrun_report_their_numbers_and_their_step() -> None:
    ranks = [reporting(3, 40), reporting(2, 39)]
    report = PodSaves("a", "uid-a", CENTRAL_RUN, 0, step=40, ranks=(2, 3))
    assert of_central(ranks, 2, "a", "uid-a") == report
    # Those that have ended leave their progress behind.
    assert of_central(ranks, 0, "a", "uid-a") == replace(report, step=-1, ranks=())
    assert of_central(ranks, None, "a", "uid-a") is None
