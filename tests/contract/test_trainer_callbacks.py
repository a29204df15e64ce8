# SPDX-License-Identifier: Apache-2.0
"""Trainers of real libraries: callbacks, and changes of their world."""

from __future__ import annotations

import signal
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agent.rundir.reports import read_line
from muster.resuming import mark, marked, world_tag
from rdzv.drain.gate import Gate
from rdzv.records.drain import LastCommit
from tests.support.sidecars.pod_gate import PodGate
from tests.support.training.worker import SCRIPTS, START_S, Worker, worker
from tests.support.training.worlds import Worlds

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

MORE_STEPS = 20
"""What the next world trains from where the one before it ended."""

MASTER, NEXT_MASTER = "10.0.0.7:40123", "10.0.0.8:40999"
TAG = world_tag("job", 0, MASTER)
IDLE = Gate(run="job", round=0, master=MASTER)


class Training:
    """A Trainer in the one rank of a pod, whose weight counts down by one a step."""

    def __init__(self, tmp_path: Path, library: str) -> None:
        self.checkpoints, self._log = tmp_path / "checkpoints", tmp_path / "log"
        self._log.mkdir()
        self._words = SCRIPTS / "trainers_loop.py", library
        self.pod = PodGate(tmp_path / "pod", MASTER)
        self.pod.show(IDLE)

    def __call__(
        self, master: str = MASTER, *, every: int = 10**6, steps: int = 0
    ) -> AbstractContextManager[Worker]:
        """Start it; it saves by itself ``every`` so many steps, and ends after ``steps``."""
        return worker(
            *self._words,
            run_dir=self.pod.run_dir,
            master=master,
            CHECKPOINT_DIR=str(self.checkpoints),
            DRAIN_LOOP_ACCUMULATE="2",
            DRAIN_LOOP_ALL_EVERY=str(every),
            DRAIN_LOOP_STEPS=str(steps),
            STEP_LOOP_DIR=str(self._log),
            STEP_LOOP_NODE="a",
            STEP_LOOP_STOP="/nonexistent",
            RANK="0",
            WORLD_SIZE="1",
            LOCAL_WORLD_SIZE="1",
        )

    @property
    def made(self) -> list[int]:
        """The steps that were made, of all processes."""
        lines = [
            line.split() for log in self._log.iterdir() for line in log.read_text().splitlines()
        ]
        return [int(step) for _, step, *_ in sorted(lines, key=lambda line: float(line[0]))]


@pytest.mark.parametrize(
    ("library", "checkpoint"),
    [
        ("transformers", "checkpoint-{}/trainer_state.json"),
        ("lightning", f"muster-{{}}-{TAG}.ckpt"),
    ],
)
def test_a_trainer_saves_parks_and_goes_on_from_there(
    tmp_path: Path, library: str, checkpoint: str
) -> None:
    training = Training(tmp_path, library)
    pod, checkpoints = training.pod, training.checkpoints
    with training() as rank:
        # A first attempt comes to nothing: what was saved does not count, training goes on.
        pod.until(lambda told: told.step >= 3, timeout_s=START_S)
        pod.show(replace(IDLE, epoch=1, phase="hold"))
        pod.until(lambda told: told.held)
        first = pod.told().step + 2
        pod.show(replace(IDLE, epoch=1, phase="commit", step=first))
        pod.until(lambda told: told.acked == (1, first))
        assert (checkpoints / checkpoint.format(first)).exists()
        assert training.made == list(range(1, first + 1)), "boundaries are optimizer steps"
        pod.show(replace(IDLE, epoch=1, phase="void"))
        # A second one succeeds, and SIGTERM ends a parked rank whatever handler it has.
        pod.until(lambda told: told.step > first)
        pod.show(replace(IDLE, epoch=2, phase="hold"))
        pod.until(lambda told: told.held)
        step = pod.told().step + 5
        pod.show(replace(IDLE, epoch=2, phase="commit", step=step))
        pod.until(lambda told: told.acked == (2, step))
        last = LastCommit(step, 0, 2, tag=pod.told().tag)
        pod.show(replace(IDLE, epoch=2, phase="done", step=step, last_commit=last))
        assert rank.terminate() == -signal.SIGTERM
    assert training.made == list(range(1, step + 1))
    # The next world goes on from there, also past what a save that was killed has left.
    steps = step + MORE_STEPS
    (checkpoints / f"checkpoint-{steps - 1}").mkdir()
    (checkpoints / "late.ckpt").mkdir()
    pod.show(replace(IDLE, round=1, master=NEXT_MASTER, epoch=2, last_commit=last))
    with training(NEXT_MASTER, steps=steps) as rank:
        assert rank.end() == 0, rank.complaints
    assert training.made == list(range(1, steps + 1)), "no step is lost, none is trained twice"
    told = read_line(pod.run_dir / "progress" / "0.json")
    assert told is not None
    assert (told.step, told.drain) == (steps, False)


