# SPDX-License-Identifier: Apache-2.0
"""``muster.train()``: a training loop that loses no step and no sample, in worlds of any size.

    with muster.train(model, optimizer, rows, global_batch=64, directory="/shared") as training:
        for batch in training:
            training.step(loss_of(model, batch))

A boundary comes when the loop asks for its next batch: what its body does after the optimizer step,
as a learning rate schedule, is in the checkpoint of that step.
"""

from __future__ import annotations

import logging
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, Iterator, Mapping, Optional, Sequence, Type, Union

from muster.batches import MicroBatch
from muster.checkpoints import Checkpoints, SavedPlace, of_rank_0
from muster.data.sampler import ElasticSampler
from muster.draining import Drain, drain
from muster.orders import seed_step
from muster.resuming import WorldMark, last_commit, save_tag
from muster.torch_parts import Rows, Stateful, TorchParts, check_given, loader_of, size_of

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn
    from torch.optim import Optimizer


class Training:
    """One run of a training loop, as made by ``muster.train()``; enter it before iterating.

    On entering, it loads the checkpoint of the last commit, or a later whole one. On leaving it
    without an exception, the last step is saved. ``steps``: the optimizer steps that were made, in
    all worlds together. ``sampler``: the place in the data, to look at. ``drain``: its part in
    drains; None outside of the block.
    """

    def __init__(
        self,
        state: TorchParts,
        sampler: ElasticSampler,
        loader: Any,
        checkpoints: Checkpoints,
        *,
        epochs: int,
        max_steps: Optional[int],
        save_every: int,
    ) -> None:
        self.steps = 0
        self.sampler = sampler
        self.drain: Optional[Drain] = None
        self._state = state
        self._loader = loader
        self._checkpoints = checkpoints
        self._epochs = epochs
        self._max_steps = max_steps
        self._save_every = save_every
        self._mark = WorldMark(checkpoints.directory, marks=sampler.rank == 0)
        self._part: Optional[MicroBatch] = None
        self._made = False
        self._saved = 0
        self._place: Mapping[str, Any] = sampler.cursor

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is of, from 0."""
        return self.sampler.epoch

    def __enter__(self) -> Training:
        checkpoints = self._checkpoints
        path = of_rank_0(lambda: checkpoints.newest(last_commit()))
        place = SavedPlace(0, None) if path is None else checkpoints.place_of(path)
        entered = drain(place.step, checkpoints.directory)
        if path is not None:
            self._state.load(path)
            self.sampler.go_to(place.cursor)
        self.steps = self._saved = place.step
        self._place = self.sampler.cursor
        self.drain = entered.__enter__()
        self._mark.begin()
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        entered = self._entered("leaving the block")
        try:
            if error is None:
                self._arrive(last=True)
        except BaseException as raised:
            self.drain = None
            entered.__exit__(type(raised), raised, raised.__traceback__)
            raise
        self.drain = None
        entered.__exit__(kind, error, traceback)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's micro batches to the end of the last epoch, or of the last step.

        Raises ``RuntimeError`` if the loop asks for the next batch before it has trained this one,
        and ``ValueError`` if the loader's options make batches that cannot be counted. A loop that
        was left by ``break`` may be entered again: it goes on with the first step not yet made.
        """
        self._entered("iterating")
        self._arrive()
        self.sampler.go_to(self._place)
        self._part = None
        self._state.zero_grad()
        while not self._is_over:
            begins = True
            for batch, part in self.sampler.follow(self._loader):
                if begins:
                    seed_step(self.sampler.seed, self.steps, self.sampler.rank)
                self._part, begins = part, part.ends_step
                with self._state.accumulating(part.ends_step):
                    yield self._state.move(batch)
                if self._part is not None:
                    raise RuntimeError(
                        "a batch was not trained: call training.step(loss) once for each batch, on"
                        " every rank"
                    )
                self._arrive()
                if self._is_over:
                    break

    def step(self, loss: Tensor) -> bool:
        """Train the batch with its mean loss; return whether that completed an optimizer step.

        Gradients are accumulated until a step is complete: then the optimizers make theirs.
        """
        ends = self.backward(loss)
        if ends:
            self._state.step()
        return ends

    def backward(self, loss: Tensor) -> bool:
        """Weigh the mean loss of the batch, and call its ``backward()``; return whether to step.

        For a loop that makes the optimizer step itself, as to clip gradients or for a scaler: where
        it returns True, step the optimizers, and set the gradients to zero. Raises
        ``RuntimeError`` if the batch was trained before.
        """
        fault = self._state.loss_fault(loss)
        if fault:
            raise ValueError("training.step(loss): " + fault)
        part = self._part
        if part is None:
            raise RuntimeError(
                "no batch is to be trained: call training.step(loss) once for each batch of"
                " `for batch in training`"
            )
        self._state.backward(loss if part.weight == 1.0 else loss * part.weight)
        self._part = None
        if part.ends_step:
            self.steps += 1
            self._made = True
        return part.ends_step

    @property
    def _is_over(self) -> bool:
        over = self._max_steps is not None and self.steps >= self._max_steps
        return over or self.sampler.epoch >= self._epochs

    def _entered(self, what: str) -> Drain:
        if self.drain is None:
            raise RuntimeError(
                "%s belongs into `with muster.train(...) as training`, which is entered once" % what
            )
        return self.drain

    def _arrive(self, last: bool = False) -> None:
        """Come to the boundary after a step that was made; save if that is due."""
        entered = self._entered("training")
        due = False
        if self._made:
            self._made = False
            self._state.stepped()
            self._place = self.sampler.cursor
            due = entered.commit_due(self.steps) or self.steps % self._save_every == 0
        if due or (last and self.steps > self._saved):
            self._mark.check()
            self._checkpoints.save(SavedPlace(self.steps, self._place), save_tag())
            self._saved = self.steps
            entered.committed(self.steps, cursor=self._place)


