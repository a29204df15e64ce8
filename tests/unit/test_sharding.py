# SPDX-License-Identifier: Apache-2.0
"""``muster.data.shards()`` as a script meets it: without a sidecar, and beside a made-up one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import muster
import muster.data
from muster import resuming, saved_steps, sharding
from muster.orders import ShardOrder
from muster.shard_log import Save
from muster.sharding import Alone, HeldShards, Shards, ShardsLost

ORDER = ShardOrder(10, 4, None)


@pytest.fixture(autouse=True)
def _no_former_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "_desks", {})
    monkeypatch.setattr(saved_steps, "listeners", [])


class Told:
    """A sidecar that gives the answers of a list, and keeps what it was asked."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.asked: list[dict[str, Any]] = []
        self._answers = iter(answers)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        return {"given": [], "done": False, **next(self._answers)}


def beside(told: Told, epoch: int = 0) -> Shards:
    return Shards(HeldShards(ORDER, {"name": "train"}, told.ask), epoch)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_without_a_sidecar_each_rank_has_its_part_of_every_epoch(ranks: int) -> None:
    def part(rank: int, epoch: int) -> Iterator[int]:
        order = ShardOrder(1000, 7, 3)
        shards = Shards(HeldShards(order, {"name": "train"}, Alone(order, rank, ranks).ask), epoch)
        return (record for shard in shards for record in shard)

    for epoch in range(2):
        records = [record for rank in range(ranks) for record in part(rank, epoch)]
        assert sorted(records) == list(range(1000))


def test_without_a_sidecar_a_script_needs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    shards = muster.data.shards(10, shard_size=4)
    batches = []
    while not shards.done:
        batches.append(shards.take(3))
    assert batches == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert [list(shard) for shard in muster.data.shards(10, shard_size=4, epoch=1)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    with pytest.raises(ValueError, match="give another data set another name"):
        muster.data.shards(11, shard_size=4)
    with pytest.raises(ValueError, match="sizes are from 1 on"):
        muster.data.shards(10, shard_size=0)


def test_without_a_sidecar_nothing_is_known_of_a_later_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The epoch began again, without a word."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="which records the weights of step 4 contain"):
        muster.data.shards(10, shard_size=4, start=4)
    monkeypatch.setattr(resuming, "_started_from", 5)
    with pytest.raises(ValueError, match="weights of step 5 contain"):
        muster.data.shards(10, shard_size=4)
    assert muster.data.shards(10, shard_size=4, start=0).take(1) == [0]
    monkeypatch.setenv("MUSTER_CHECKS", "warn")
    monkeypatch.setattr(sharding, "_desks", {})
    assert muster.data.shards(10, shard_size=4, start=4).take(1) == [0]
    assert "shards would begin the epoch again" in caplog.text


def test_a_loop_waits_for_what_others_hold_and_a_step_does_not() -> None:
    told = Told({"given": [[0, 4]]}, {}, {"wait": "the store is away"}, {"given": [[8, 12]]})
    shards = beside(told)
    assert shards.take(9) == [0, 1, 2, 3], "it has asked once more, in vain"
    assert shards.take(9) == []
    assert told.asked[1]["used"] == [(0, 4)]
    loop = iter(shards)
    assert list(next(loop)) == [8, 9]
    assert len(told.asked) == 4


def test_what_a_loop_breaks_off_comes_again() -> None:
    shards = beside(Told({"given": [[0, 8]]}, {"done": True}))
    loop = iter(shards)
    first = next(loop)
    assert (next(first), next(first)) == (0, 1)
    assert list(next(loop)) == [4, 5, 6, 7]
    assert list(next(loop)) == [2, 3]
    assert list(first) == []
    assert list(loop) == []


def test_a_loop_that_takes_no_record_of_a_shard_is_ended() -> None:
    """It was given the same shards again and again, and never said a word."""
    loop = iter(beside(Told({"given": [[0, 8]]})))
    read_by_its_bounds = next(loop)
    assert range(read_by_its_bounds.start, read_by_its_bounds.stop) == range(4)
    with pytest.raises(RuntimeError, match=r"no record was taken of the shard of 4 from 0 on"):
        next(loop)


def test_a_save_is_told_until_it_is_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "SAVE_S", 0.0)
    told = Told({"given": [[0, 4]]}, {"wait": "the store is away"}, {}, {})
    shards = beside(told)
    shards.take(3)
    with pytest.raises(RuntimeError, match="record which shards step 1 contains: the store is"):
        shards.committed(1)
    shards.take(1)
    shards.committed(2)
    assert told.asked[-1]["saves"] == [Save(1, [(0, 3)]), Save(2, [(3, 4)])]
    shards.committed(2)
    assert len(told.asked) == 3