@pytest.mark.parametrize(
    ("library", "checkpoint"),
    [("transformers", "checkpoint-{}/trainer_state.json"), ("lightning", "*step={}.ckpt")],
)
def test_i1_a_trainer_tells_what_it_saves_by_itself_until_it_is_cut_off(
    tmp_path: Path, library: str, checkpoint: str
) -> None:
    """A step is reported once its file exists; a later world's mark ends the rank at its save."""
    training = Training(tmp_path, library)
    pod, checkpoints = training.pod, training.checkpoints
    with training(every=5) as rank:
        pod.until(lambda told: told.saved and told.saved[0] >= 10, timeout_s=START_S)
        told = pod.told()
        assert [step % 5 for step in told.saved] == [0] * len(told.saved)
        assert told.saved[0] <= told.step
        for step in told.saved:
            assert list(checkpoints.glob(checkpoint.format(step))), f"step {step} is not there"
        assert (marked(str(checkpoints)), told.tag) == (TAG, TAG)
        mark(str(checkpoints), world_tag("job", 1, NEXT_MASTER))
        assert rank.end() == 1
    assert "a later world of this job saves to" in rank.complaints


@pytest.mark.parametrize("entered", [True, False])
def test_a_second_trainer_trains_after_one_that_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entered: bool
) -> None:
    from muster.transformers import MusterCallback
    from tests.support.training.transformers_life import Net, trainer_of

    class Failing(Net):
        def forward(self, number: Any, given: Any) -> dict[str, Any]:
            if len(self.seen) == 2 * 8:
                raise MemoryError("played")
            return super().forward(number, given)

    pod = PodGate(tmp_path / "run")
    pod.show(pod.gate)
    pod.be_rank(monkeypatch)

    def train(net: Net, callback: MusterCallback) -> None:
        trainer = trainer_of(tmp_path, 10**9, net=net, max_steps=3)
        trainer.add_callback(callback)
        trainer.train()

    callback = MusterCallback(steps_only=True)
    with pytest.raises(MemoryError), callback if entered else nullcontext():
        train(Failing(), callback)
    assert (pod.told().step, pod.told().drain) == (2, not entered)
    train(Net(), MusterCallback(steps_only=True))
    assert (pod.told().step, pod.told().drain) == (3, False)


@pytest.mark.parametrize(
    ("library", "load"),
    [
        ("transformers", "give train() resume_from_checkpoint=last_checkpoint("),
        ("lightning", "give fit() ckpt_path=last_checkpoint("),
    ],
)
def test_a_trainer_that_begins_before_the_last_commit_makes_no_step(
    tmp_path: Path, library: str, load: str
) -> None:
    """As without ``resume_from_checkpoint``, or with ``ckpt_path="last"``."""
    training = Training(tmp_path, library)
    training.pod.show(replace(IDLE, last_commit=LastCommit(50, 0, 1)))
    with training() as rank:
        assert rank.end() == 1
    assert "saved step 50, and training begins at step 1" in rank.complaints
    assert "CheckpointMissing: all ranks of this job have" in rank.complaints
    assert load in rank.complaints
    assert not training.made


