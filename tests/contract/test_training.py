# SPDX-License-Identifier: Apache-2.0
"""``muster.train()``: each sample once over several lives, or an error that says what to write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import muster
from muster.torch_parts import fault
from rdzv.drain.gate import Gate
from rdzv.records.drain import LastCommit
from tests.support.sidecars.pod_gate import PodGate

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

ROWS, BATCH = 60, 12


class Life:
    """A process that trains: a model from the same seed, and what it has trained."""

    def __init__(self, directory: Path, rows: int = ROWS, **given: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(1, 1)
        self.optimizer = SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.scheduler = StepLR(self.optimizer, 1, 0.9)
        self.seen: list[int] = []
        self.training = muster.train(
            self.model,
            self.optimizer,
            [(row, torch.tensor([row / ROWS])) for row in range(rows)],
            **{
                "also": {"scheduler": self.scheduler},
                "global_batch": BATCH,
                "directory": directory,
                **given,
            },
        )

    def loss_of(self, batch: Any) -> Any:
        rows, given = batch
        self.seen += rows.tolist()
        return (self.model(given) - given.sin()).square().mean()

    def train(self, until: int = 1000, *, schedule: bool = True) -> Life:
        """Train to the end, or leave the loop after a step."""
        with self.training as training:
            for batch in training:
                if training.step(self.loss_of(batch)):
                    if schedule:
                        self.scheduler.step()
                    if training.steps == until:
                        break
        return self


def weights(life: Life) -> list[float]:
    return [*life.model.weight.flatten().tolist(), *life.model.bias.tolist()]


@pytest.mark.parametrize("stops", [[2], [5], [3, 7], [1, 2, 8]])
def test_i12_lives_train_each_sample_once_an_epoch(tmp_path: Path, stops: list[int]) -> None:
    """Each life of another accumulation, as a world of another size has it."""
    micro = [12, 5, 3, 4, 12]
    lives = [
        Life(tmp_path / "out", epochs=2, micro_batch=micro[at]).train(stop)
        for at, stop in enumerate([*stops, 1000])
    ]
    assert Counter(row for life in lives for row in life.seen) == Counter(
        dict.fromkeys(range(ROWS), 2)
    )
    assert lives[-1].training.steps == 2 * ROWS // BATCH
    calm = Life(tmp_path / "calm", epochs=2).train()
    assert weights(lives[-1]) == pytest.approx(weights(calm), rel=1e-5)
    assert lives[-1].scheduler.get_last_lr() == calm.scheduler.get_last_lr()


def test_i12_rows_that_are_added_are_trained_in_the_epoch_that_has_begun(tmp_path: Path) -> None:
    lives = [Life(tmp_path, ROWS, epochs=2).train(3)]
    with pytest.raises(ValueError, match="grows=True goes on if samples were added"):
        Life(tmp_path, ROWS + 15, epochs=2).train()
    lives += [Life(tmp_path, ROWS + 15, epochs=2, grows=True).train(stop) for stop in (4, 1000)]
    assert Counter(row for life in lives for row in life.seen) == Counter(
        dict.fromkeys(range(ROWS + 15), 2)
    )


@pytest.mark.parametrize(
    ("given", "steps", "epoch"), [({}, ROWS // BATCH, 1), ({"max_steps": 3}, 3, 0)]
)
def test_a_run_that_has_ended_trains_nothing_more(
    tmp_path: Path, given: dict[str, Any], steps: int, epoch: int
) -> None:
    for trained in (steps * BATCH, 0):
        life = Life(tmp_path, **given).train()
        assert (len(life.seen), life.training.steps) == (trained, steps)
    assert life.training.epoch == epoch


def raises(life: Life) -> None:
    with life.training as training:
        for batch in training:
            training.step(life.loss_of(batch))
            raise ZeroDivisionError


def test_an_exception_saves_nothing_and_leaves_the_drain(tmp_path: Path) -> None:
    life = Life(tmp_path)
    with pytest.raises(ZeroDivisionError):
        raises(life)
    assert life.training.drain is None
    assert len(Life(tmp_path).train().seen) == ROWS


def test_a_loop_that_was_left_goes_on_with_the_first_step_not_made(tmp_path: Path) -> None:
    life = Life(tmp_path, micro_batch=6)
    with life.training as training:
        for at, batch in enumerate(training):
            if at == 0:  # gradients of half a step, which do not count
                training.step(life.loss_of(batch))
                life.seen.clear()
            else:
                break  # taken, and not trained
        for batch in training:
            if training.step(life.loss_of(batch)):
                break
        for batch in training:
            training.step(life.loss_of(batch))
    assert Counter(life.seen) == Counter(range(ROWS))
    calm = Life(tmp_path / "calm")
    assert weights(life) == pytest.approx(weights(calm.train(schedule=False)), rel=1e-5)


def test_a_script_makes_the_optimizer_step_itself(tmp_path: Path) -> None:
    life, made = Life(tmp_path, micro_batch=4), 0
    with life.training as training:
        for batch in training:
            if training.backward(life.loss_of(batch)):
                nn.utils.clip_grad_norm_(life.model.parameters(), 1.0)
                life.optimizer.step()
                life.optimizer.zero_grad()
                made += 1
    assert made == training.steps == ROWS // BATCH


def test_steps_that_no_optimizer_makes_are_refused(tmp_path: Path) -> None:
    life = Life(tmp_path, epochs=9)
    with pytest.raises(RuntimeError, match="20 steps, and no optimizer has made one"):
        only_gradients(life)
    assert life.training.steps == 20


def only_gradients(life: Life) -> None:
    with life.training as training:
        for batch in training:
            training.backward(life.loss_of(batch))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (None, "the loss is NoneType"),
        (0.5, "the loss is float"),
        (torch.zeros(3, requires_grad=True), r"the shape \(3,\): give its mean"),
        (torch.zeros(()), "the loss has no gradient"),
    ],
)
def test_what_is_no_loss_is_refused(tmp_path: Path, loss: Any, said: str) -> None:
    with Life(tmp_path).training as training:
        for _ in training:
            with pytest.raises(ValueError, match=said):
                training.step(loss)
            training.step(sum(one.sum() for one in training._state._model.parameters()))


def not_trained(life: Life) -> None:
    with life.training as training:
        for _ in training:
            pass


def trained_twice(life: Life) -> None:
    with life.training as training:
        for batch in training:
            training.step(life.loss_of(batch))
            training.step(life.loss_of(batch))


def not_entered(life: Life) -> None:
    for _ in life.training:
        raise AssertionError


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (not_trained, "a batch was not trained: call training.step"),
        (trained_twice, "no batch is to be trained: call training.step"),
        (not_entered, "belongs into `with muster.train"),
    ],
)
def test_a_loop_that_would_lose_or_repeat_samples_raises(
    tmp_path: Path, use: Callable[[Life], None], said: str
) -> None:
    with pytest.raises(RuntimeError, match=said):
        use(Life(tmp_path))


def test_options_of_the_loader_that_cannot_be_counted_are_refused(tmp_path: Path) -> None:
    life = Life(tmp_path, num_workers=1, in_order=False)
    with pytest.raises(ValueError, match="leave out in_order"):
        life.train()


class Stream(torch.utils.data.IterableDataset[int]):  # type: ignore[misc]
    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS))


def test_a_stream_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    rows: Any = Stream()
    with pytest.raises(ValueError, match="the data are a stream"):
        muster.train(model, SGD(model.parameters(), 1), rows, directory=tmp_path, global_batch=4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"global_batch": 0}, "global_batch=0: give a whole number from 1"),
        ({"epochs": "3"}, "epochs='3': give a whole number from 1"),
        ({"max_steps": 0}, "max_steps=0: give a whole number from 1"),
        ({"directory": ""}, "directory is empty"),
        ({"model": SGD([torch.zeros(1)], 1)}, "the model is SGD, and no torch.nn.Module"),
        ({"optimizer": None}, "give it an optimizer of torch.optim"),
        ({"optimizer": []}, "give it an optimizer of torch.optim"),
        ({"also": [1]}, "also=list: give names, too"),
        ({"also": {"at": 3}}, r"also: 'at' has no state_dict\(\)"),
        ({"data": torch.utils.data.DataLoader([1])}, "the data are a DataLoader"),
    ],
)
def test_what_is_not_meant_is_refused_at_the_call(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    model = nn.Linear(1, 1)
    call = {"model": model, "optimizer": SGD(model.parameters(), 1), "data": [1, 2], **given}
    with pytest.raises(ValueError, match=f"muster.train: {said}"):
        muster.train(**{"directory": tmp_path, "global_batch": 2, **call})


def other_optimizer(model: nn.Module) -> SGD:
    return SGD(nn.Linear(1, 1).parameters(), 0.1)


@pytest.mark.parametrize(
    ("optimizer", "world_size", "said"),
    [
        (other_optimizer, 1, "none of the model's parameters"),
        (None, 1, ""),
        (None, 2, "there is no process group"),
    ],
)
def test_ranks_that_would_not_train_one_model_are_refused(
    optimizer: Any, world_size: int, said: str
) -> None:
    model = nn.Linear(1, 1)
    made = optimizer(model) if optimizer else SGD(model.parameters(), 0.1)
    assert said in fault(model, [made], world_size)
    assert bool(said) == bool(fault(model, [made], world_size))


def test_a_model_that_nobody_averages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.torch_parts.dist.is_initialized", lambda: True)
    model = nn.Linear(1, 1)
    said = fault(model, [SGD(model.parameters(), 0.1)], 2)
    assert "each rank would train a model of its own: give it DistributedDataParallel" in said


def test_with_muster_checks_warn_it_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MUSTER_CHECKS", "warn")
    model = nn.Linear(1, 1)
    muster.train(model, other_optimizer(model), [1, 2], directory=tmp_path, global_batch=2)
    assert "none of the model's parameters" in caplog.text


def saved(directory: Path) -> list[int]:
    """The steps of the whole checkpoints."""
    return sorted(int(path.parent.name[-8:]) for path in directory.glob("*/muster.json"))


def test_the_newest_checkpoints_stay_and_the_last_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = muster.CommittedStep(1, tag=muster.save_tag())
    monkeypatch.setattr("muster.checkpoints.last_commit", lambda: committed)
    Life(tmp_path, save_every=1, keep=2).train()
    assert saved(tmp_path) == [1, 4, 5]


def test_a_checkpoint_that_a_kill_leaves_half_removed_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(path: str) -> None:
        raise OSError(5, "Input/output error", path)

    with monkeypatch.context() as killed:
        killed.setattr("muster.checkpoints.shutil.rmtree", interrupted)
        Life(tmp_path, save_every=1, keep=2).train()
    assert saved(tmp_path) == [4, 5]
    assert "cannot remove the old checkpoint" in caplog.text
    # The newest of those that are left is passed over if it is not whole.
    (newest,) = tmp_path.glob("*-00000005/muster.json")
    newest.unlink()
    assert len(Life(tmp_path).train().seen) == BATCH


class OfItsOwn:
    """A state that a checkpoint could not give back without running what the file says."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": SimpleNamespace()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError


