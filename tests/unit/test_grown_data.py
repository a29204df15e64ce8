# SPDX-License-Identifier: Apache-2.0
"""Data that grows between two worlds; cursors of saved steps, equal on all ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import muster
from agent.rundir.reports import read_line, read_ranks
from muster.data import ElasticSampler, shard_stream
from muster.gate import parse
from muster.progress import BLOCK_BYTES, ProgressFile
from muster.saved_steps import CURSOR_MAX_BYTES, UNKEPT, CommittedStep, SavedSteps, decode, encode
from rdzv.drain.gate import Gate, Here, local
from rdzv.drain.saves import Said, cursor_of, difference, differing, newest_saved
from rdzv.records import codec
from rdzv.records.drain import NO_VERDICT, LastCommit, Vote
from rdzv.records.progress import PodSaves
from tests.support.commits import (
    HERE,
    MASTER,
    ROUND,
    SAVE,
    THERE,
    becomes,
    periodic,
    rank,
    saves_of_pod,
    scene,
    vote,
)

LIVES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 4), st.integers(0, 12), st.booleans()),
    min_size=1, max_size=6,
)  # fmt: skip
"""For each life: by how much the data has grown, ranks, steps, whether it is killed: the cursor is
then the one of two steps before."""


def sampler_of(size: int = 120, **options: Any) -> ElasticSampler:
    return ElasticSampler(size, 3, **{"global_batch": 12, "rank": 0, "world_size": 1, **options})


@given(st.integers(1, 60), st.integers(1, 20), st.sampled_from(["short", "drop"]), LIVES,
       st.booleans())  # fmt: skip
def test_i12_each_sample_once_an_epoch_while_the_data_grows(
    size: int, batch: int, last: str, lives: list[tuple[int, int, int, bool]], shuffle: bool
) -> None:
    """Through drains, joins and kills; what has been added stands behind what was there."""
    size += batch
    saves: list[tuple[Any, list[tuple[int, int, list[int]]]]] = [(None, [])]
    for added, world, steps, killed in [*lives, (0, 1, 10**6, False)]:
        size += added
        cursor, trained = saves[-1]
        ranks = [
            ElasticSampler(size, 3, global_batch=batch, micro_batch=7, rank=rank, world_size=world,
                           last=last, shuffle=shuffle, grows=True)
            for rank in range(world)
        ]  # fmt: skip
        for one in ranks:
            one.go_to(cursor)
        lead, saves = ranks[0], [(cursor, trained)]
        for _ in range(steps):
            if lead.epoch == 3:
                break
            epoch = lead.epoch
            if lead.samples == 0 or len(saves) == 1:
                follows = [rank.follow(rank) for rank in ranks]
            step: list[int] = []
            for follow in follows:
                for found, part in follow:
                    step += found if part.samples else []
                    if part.ends_step:
                        break
            saves.append((lead.cursor, [*saves[-1][1], (epoch, size, step)]))
            assert [rank.cursor for rank in ranks] == [lead.cursor] * world
        if killed:
            saves = saves[:-2] or saves
    for epoch in range(3):
        own = [(whole, step) for of, whole, step in saves[-1][1] if of == epoch]
        seen = [one for _, step in own for one in step]
        begun, ended = own[0][0], own[-1][0]
        assert set(Counter(seen).values()) == {1}
        assert len(seen) == (ended if last == "short" else ended // batch * batch)
        assert set(seen[:begun]) <= set(range(begun)), "the order of the beginning comes first"
        alone = sampler_of(begun, global_batch=begun, shuffle=shuffle)
        alone.go_to({"epoch": epoch, "samples": 0, "of": begun, "seed": 3})
        assert next(iter(alone))[: len(seen)] == seen[:begun]


def test_a_cursor_of_fewer_samples_needs_a_word() -> None:
    small = sampler_of()
    list(islice(small.follow(small), 3))
    with pytest.raises(ValueError, match=r"grows=True goes on if samples were added") as e:
        sampler_of(180).go_to(small.cursor)
    assert "behind the 120 that are unchanged" in str(e.value)
    smaller = sampler_of(100, grows=True)
    of_another_seed = ElasticSampler(180, 4, global_batch=12, rank=0, world_size=1, grows=True)
    for wrong in (smaller, of_another_seed):
        with pytest.raises(ValueError, match=r"data and the seed that training has begun with$"):
            wrong.go_to(small.cursor)
    grown = sampler_of(180, grows=True)
    grown.go_to(small.cursor)
    assert grown.cursor == {**small.cursor, "grown": [180]}
    sampler_of(180).go_to(grown.cursor)
    with pytest.raises(ValueError, match="has become smaller"):
        grown.go_to({**grown.cursor, "grown": [180, 150]})
    with pytest.raises(ValueError, match="grows=True is for rows"):
        shard_stream([3, 4], lambda *_: [], global_batch=2, rank=0, world_size=1, grows=True)


@pytest.mark.parametrize("steps", [0, 3, 10])
def test_i12_data_grows_in_the_same_process(steps: int) -> None:
    sampler = sampler_of()
    seen = Counter(one for found, _ in islice(sampler.follow(sampler), steps) for one in found)
    sampler.extend(150)
    sampler.extend(150)
    sampler.extend(170)
    while sampler.epoch < 2:
        for found, _ in sampler.follow(sampler):
            seen.update(found)
    first = range(120 if steps == 10 else 170)
    assert seen == Counter(first) + Counter(range(170))
    with pytest.raises(ValueError, match=r"extend\(160\): these are 170 samples of rows"):
        sampler.extend(160)
    stream = shard_stream([3, 4], lambda *_: [], global_batch=2, rank=0, world_size=1)
    with pytest.raises(ValueError, match=r"extend\(9\): these are 7 samples of a stream of shards"):
        stream.sampler.extend(9)


def move_by_extending(sampler: ElasticSampler) -> None:
    sampler.extend(150)


def move_by_going(sampler: ElasticSampler) -> None:
    sampler.go_to(sampler.cursor)


@pytest.mark.parametrize(
    "move",
    [move_by_extending, move_by_going, ElasticSampler.advance],
    ids=lambda move: move.__name__,
)
def test_a_sampler_that_is_moved_in_a_loop_ends_the_loop(
    move: Callable[[ElasticSampler], None],
) -> None:
    sampler = sampler_of()
    ahead = iter(sampler)  # as a loader's, which has read everything
    batches = [*ahead]
    follow = sampler.follow(batches)
    next(follow)
    move(sampler)
    with pytest.raises(RuntimeError, match="the sampler was moved, by advance, go_to or extend"):
        next(follow)


def count_each_batch(sampler: ElasticSampler, ahead: int) -> None:
    """Train as a loader gives the batches that has read ``ahead`` of them, and go on after it."""
    batches = iter(sampler)
    for _ in chain([*islice(batches, ahead)], batches, range(9)):
        sampler.advance()


@pytest.mark.parametrize("ahead", [0, 8, 10**6])
def test_a_step_that_is_counted_for_each_batch_is_refused(ahead: int) -> None:
    """It ran through four epochs in one, without a word."""
    sampler = sampler_of(micro_batch=3)
    with pytest.raises(RuntimeError, match="once after each optimizer step, here of 4 batches"):
        count_each_batch(sampler, ahead)
    counted = sampler.samples + sampler.epoch * 120
    assert counted <= min(120, 12 * (1 + ahead // 3))


def advanced(before: bool, after: bool, left_out: int) -> ElasticSampler:
    """Train six steps, each of which comes to a boundary."""
    sampler = sampler_of()
    with muster.drain() as drain:
        for step, _ in enumerate(islice(sampler, 6), 1):
            if before and step != left_out:
                sampler.advance()
            drain.commit_due(step)
            if after and step < 6:
                sampler.advance()
    return sampler


@pytest.mark.parametrize(
    ("before", "after", "left_out", "kept"),
    [(True, False, 0, True), (True, False, 3, False), (False, True, 0, False)],
    ids=["each step", "one left out", "after the save"],
)
def test_i12_a_step_that_is_not_counted_is_in_the_cursor(
    caplog: pytest.LogCaptureFixture, before: bool, after: bool, left_out: int, kept: bool
) -> None:
    sampler = advanced(before, after, left_out)
    assert sampler.cursor.get(UNKEPT) == (
        None if kept else "sampler.advance() was not called after each step"
    )
    assert bool(caplog.records) is not kept
    sampler.go_to(sampler.cursor)
    assert bool(sampler.cursor.get(UNKEPT)) is not kept, "to the end of the epoch"


UNSAID: dict[str, Any] = {"run": "run", "samples": NO_VERDICT}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(JSON)
def test_a_cursor_comes_back_as_it_was_and_equal_ones_are_spelled_alike(cursor: object) -> None:
    text = encode(cursor, 7)
    assert decode(text) == cursor
    assert text == encode(json.loads(json.dumps(cursor)), 7)


@pytest.mark.parametrize(
    "cursor", [{"rows": {1}}, float("nan"), "x" * CURSOR_MAX_BYTES], ids=["set", "nan", "long"]
)
def test_no_json_and_none_that_is_too_long_is_refused_in_one_sentence(cursor: object) -> None:
    with pytest.raises(ValueError, match=r"^drain\.committed\(7\): the cursor is "):
        encode(cursor, 7)


def test_a_commit_is_an_int_with_a_cursor() -> None:
    assert codec.CURSOR_MAX_BYTES == CURSOR_MAX_BYTES
    commit = CommittedStep(7, {"samples": 3})
    assert commit == 7
    assert commit + 1 == 8
    assert commit.cursor == {"samples": 3}
    last = LastCommit(10, 3, 5, cursor=HERE)
    shown = parse(Gate(5, "run", 3, MASTER, last_commit=last).to_json()).last_commit
    assert shown == 10
    assert shown is not None
    assert shown.cursor == {"samples": 640}


def test_the_sidecar_reads_the_cursor_of_each_step_that_a_rank_names(tmp_path: Path) -> None:
    file = ProgressFile(str(tmp_path), {"RANK": "6", "LOCAL_RANK": "2"})
    for step in range(1, 40):
        file.saved.add(step, encode({"samples": 64 * step, "long": "x" * 900}, step))
        file.write(step, drain=True, acked=(5, step))
        (rank,) = read_ranks(tmp_path)
        assert rank.rank == 6
        assert rank.acked == (5, step)
        assert [
            json.loads(cursor_of(saved, rank.saved, rank.cursors))["samples"]
            for saved in rank.saved
        ] == [64 * saved for saved in rank.saved]
    assert (tmp_path / "2.json").stat().st_size <= 2 * BLOCK_BYTES


def test_a_step_whose_cursor_is_not_there_is_not_told_of(tmp_path: Path) -> None:
    file = ProgressFile(str(tmp_path), {})
    file.saved.add(3, HERE)
    file.write(3, drain=True, acked=(5, 3))
    (tmp_path / "0.cursors").write_text('{"pid":1,"started":1,"cursors":{"3":"of another"}}')
    (rank,) = read_ranks(tmp_path)
    assert (rank.saved, rank.acked) == ((), None)
    line = read_line(tmp_path / "0.json")
    assert line is not None
    assert line.saved == (3,)


def test_a_cursor_that_is_given_later_is_that_of_the_step() -> None:
    saved = SavedSteps()
    saved.add(3)
    assert not saved.with_cursors
    saved.add(3, HERE)
    assert saved.cursors == {3: HERE}


def test_i12_two_data_cursors_that_differ_void_the_commit_and_name_the_ranks() -> None:
    own, other = vote("a", HERE, 0, 1), vote("b", THERE, 2, 3)
    void, last = becomes(own, other)
    assert (void.phase, void.failures, last) == ("void", 1, None)
    assert void.reason == (
        "the data cursors of step 10 differ: ranks 0-1 (a) gave"
        ' {"samples":640}, ranks 2-3 (b) gave {"samples":600}'
    )
    # They differ again: who leaves does not wait for its deadline.
    void, _ = becomes(own, other, failures=1)
    assert (void.phase, void.refused, void.leaving) == ("void", True, ("uid-a",))
    assert void.reason.startswith("the data cursors of step 10 differ")


@pytest.mark.parametrize(
    ("a", "b", "cursor", "said"),
    [
        (vote("a", HERE, 0, 1), vote("b", HERE, 2, 3), HERE, ""),
        (vote("a", HERE, 0, 1), vote("b", "", 2, 3), HERE, "ranks 2-3 (b) gave no data cursor"),
        (vote("a", "", 0, 1), vote("b", HERE, 2, 3), HERE, "ranks 0-1 (a) gave no data cursor"),
        # A sidecar of before does not tell what its ranks gave: it is not held against the others.
        (vote("a", ""), vote("b", THERE, 2, 3), THERE, ""),
    ],
    ids=["equal", "b gives none", "a gives none", "of before"],
)
def test_i12_a_rank_that_gives_no_cursor_leaves_it_to_the_others(
    a: Vote, b: Vote, cursor: str, said: str
) -> None:
    done, last = becomes(a, b)
    assert (done.phase, last) == ("done", LastCommit(10, 3, 5, cursor=cursor, **UNSAID))
    assert said in done.reason


@pytest.mark.parametrize(
    ("cursors", "acked"), [((HERE, HERE), 10), (("", HERE), 10), ((HERE, THERE), None)]
)
def test_i12_ranks_of_one_pod_that_differ_fail_its_save(
    cursors: tuple[str, str], acked: int | None
) -> None:
    shown = Gate(5, "run", 3, MASTER, "commit", 10)
    here = Here("a", "uid-a", shown, tuple(rank(*one) for one in enumerate(cursors)))
    own = Vote(5, 3, "uid-a", 10)
    vote = local(here, commit=SAVE, round=ROUND, drain=None, vote=own, last_commit=None).vote
    assert vote is not None
    assert vote.acked == acked
    if acked:
        assert (vote.cursor, vote.ranks) == (HERE, (0, 1))
    else:
        assert "rank 1 (a) gave" in vote.failed


def test_i12_a_periodic_save_counts_only_where_all_stand_at_the_same_sample() -> None:
    ranks = rank(0, HERE), rank(1, THERE)
    saves = saves_of_pod(*ranks)
    assert (saves.steps, saves.newest) == ((), 10)
    assert differing(ranks, ROUND, "a") == difference(
        10, [Said((0,), "a", HERE), Said((1,), "a", THERE)]
    )
    alone = saves_of_pod(rank(0, HERE), rank(1, ""))
    assert (alone.steps, alone.cursors) == ((10,), (HERE,))

    def pod(name: str, *cursors: str) -> PodSaves:
        at = "ab".index(name)
        steps = (20, 10)[: len(cursors)]
        return PodSaves(name, f"uid-{name}", "run", 3, steps, 20, cursors=cursors, ranks=(at,))

    own = pod("a", HERE, THERE)
    for other, newest in [
        (pod("b", HERE, THERE), (20, HERE)),
        (pod("b", THERE, THERE), (10, THERE)),  # the newest that they agree on
    ]:
        last = periodic(own, other)
        assert (last.step, last.cursor) == newest
    none, why = newest_saved(scene(), {"a": pod("a", HERE), "b": pod("b", THERE)})
    assert none is None
    assert why.startswith("the data cursors of step 20 differ: rank 0 (a) gave")


def test_many_ranks_that_differ_make_no_long_sentence() -> None:
    said = [Said((rank,), f"pod-{rank % 7}", f'{{"samples":{rank}}}' * 9) for rank in range(1000)]
    assert len(difference(10, said)) < 600