DIES_AT = 12


@pytest.mark.parametrize("dies", ["dies_after", pytest.param("dies_at", marks=pytest.mark.long)])
@pytest.mark.parametrize("trainer", ["transformers", "lightning"])
def test_i12_i13_a_trainer_lives_through_a_loss_a_join_and_a_drain(
    tmp_path: Path, trainer: str, dies: str
) -> None:
    life = import_module(f"tests.support.training.{trainer}_survivor").train
    with Worlds(tmp_path, life=life) as worlds:
        worlds.start("c", **{dies: DIES_AT})
        worlds.begin(*"abc")
        worlds.until(lambda: worlds.is_dead("c"), "c dies amid a step")
        worlds.lose("c")
        worlds.start("d")
        worlds.join("d")
        worlds.at(worlds.told("a")["step"] + 3)
        worlds.leave("a")
        worlds.at(worlds.told("b")["step"] + 3)
        worlds.check_rows(worlds.finish(compared=False))
        assert {*worlds.digests()} == {1, 2, 3, 4}


@pytest.mark.parametrize("trainer", ["transformers", "lightning"])
def test_a_trainer_falls_back_before_its_first_world(tmp_path: Path, trainer: str) -> None:
    life = import_module(f"tests.support.training.{trainer}_survivor").train
    (tmp_path / "goal").write_text("6")
    with Worlds(tmp_path, life=life) as worlds:
        worlds.start("a")
        worlds.ready("a")
        worlds.order("a", phase="fall-back", why="another rank has no World")
        worlds.until(lambda: worlds.is_dead("a"), "it trains to its end")
        assert worlds.processes["a"].exitcode == 0, worlds.shown()
        assert [line["step"] for line in worlds.log("a") if "step" in line] == [*range(1, 7)]
        assert "does not change in place from step 0 on: another rank" in worlds.shown()


def test_without_a_sidecar_a_trainer_trains_as_without_in_place(tmp_path: Path) -> None:
    import muster.transformers
    from tests.support.training.transformers_life import ROWS as OWN_ROWS
    from tests.support.training.transformers_life import trainer_of

    given: dict[str, Any] = {"num_train_epochs": 1}
    plain, in_place = (trainer_of(tmp_path / name, 10**9, **given) for name in "ab")
    muster.transformers.train(plain, global_batch=10)
    muster.transformers.train(in_place, global_batch=10, in_place=True)
    assert in_place.model.seen == plain.model.seen
    assert Counter(in_place.model.seen) == Counter(range(len(OWN_ROWS)))


def test_a_rank_that_stands_alone_trains_in_no_world_but_one_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import muster.transformers
    from tests.support.training.transformers_life import trainer_of

    monkeypatch.setattr(muster.transformers, "_alone", True)
    trainer = trainer_of(tmp_path, 10**9, num_train_epochs=1)
    with pytest.raises(ValueError, match="was started beside a world that trains"):
        muster.transformers.train(trainer, global_batch=10)
    assert not trainer.model.seen


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"strategy": "auto"}, "it needs strategy='ddp'"),
        ({"callbacks": ["StochasticWeightAveraging"]}, "StochasticWeightAveraging"),
        ({"callbacks": ["LearningRateFinder"]}, "LearningRateFinder"),
    ],
)
def test_a_trainer_of_lightning_that_cannot_live_on_is_refused(
    tmp_path: Path, given: dict[str, Any], named: str
) -> None:
    import lightning.pytorch.callbacks as kinds

    import muster.lightning
    from tests.support.training.lightning_cases import DATA, Net

    made = {"StochasticWeightAveraging": {"swa_lrs": 0.1}}
    callbacks = [getattr(kinds, one)(**made.get(one, {})) for one in given.pop("callbacks", [])]
    with pytest.raises(ValueError, match=named):
        muster.lightning.fit(
            Net(), DATA, directory=str(tmp_path), global_batch=16, in_place=True,
            accelerator="cpu", logger=False, callbacks=callbacks, **given,
        )  # fmt: skip


