# SPDX-License-Identifier: Apache-2.0
"""Uses of transformers' Trainer that lose or repeat samples by themselves, each with its outcome.

96 rows in global batches of 16. To be imported by a test itself, as ``transformers_life``.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, WeightedRandomSampler
from transformers import BertConfig, BertForSequenceClassification, Trainer

from muster.transformers import MusterCallback, last_checkpoint
from tests.support.training.transformers_life import life, trainer_of

ROWS, BATCH, END = 96, 16, 10**9
LENGTHS = [1 + number % 48 for number in range(ROWS)]


def row(number: int) -> dict[str, Any]:
    given = torch.randn(8, generator=torch.Generator().manual_seed(number))
    return {"number": number, "given": given, "wanted": given.sin()}


DATA = [row(number) for number in range(ROWS)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(8, 8)
        self.seen: list[int] = []

    def forward(self, number: Any, given: Any, wanted: Any) -> dict[str, Any]:
        if self.training:
            self.seen += number.tolist()
        return {"loss": (self.net(given) - wanted).square().mean()}


def tally(seen: list[int], rows: int = ROWS) -> str:
    count = Counter(seen)
    once = sum(many == 1 for many in count.values())
    return f"never {rows - len(count)}, once {once}, more {len(count) - once}"


GIVEN: dict[str, Any] = {
    "data": DATA, "num_train_epochs": 1, "optim": "sgd", "lr_scheduler_type": "constant",
    "max_grad_norm": 0, "learning_rate": 0.05,
}  # fmt: skip


def train(
    directory: Path, stop: int = END, batch: int = BATCH, net: Any = None, **given: Any
) -> tuple[Any, Trainer]:
    return life(directory, batch, stop, net=net or Net(), **{**GIVEN, **given})


def two_lives(directory: Path, **given: Any) -> list[int]:
    """Return the samples of a life of three steps, and of one of another accumulation after it."""
    first, _ = train(directory, 3, **given)
    second, _ = train(directory, per_device_train_batch_size=BATCH, **given)
    return [*first.seen, *second.seen]


def sequential(directory: Path) -> str:
    return (
        "in order"
        if two_lives(directory, train_sampling_strategy="sequential") == list(range(ROWS))
        else "in another order"
    )


def _padding(seen: list[int], micro: int = 8) -> float:
    """Return how much longer than their samples batches are."""
    batches = [[LENGTHS[one] for one in seen[at : at + micro]] for at in range(0, ROWS, micro)]
    return sum(max(one) * len(one) - sum(one) for one in batches) / sum(map(sum, batches))


def group_by_length(directory: Path) -> str:
    data = [{"input_ids": [1] * LENGTHS[number], **DATA[number]} for number in range(ROWS)]

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        names = ("given", "wanted")
        stacked = {name: torch.stack([one[name] for one in rows]) for name in names}
        return {"number": torch.tensor([one["number"] for one in rows]), **stacked}

    class Collating(Trainer):
        def __init__(self, *some: Any, **given: Any) -> None:
            super().__init__(*some, data_collator=collate, **given)

    given: dict[str, Any] = {"kind": Collating, "data": data}
    seen = two_lives(directory / "1", train_sampling_strategy="group_by_length", **given)
    whole, _ = train(directory / "2", train_sampling_strategy="group_by_length", **given)
    plain, _ = train(directory / "3", **given)
    batches = [set(seen[at : at + BATCH]) for at in range(0, ROWS, BATCH)]
    same = batches == [set(plain.seen[at : at + BATCH]) for at in range(0, ROWS, BATCH)]
    less = _padding(whole.seen) < 0.7 * _padding(plain.seen)
    return f"{tally(seen)}; batches {'kept' if same else 'lost'}; less padding: {less}"


def rows_that_grow(directory: Path) -> str:
    first, _ = train(directory, 3, data=DATA[:80])
    second, _ = train(directory)
    return tally([*first.seen, *second.seen])


class OwnSampler(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return WeightedRandomSampler([1.0] * ROWS, ROWS)


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


def own_loader_of_one(directory: Path) -> str:
    trainer = trainer_of(directory, END, data=DATA, net=Net())
    trainer.get_train_dataloader = trainer.get_train_dataloader
    MusterCallback(trainer, global_batch=BATCH)
    return "accepted"


def own_accumulation(directory: Path) -> str:
    net, trainer = train(directory, gradient_accumulation_steps=4)
    return f"{tally(net.seen)}; {trainer.state.global_step} steps"


def drop_last(directory: Path) -> str:
    net, _ = train(directory, batch=20, dataloader_drop_last=True)
    return f"{len(net.seen)} of {ROWS}"


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


class Sized(Stream):
    def __len__(self) -> int:
        return ROWS


def save_only_model(directory: Path) -> str:
    train(directory, 3, save_only_model=True, optim="adamw_torch")
    _, trainer = train(directory, 4, save_only_model=True, optim="adamw_torch")
    assert trainer.optimizer is not None
    return f"Adam counts {max(int(one['step']) for one in trainer.optimizer.state.values())}"


def save_only_model_of_steps(directory: Path) -> str:
    trainer = trainer_of(directory, 3, data=DATA, net=Net(), save_only_model=True)
    with MusterCallback(steps_only=True) as callback:
        trainer.add_callback(callback)
        trainer.train()
    return "accepted"


def _begun_without(directory: Path, steps: int) -> list[int]:
    """Train ``steps`` of 8 rows by the trainer alone."""
    trainer = trainer_of(directory, steps, net=Net(), **{**GIVEN, "num_train_epochs": 2})
    trainer.train()
    return list(trainer.model.seen)


def adopted(directory: Path) -> str:
    seen = _begun_without(directory, 4)
    return tally(seen + train(directory)[0].seen)


def adopted_and_replaced(directory: Path) -> str:
    seen = _begun_without(directory, 4)
    return f"{len(seen + train(directory, replace=True)[0].seen)} trained"


def adopted_at_an_epochs_end(directory: Path) -> str:
    seen = _begun_without(directory, ROWS // 8)
    net, trainer = train(directory, num_train_epochs=2)
    return f"{tally(seen)}; {tally(net.seen)}; {trainer.state.epoch} epochs"


def bare(directory: Path) -> str:
    trainer = trainer_of(
        directory, 3, data=DATA, net=Net(), gradient_accumulation_steps=2, save_strategy="no"
    )
    trainer.add_callback(MusterCallback())
    trainer.train(resume_from_checkpoint=last_checkpoint(str(directory)))
    return f"{trainer.state.global_step} steps"


def bare_beside_one_that_keeps_the_data(directory: Path) -> str:
    trainer = trainer_of(directory, END, data=DATA, net=Net(), num_train_epochs=1)
    trainer.add_callback(MusterCallback())
    with MusterCallback(trainer, global_batch=BATCH):
        trainer.train()
    return tally(trainer.model.seen)


def both_of_two(directory: Path) -> str:
    MusterCallback(global_batch=BATCH, steps_only=True)
    return "accepted"


def without_a_batch(directory: Path) -> str:
    trainer = trainer_of(directory, 3, data=DATA, net=Net(), gradient_accumulation_steps=2)
    MusterCallback(trainer)
    return "accepted"


class Labelled(Net):
    """A model that takes what the trainer gives a loss, and returns a mean."""

    def forward(self, number: Any, given: Any, wanted: Any, **rest: Any) -> dict[str, Any]:
        return super().forward(number, given, wanted)


class OwnLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *some: Any, **given: Any) -> Any:
        return model(**inputs)["loss"]


class OwnMean(OwnLoss):
    loss_is_scaled_for_ga = False


class Told(OwnLoss):
    """As the warning says."""

    def __init__(self, *some: Any, **given: Any) -> None:
        super().__init__(*some, **given)
        self.model_accepts_loss_kwargs = False


def _first_step(directory: Path, net: Any, micro: int, batch: int, **given: Any) -> Any:
    before = torch.cat([one.detach().flatten().clone() for one in net.parameters()])
    trained, _ = train(
        directory / str(micro), 1, batch, net=net, per_device_train_batch_size=micro, **given
    )
    return torch.cat([one.detach().flatten() for one in trained.parameters()]) - before


def _steps_of(directory: Path, make: Any, batch: int, micro: int, **given: Any) -> str:
    """Compare a first step of one micro batch with one of several."""
    whole = _first_step(directory, make(), batch, batch, **given)
    cut = _first_step(directory, make(), micro, batch, **given)
    if torch.allclose(whole, cut, rtol=1e-4, atol=1e-7):
        return "the same step"
    return f"{cut.norm() / whole.norm():.2f} times the step"


LABELLED = [{**one, "labels": one["number"] % 2} for one in DATA]


def own_loss(directory: Path) -> str:
    return _steps_of(directory, Labelled, 16, 8, kind=OwnLoss, data=LABELLED)


def own_loss_by_the_items_given(directory: Path) -> str:
    return _steps_of(directory, Labelled, 20, 7, kind=Told, data=LABELLED)


def own_mean_uneven(directory: Path) -> str:
    return _steps_of(directory, Labelled, 20, 7, kind=OwnMean, data=LABELLED)


def bert(directory: Path) -> str:
    data = [{"input_ids": torch.arange(at, at + 8) % 50, "labels": at % 2} for at in range(ROWS)]

    def make() -> Any:
        torch.manual_seed(0)
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=50, intermediate_size=16, hidden_dropout_prob=0,
                attention_probs_dropout_prob=0, **size,
            )
        )  # fmt: skip

    return _steps_of(directory, make, 16, 8, data=data)


def find_batch_size(directory: Path) -> str:
    class Big(Net):
        def forward(self, number: Any, given: Any, wanted: Any) -> dict[str, Any]:
            if self.training and len(number) > 4:
                raise RuntimeError("CUDA out of memory.")
            return super().forward(number, given, wanted)

    net, trainer = train(directory, net=Big(), auto_find_batch_size=True)
    return f"{tally(net.seen)}; accumulation {trainer.args.gradient_accumulation_steps}"


TALLIED: dict[str, dict[str, Any]] = {
    "own_sampler": {"kind": OwnSampler},
    "own_loader": {"kind": OwnLoader},
    "own_sampler_replaced": {"kind": OwnSampler, "replace": True},
    "batch_rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "stream": {"data": Stream(), "max_steps": 6},
    "stream_with_a_length": {"data": Sized()},
}
"""What is given in two lives, of which nothing is asked but how often each row was trained."""


def _tallied(directory: Path, **given: Any) -> str:
    return tally(two_lives(directory, **given))


CASES = {name: partial(_tallied, **given) for name, given in TALLIED.items()}