def train(
    model: nn.Module,
    optimizer: Union[Optimizer, Sequence[Optimizer]],
    data: Rows,
    *,
    directory: Union[str, "os.PathLike[str]"],
    global_batch: int,
    micro_batch: Optional[int] = None,
    epochs: int = 1,
    max_steps: Optional[int] = None,
    save_every: int = 500,
    keep: int = 2,
    also: Optional[Mapping[str, Stateful]] = None,
    seed: int = 0,
    last: str = "short",
    shuffle: bool = True,
    weights: Optional[Sequence[int]] = None,
    grows: bool = False,
    accelerator: Optional[Accelerator] = None,
    **loader: Any,
) -> Training:
    """Return the ``Training`` of a model, for ``with muster.train(...) as training``.

    ``model`` is as it trains: within ``DistributedDataParallel``, or after ``fully_shard``, in a
    world of more than one rank. ``data`` has a length, and rows by number: a list, or a
    ``Dataset``, no ``DataLoader``. ``directory`` is one that every pod of the job reads and writes;
    the newest ``keep`` checkpoints stay there. ``epochs`` and ``max_steps``: training ends with the
    one that comes first. ``save_every``: the steps between two periodic saves, which are what a
    killed node costs at most. ``also``: what else is in a checkpoint, such as ``{"scheduler":
    scheduler}``: objects with ``state_dict()`` and ``load_state_dict()``. ``accelerator``: that of
    accelerate which has prepared ``model`` and ``optimizer``. ``loader``: options of torch's
    ``DataLoader``, such as ``num_workers``. The others are those of ``muster.data.ElasticSampler``.
    Raises ``ValueError`` if the training would lose or repeat samples, or would not average
    gradients over all ranks.
    """
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    _check_options(
        directory,
        {"global_batch": global_batch, "epochs": epochs, "save_every": save_every, "keep": keep},
        {"micro_batch": micro_batch, "max_steps": max_steps},
    )
    check_given(model, optimizers, also or {})
    size = size_of(data)
    if global_batch > size:
        log.warning(
            "muster.train: global_batch=%d is more than the %d rows: each epoch is one step of them"
            " all",
            global_batch,
            size,
        )
    sampler = ElasticSampler(
        size,
        seed,
        global_batch=global_batch,
        micro_batch=micro_batch,
        last=last,
        shuffle=shuffle,
        weights=weights,
        grows=grows,
    )
    state = _parts_of(model, optimizers, also or {}, sampler.plan.world_size, accelerator)
    return Training(
        state,
        sampler,
        loader_of(data, sampler, loader),
        Checkpoints(os.fspath(directory), keep, state),
        epochs=epochs,
        max_steps=max_steps,
        save_every=save_every,
    )


def _parts_of(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    also: Mapping[str, Stateful],
    world_size: int,
    accelerator: Optional[Accelerator],
) -> TorchParts:
    if accelerator is None:
        return TorchParts(model, optimizers, also, world_size)
    from muster.torch_parts import AccelerateParts

    return AccelerateParts(model, optimizers, also, world_size, accelerator)


def _check_options(
    directory: Union[str, "os.PathLike[str]"],
    numbers: Mapping[str, int],
    optional: Mapping[str, Optional[int]],
) -> None:
    """Raise ``ValueError`` for an empty directory, and for a number that is none from 1 on."""
    if not os.fspath(directory):
        raise ValueError("muster.train: directory is empty: name one that every pod reads")
    given = {name: value for name, value in optional.items() if value is not None}
    for name, value in {**numbers, **given}.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError("muster.train: %s=%r: give a whole number from 1" % (name, value))
