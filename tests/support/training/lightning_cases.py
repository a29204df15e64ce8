# SPDX-License-Identifier: Apache-2.0
"""Uses of Lightning's Trainer that lose or repeat samples by themselves, each with its outcome.

96 rows in global batches of 16. A life ends with the callback's own save, as at a commit. To be
imported by a test itself, not by its file: it takes two seconds.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader

import muster.lightning
from muster.data import ElasticSampler
from muster.lightning import MusterCallback, last_checkpoint

ROWS, BATCH, END = 96, 16, 10**9
DATA: list[Any] = []
for at in range(ROWS):
    given = torch.randn(8, generator=torch.Generator().manual_seed(at))
    DATA.append((at, given, given.sin()))


class Net(LightningModule):
    """Notes what it was trained on, and when it was validated and its epochs ended."""

    def __init__(self, schedule: str = "") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(8, 8)
        self.schedule = schedule
        self.seen: list[int] = []
        self.noted: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number, given, wanted = batch
        self.seen += number.tolist()
        return (self.net(given) - wanted).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("wrong", (self.net(batch[1]) - batch[2]).square().mean())

    def on_validation_epoch_end(self) -> None:
        self.noted.append(("validated", self.global_step, self.trainer.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.noted.append(("ended", self.global_step, self.trainer.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        if self.schedule == "epoch":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
        if self.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, threshold=9.0, patience=0
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "wrong"},
            }
        return optimizer


class Ended(Exception):
    """The process has ended."""


class Commit(Callback):
    def __init__(self, muster: MusterCallback, step: int) -> None:
        self._muster, self._step = muster, step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            self._step = 0
            self._muster._save(trainer, trainer.global_step)
            raise Ended


def tally(seen: list[int]) -> str:
    count = Counter(seen)
    once = sum(many == 1 for many in count.values())
    return f"never {ROWS - len(count)}, once {once}, more {len(count) - once}"


def own(sampler: ElasticSampler) -> Any:
    return DataLoader(DATA, batch_sampler=sampler)


def other(sampler: ElasticSampler) -> Any:
    return DataLoader(DATA, batch_size=8)


def life(
    directory: Path,
    stop: int = END,
    micro: int = 8,
    *,
    net: Any = None,
    loader: Any = own,
    wired: bool = True,
    steps_only: bool = False,
    validated: bool = False,
    more: Any = (),
    **given: Any,
) -> Any:
    """Train to a commit at ``stop``; return the module and the trainer."""
    sampler = ElasticSampler(ROWS, 7, global_batch=BATCH, micro_batch=micro)
    some = {"steps_only": True} if steps_only else {}
    muster = MusterCallback(str(directory), sampler if wired else None, **some)
    net = net or Net()
    usual = {"max_epochs": 1, "num_sanity_val_steps": 0}
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, use_distributed_sampler=False,
        callbacks=[muster, Commit(muster, stop), *more], **{**usual, **given},
    )  # fmt: skip
    evaluation = DataLoader(DATA, batch_size=24) if validated else None
    with suppress(Ended):
        trainer.fit(net, loader(sampler), evaluation, ckpt_path=last_checkpoint(str(directory)))
    return net, trainer


def two_lives(directory: Path, **given: Any) -> list[int]:
    first, _ = life(directory, 3, **given)
    second, _ = life(directory, micro=BATCH, **given)
    return [*first.seen, *second.seen]


def not_wired(directory: Path) -> str:
    return tally(two_lives(directory, loader=other))


def sampler_of_its_own(directory: Path) -> str:
    def loader(sampler: ElasticSampler) -> Any:
        return own(ElasticSampler(ROWS, 7, global_batch=BATCH, micro_batch=8))

    return tally(two_lives(directory, loader=loader))


def two_loaders(directory: Path) -> str:
    class Both(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["one"], batch_idx)

    def loaders(sampler: ElasticSampler) -> Any:
        return {"one": own(sampler), "two": other(sampler)}

    return tally(two_lives(directory, loader=loaders, net=Both()))


def manual(directory: Path) -> str:
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            self.optimizers().step()

    net = Manual()
    net.automatic_optimization = False
    return tally(two_lives(directory, net=net))


def bare(directory: Path) -> str:
    return tally(two_lives(directory, wired=False, loader=other))


def bare_by_name(directory: Path) -> str:
    life(directory, 3, wired=False, loader=other, steps_only=True)
    _, trainer = life(directory, wired=False, loader=other, steps_only=True)
    return f"{trainer.global_step} steps"


def one_call(directory: Path, **named: Any) -> str:
    def seen(**given: Any) -> list[int]:
        net = Net()
        muster.lightning.fit(
            net, DATA, directory=str(directory), global_batch=BATCH, save_every=1, logger=False,
            enable_progress_bar=False, accelerator="cpu", **given,
        )  # fmt: skip
        return net.seen

    return tally(seen(max_steps=2, micro_batch=5, **named) + seen(max_steps=6))


def one_call_that_names_the_world(directory: Path) -> str:
    return one_call(directory, num_nodes=2, devices=1)


def base(directory: Path) -> str:
    return tally(two_lives(directory))


def _begun_without(directory: Path, stop: int) -> list[int]:
    given: dict[str, Any] = {"wired": False, "steps_only": True, "loader": other}
    net, _ = life(directory, stop, accumulate_grad_batches=2, max_epochs=2, **given)
    return list(net.seen)


def adopted(directory: Path) -> str:
    return tally(_begun_without(directory, 3) + life(directory)[0].seen)


def adopted_at_an_epochs_end(directory: Path) -> str:
    first = _begun_without(directory, 6)
    second, trainer = life(directory, micro=BATCH, max_epochs=2)
    return f"{tally(first)}; {tally(second.seen)}; {trainer.global_step} steps"


def both_of_two(directory: Path) -> str:
    life(directory, steps_only=True)
    return "accepted"


def rows_that_grow(directory: Path) -> str:
    sampler = ElasticSampler(ROWS, global_batch=BATCH, grows=True)
    muster = MusterCallback(str(directory), sampler)
    Trainer(accelerator="cpu", logger=False, callbacks=[muster]).fit(Net(), own(sampler))
    return "accepted"


def own_accumulation(directory: Path) -> str:
    net, trainer = life(directory, accumulate_grad_batches=4)
    return f"{tally(net.seen)}; {trainer.global_step} steps"


def _limited(directory: Path, limit: Any) -> str:
    """Two lives of two epochs, of another accumulation each."""
    given = {"limit_train_batches": limit, "max_epochs": 2}
    first, _ = life(directory, 2, **given)
    second, trainer = life(directory, micro=BATCH, **given)
    seen = [*first.seen, *second.seen]
    half = len(seen) // 2
    distinct = len(set(seen[:half])), len(set(seen[half:]))
    return f"{trainer.global_step} steps; {len(seen)} trained; distinct {distinct}"


def limit_of_batches(directory: Path) -> str:
    return _limited(directory, 4)


def limit_of_a_part(directory: Path) -> str:
    return _limited(directory, 0.5)


def limit_of_nothing(directory: Path) -> str:
    net, _ = life(directory, limit_train_batches=0.0)
    return f"{len(net.seen)} trained"


def limit_at_an_epochs_end(directory: Path) -> str:
    first, _ = life(directory, 4, limit_train_batches=4, max_epochs=2)
    second, trainer = life(directory, 99, BATCH, limit_train_batches=4, max_epochs=2)
    distinct = len(set(first.seen)), len(set(second.seen))
    return f"{trainer.global_step} steps; distinct {distinct}"


def _as_undisturbed(directory: Path, stop: int, **given: Any) -> str:
    """Compare what two lives did with one that nothing disturbed."""
    given = {"max_epochs": 3, "validated": True, **given}
    schedule = given.pop("schedule", "")
    stopping = given.pop("stopping", False)

    def more() -> list[Any]:
        return [EarlyStopping("wrong", min_delta=9.0, patience=1)] if stopping else []

    first, _ = life(directory / "two", stop, net=Net(schedule), more=more(), **given)
    second, ended = life(directory / "two", micro=BATCH, net=Net(schedule), more=more(), **given)
    one, alone = life(directory / "one", net=Net(schedule), more=more(), **given)
    found = [*first.noted, *second.noted], [*first.seen, *second.seen], ended.global_step
    if found != (one.noted, one.seen, alone.global_step):
        return f"{found[0]} and {found[2]} steps, undisturbed {one.noted}"
    rates = [each.optimizers[0].param_groups[0]["lr"] for each in (ended, alone)]
    logged = [each.fit_loop.epoch_loop._batches_that_stepped for each in (ended, alone)]
    weights = [each.net.weight for each in (second, one)]
    assert rates[0] == rates[1], rates
    assert logged[0] == logged[1], logged
    assert torch.allclose(*weights, atol=1e-6)
    return "as undisturbed"


def commit_after_the_last_validation_of_an_epoch(directory: Path) -> str:
    """The value that a plateau would be seen in is of the life before."""
    given: dict[str, Any] = {"validated": True, "val_check_interval": 4, "max_epochs": 2}
    life(directory, 5, net=Net("plateau"), **given)
    _, trainer = life(directory, micro=BATCH, net=Net("plateau"), **given)
    return f"{trainer.global_step} steps"


COMMITS: dict[str, dict[str, Any]] = {
    "commit_before_an_epochs_end": {"stop": 5},
    "commit_at_an_epochs_end": {"stop": 6},
    "commit_after_an_epochs_end": {"stop": 7},
    "commit_at_the_last_epochs_end": {"stop": 18},
    "commit_at_an_epochs_end_not_validated": {"stop": 6, "validated": False},
    "commit_at_an_epochs_end_rarely_validated": {"stop": 6, "check_val_every_n_epoch": 2},
    "commit_at_an_epochs_end_by_steps": {"stop": 6, "max_epochs": -1, "max_steps": 15},
    "commit_where_an_epochs_schedule_steps": {"stop": 6, "schedule": "epoch"},
    "commit_where_a_plateau_is_seen": {"stop": 12, "schedule": "plateau"},
    "commit_before_a_plateau_is_seen": {"stop": 11, "schedule": "plateau"},
    "commit_where_training_stops_early": {"stop": 12, "stopping": True, "max_epochs": 9},
    "commit_at_a_validation": {"stop": 2, "val_check_interval": 2},
    "commit_at_a_validation_of_a_part": {
        "stop": 2,
        "val_check_interval": 0.25,
        "limit_train_batches": 5,
    },
    "commit_at_a_validation_of_all_batches": {
        "stop": 8,
        "val_check_interval": 4,
        "check_val_every_n_epoch": None,
    },
}
"""Two lives, the first of which ends with a commit at the step ``stop``."""

CASES = {name: partial(_as_undisturbed, **given) for name, given in COMMITS.items()}