def test_what_the_sidecar_refuses_or_has_lost_is_raised() -> None:
    with pytest.raises(ValueError, match="start from the checkpoint of step 5"):
        beside(Told({"refused": "start from the checkpoint of step 5"})).take(1)
    with pytest.raises(ShardsLost, match="this pod was gone: this process must end"):
        beside(Told({"lost": "this pod was gone"})).take(1)


def test_a_forked_process_is_told_where_to_take_records(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = beside(Told())
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="take them in the rank's own"):
        shards.take(1)


def test_beside_a_sidecar_ranks_without_torchrun_name_their_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MUSTER_RUN_DIR", "/nowhere")
    with pytest.raises(ValueError, match="needs world= and ranks="):
        muster.data.shards(10, shard_size=4)


def beside_commits(monkeypatch: pytest.MonkeyPatch, *commits: int | None) -> Told:
    """Let this process be a rank of torchrun, which finds these last commits one by one."""
    told, found = Told(*[{}] * 9), iter(commits)
    monkeypatch.setattr(resuming, "_started_from", None)
    monkeypatch.setattr(sharding, "last_commit", lambda: next(found))
    monkeypatch.setattr(sharding, "ShardLine", lambda run_dir: told)
    monkeypatch.setenv("MUSTER_RUN_DIR", "/run")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    return told


def test_all_data_sets_of_a_world_begin_from_the_step_that_its_weights_were_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = beside_commits(monkeypatch, None, 400)
    for name in ("train", "held-out"):  # the second one after the first epoch
        muster.data.shards(10, shard_size=2, name=name)
    assert [(one["name"], one["start"]) for one in told.asked] == [("train", 0), ("held-out", 0)]


def test_shards_go_on_after_the_step_that_the_script_says_it_starts_from(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = beside_commits(monkeypatch, *[640] * 9)

    def first(step: int, **given: int) -> int:
        monkeypatch.setattr(sharding, "_desks", {})
        muster.data.shards(10, shard_size=4, **given)  # type: ignore[arg-type]
        saved_steps.at_boundary(step)
        began = told.asked[-1]["start"]
        assert isinstance(began, int)
        return began

    # Nobody has told: it is the last commit, and what contradicts it is said at the first step.
    assert first(641) == 640
    assert not caplog.records
    assert first(701) == 640
    assert "if a later checkpoint was loaded" in caplog.text
    monkeypatch.setattr(saved_steps, "listeners", [])
    with pytest.raises(ValueError, match="records would be lost"):
        first(601)
    monkeypatch.setattr(saved_steps, "listeners", [])
    assert first(640) == 640, "a loop that begins with its boundary has trained nothing there"
    saved_steps.at_boundary(641)
    monkeypatch.setattr(saved_steps, "listeners", [])
    assert first(601, start=600) == 600
    assert resuming.check_start(700, "/checkpoints") == 700
    assert first(701) == 700


def test_a_job_whose_steps_count_from_0_is_told_so() -> None:
    """A save of step 0 would be that of weights without a checkpoint, which contain nothing."""
    desk = HeldShards(ORDER, {"name": "train"}, Told({"given": [[0, 4]]}, {}).ask)
    shards = Shards(desk, 0)
    desk.listener.arrive(0)  # a loop that begins with its boundary
    assert shards.take(2) == [0, 1]
    with pytest.raises(ValueError, match="counts its steps from 1 on"):
        shards.committed(0)