def test_a_state_that_no_checkpoint_gives_back_is_refused_at_the_first_save(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than plain data and tensors"):
        Life(tmp_path, also={"own": OfItsOwn()}).train()


def test_a_commit_that_is_not_in_the_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = PodGate(tmp_path / "run", "")
    pod.be_rank(monkeypatch)
    pod.show(Gate(run="job", master="", last_commit=LastCommit(40, 0, 1)))
    with pytest.raises(muster.CheckpointMissing, match="have saved step 40, and there is no"):
        Life(tmp_path / "empty").train()


def accelerator(**given: Any) -> Any:
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), 0.1)
    made = {
        "distributed_type": "MULTI_CPU",
        "gradient_accumulation_steps": 1,
        "project_configuration": SimpleNamespace(automatic_checkpoint_naming=False),
        "_models": [model],
        "_optimizers": [optimizer],
        "_schedulers": [],
    }
    return SimpleNamespace(**{**made, **given}), model, optimizer


BY_RANKS = SimpleNamespace(step_with_optimizer=True, split_batches=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ""),
        ({"distributed_type": "DEEPSPEED"}, "with DEEPSPEED steps and gradients are not"),
        (
            {"parallelism_config": SimpleNamespace(non_data_parallel_size=2)},
            "sequence-parallel group train the same samples",
        ),
        ({"gradient_accumulation_steps": 4}, "leave out gradient_accumulation_steps"),
        (
            {"project_configuration": SimpleNamespace(automatic_checkpoint_naming=True)},
            "leave out automatic_checkpoint_naming",
        ),
        ({"_models": []}, "what accelerator.prepare(model, optimizer) has returned"),
        ({"_optimizers": []}, "what accelerator.prepare(model, optimizer) has returned"),
        ({"_schedulers": [BY_RANKS]}, "as also={'scheduler': scheduler}"),
    ],
)
def test_accelerate_is_the_same_loop_or_refused(given: Any, said: str) -> None:
    from muster.torch_parts import fault_of_prepared

    made, model, optimizer = accelerator(**given)
    found = fault_of_prepared(made, model, [optimizer])
    assert said in found
    assert bool(said) == bool(found)