@pytest.mark.parametrize("batch", [16, 40, 10])
def test_i12_another_global_batch_goes_on_at_the_sample_after_the_last_one(
    tmp_path: Path, batch: int
) -> None:
    """Three epochs of 7 steps; the first life ends in the middle of the second epoch."""
    from tests.support.training.transformers_life import life

    first, _ = life(tmp_path, 16, 10, num_train_epochs=3)
    second, trainer = life(tmp_path, batch, 10**9, num_train_epochs=3)
    assert Counter(first.seen + second.seen) == Counter(dict.fromkeys(range(100), 3))
    assert max(trainer.lr_scheduler.get_last_lr()) == pytest.approx(0.0)
    assert trainer.state.epoch == 3.0


@pytest.mark.parametrize("batch", [40, 10])
def test_steps_that_the_user_counts_stay_as_many(tmp_path: Path, batch: int) -> None:
    from tests.support.training.transformers_life import life

    life(tmp_path, 16, 5, max_steps=30)
    second, trainer = life(tmp_path, batch, 10**9, max_steps=30)
    assert trainer.state.global_step == 30
    left = Counter(second.seen)
    assert max(left.values()) - min(left[number] for number in range(100)) <= 2


def test_a_callback_that_is_given_twice_counts_each_step_once(tmp_path: Path) -> None:
    """It adds itself to the trainer, and users add it as they do others."""
    from tests.support.training.transformers_life import life

    first, _ = life(tmp_path, 10, 3, twice=True)
    second, trainer = life(tmp_path, 10, 10**9, twice=True, num_train_epochs=1)
    assert Counter(first.seen + second.seen) == Counter(range(100))
    assert trainer.state.global_step == 10


def test_a_sample_that_fills_an_empty_share_counts_in_no_tokens() -> None:
    """A last batch of two samples in a world of three: the first rank has none of it."""
    from transformers import Trainer

    from muster.transformers_data import TrainerData

    counts = []
    for rank in range(3):
        args = SimpleNamespace(
            seed=3, data_seed=None, per_device_train_batch_size=8, process_index=rank,
            world_size=3, average_tokens_across_devices=False, n_gpu=1,
            gradient_accumulation_steps=1,
        )  # fmt: skip
        trainer: Any = SimpleNamespace(
            args=args, train_dataset=range(2), model_accepts_loss_kwargs=True,
            _loss_shifts_labels=False, compute_loss=None, compute_loss_func=None,
            get_tp_size=lambda: 1, get_cp_size=lambda: 1, get_sp_size=lambda: 1,
            _init_training_state=None, create_scheduler=None,
        )  # fmt: skip
        trainer._get_num_items_in_batch = partial(Trainer._get_num_items_in_batch, trainer)
        data = TrainerData(trainer, 3, "short")
        batch = {"labels": torch.tensor([[5, 6, -100]])}
        taken, items = data.get_batch_samples(iter([batch]), 1, "cpu")
        assert taken == [batch]
        counts.append((data.sampler.parts[0].samples, int(items)))
    # Alone the filler is one of none: its loss is 0, and is divided by something.
    assert sorted(counts) == [(0, 1), (1, 2), (1, 2)]


def test_what_is_no_trainer_is_refused_by_its_name() -> None:
    called = pytest.importorskip("muster.transformers")
    with pytest.raises(TypeError, match="give it a transformers Trainer, and no Linear"):
        called.train(torch.nn.Linear(1, 1), global_batch=8)
