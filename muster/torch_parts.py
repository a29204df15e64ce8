# SPDX-License-Identifier: Apache-2.0
"""The model and the optimizers of a ``Training``, in plain torch or prepared by accelerate.

Checkpoints are those of ``torch.distributed.checkpoint``, which a world of another size loads.
"""

from __future__ import annotations

import io
import logging
import pickle
import warnings
from contextlib import contextmanager
from typing import Any, ContextManager, Dict, Iterator, Mapping, Protocol, Sequence

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from muster.process import refuse

log = logging.getLogger(__name__)

ALSO = "also"
"""Key of what a checkpoint has besides the model and the optimizers, as bytes."""


IDLE_MAX = 20
"""Steps without one of an optimizer: a scaler begins with fewer."""


class Rows(Protocol):
    """A data set whose rows have numbers, such as a list, or a ``Dataset`` with a length."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, number: int, /) -> Any:
        """Return a row by its number."""


class Stateful(Protocol):
    """An object with a state for checkpoints, such as a learning rate schedule."""

    def state_dict(self) -> Dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: Dict[str, Any], /) -> Any:
        """Go on from a state."""


class TorchParts:
    """The parts of a training that are in a checkpoint; they train it."""

    kind = "torch"

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        also: Mapping[str, Stateful],
        world_size: int,
    ) -> None:
        wrong = self.fault(model, optimizers, world_size)
        if wrong:
            refuse(ValueError("muster.train: " + wrong))
        self._model = model
        self._optimizers = list(optimizers)
        self._also = also
        self._idle = 0
        for one in self._optimizers:
            inner: Any = getattr(one, "optimizer", one)  # of accelerate's
            inner.register_step_post_hook(self._made)

    def fault(self, model: nn.Module, optimizers: Sequence[Optimizer], world_size: int) -> str:
        """Return why this training would not be that of one batch of all ranks; or ""."""
        return fault(model, optimizers, world_size)

    @property
    def is_rank_0(self) -> bool:
        """Whether this rank writes what is written once."""
        return not dist.is_initialized() or dist.get_rank() == 0

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if dist.is_initialized():
            dist.barrier()

    def move(self, batch: Any) -> Any:
        """Return a batch of the loader as the loop gets it: as it is."""
        return batch

    def accumulating(self, ends_step: bool) -> ContextManager[Any]:
        """Average gradients over the ranks in this block only if it completes a step."""
        return _accumulating(self._model, ends_step)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss that is weighed already."""
        loss.backward()

    def _made(self, *_: Any) -> None:
        self._idle = -1

    def stepped(self) -> None:
        """Count an optimizer step; raise ``RuntimeError`` if no optimizer makes any.

        A scaler that looks for its scale leaves out some.
        """
        self._idle += 1
        if self._idle >= IDLE_MAX:
            raise RuntimeError(
                "%d steps, and no optimizer has made one: training.backward(loss) only computes"
                " gradients; where it returns True, call optimizer.step() and zero_grad()"
                % self._idle
            )

    def loss_fault(self, loss: torch.Tensor) -> str:
        """Return why a loss cannot be trained, and what to write; or ""."""
        if not isinstance(loss, torch.Tensor):
            return "the loss is %s, and no tensor" % type(loss).__name__
        if loss.numel() != 1:
            return "the loss has the shape %s: give its mean" % (tuple(loss.shape),)
        return (
            "" if loss.requires_grad else "the loss has no gradient: leave out detach() and item()"
        )

    def step(self) -> None:
        """Make the step of each optimizer, and drop the gradients."""
        for optimizer in self._optimizers:
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def save(self, path: str) -> None:
        """Write this rank's part into a folder; all ranks do so together."""
        model, optimizer = get_state_dict(self._model, self._optimizers)
        also = _as_bytes({name: one.state_dict() for name, one in self._also.items()})
        with _alone_is_right():
            dcp.save({"model": model, "optimizer": optimizer, ALSO: also}, checkpoint_id=path)

    def load(self, path: str) -> None:
        """Load what a world of any size has saved."""
        model, optimizer = get_state_dict(self._model, self._optimizers)
        state: Dict[str, Any] = {"model": model, "optimizer": optimizer, ALSO: b""}
        with _alone_is_right():
            dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self._model,
            self._optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        also = _of_bytes(state[ALSO])
        for name, one in self._also.items():
            if name in also:
                one.load_state_dict(also[name])
            else:
                log.warning("%s has no %r: it begins with what it is", path, name)


def _as_bytes(states: Mapping[str, Any]) -> bytes:
    """Return the bytes of states; raises ``ValueError`` if they could not be loaded from them.

    Only plain data and tensors can be: to load any other class may run what a file says.
    """
    written = io.BytesIO()
    torch.save(dict(states), written)
    try:
        _of_bytes(written.getvalue())
    except pickle.UnpicklingError as error:
        raise ValueError(
            "muster.train(also=): a state has more than plain data and tensors, so that no"
            " checkpoint would give it back: %s" % str(error).partition("\n")[0]
        ) from error
    return written.getvalue()


def _of_bytes(written: bytes) -> Any:
    return torch.load(io.BytesIO(written), map_location="cpu", weights_only=True)


def fault(model: nn.Module, optimizers: Sequence[Optimizer], world_size: int) -> str:
    """Return why these ranks would not train one model with one batch, and what to write; or ""."""
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if own.isdisjoint(id(one) for group in optimizer.param_groups for one in group["params"]):
            return (
                "the optimizer has none of the model's parameters: make it after fully_shard(model)"
                " or DistributedDataParallel(model), of model.parameters()"
            )
    if world_size == 1:
        return ""
    if not dist.is_initialized():
        return (
            "this rank is one of %d, and there is no process group: call"
            " torch.distributed.init_process_group() before" % world_size
        )
    plain = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(plain, DistributedDataParallel):
        size = dist.get_world_size(plain.process_group)
        if size != world_size:
            return (
                "DistributedDataParallel averages gradients over %d of %d ranks: leave out its"
                " process_group" % (size, world_size)
            )
    elif not _is_sharded(plain):
        return (
            "each rank would train a model of its own: give it DistributedDataParallel(model), or"
            " the model after fully_shard(model)"
        )
    return _mesh_fault(plain, world_size)


def _is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FullyShardedDataParallel) or hasattr(
        model, "set_requires_gradient_sync"
    )


def _mesh_fault(model: nn.Module, world_size: int) -> str:
    for name, one in model.named_parameters():
        if not isinstance(one, DTensor):
            continue
        mesh, placements = one.device_mesh, one.placements
        if mesh.size() != world_size or (mesh.ndim > 1 and not placements[0].is_replicate()):
            return (
                "%s lies on a mesh of %s of %d ranks: ranks of a tensor-, pipeline- or"
                " sequence-parallel group train the same samples, and would get different ones:"
                " write a loop of your own with muster.drain() and"
                " muster.data.ElasticSampler(rank=, world_size=)"
                % (name, "x".join(map(str, mesh.shape)), world_size)
            )
    return ""


@contextmanager
def _accumulating(model: nn.Module, ends_step: bool) -> Iterator[None]:
    if ends_step:
        yield
    elif hasattr(model, "set_requires_gradient_sync"):
        set_sync: Any = model.set_requires_gradient_sync
        set_sync(False)
        try:
            yield
        finally:
            set_sync(True)
    elif hasattr(model, "no_sync"):
        no_sync: Any = model.no_sync
        with no_sync():
            yield
    else:
        yield


@contextmanager
def _alone_is_right() -> Iterator[None]:
    """Leave out torch's warning that a script without a process group saves for itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or")
        yield


def check_given(
    model: nn.Module, optimizers: Sequence[Optimizer], also: Mapping[str, Stateful]
) -> None:
    """Raise ``ValueError`` if something else is given than these."""
    fault = ""
    if not isinstance(model, nn.Module):
        fault = "the model is %s, and no torch.nn.Module" % type(model).__name__
    elif not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
        fault = "give it an optimizer of torch.optim, or a list of some, after the model"
    elif not isinstance(also, Mapping):
        fault = "also=%s: give names, too: also={'scheduler': scheduler}" % type(also).__name__
    else:
        for name, one in also.items():
            if not all(hasattr(one, verb) for verb in ("state_dict", "load_state_dict")):
                fault = "also: %r has no state_dict() and load_state_dict()" % name
    if fault:
        raise ValueError("muster.train: " + fault)


def loader_of(data: Rows, sampler: Any, options: Mapping[str, Any]) -> "DataLoader[Any]":
    """Return the loader of the sampler's batches."""
    rows: Any = data
    return DataLoader(rows, batch_sampler=sampler, **options)


def size_of(data: Rows) -> int:
    """Return the number of rows; raises ``ValueError`` for a stream or a loader."""
    if isinstance(data, DataLoader):
        raise ValueError(
            "muster.train: the data are a DataLoader, and it makes its own: give it that one's"
            " dataset, and options such as num_workers="
        )
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise ValueError(
            "muster.train: the data are a stream, whose rows have no numbers: write a loop of your"
            " own, as docs/data.md has for streams"
        )
    return len(data)


class AccelerateParts(TorchParts):
    """The same loop as in plain torch; gradients, saves and loads are accelerate's."""

    kind = "accelerate"

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        also: Mapping[str, Stateful],
        world_size: int,
        accelerator: Accelerator,
    ) -> None:
        wrong = fault_of_prepared(accelerator, model, optimizers)
        if wrong:
            refuse(ValueError("muster.train(accelerator=): " + wrong))
        super().__init__(model, optimizers, also, world_size)
        self._accelerator = accelerator
        self._registered = False

    def move(self, batch: Any) -> Any:
        """Return a batch on accelerate's device, as a prepared loader does."""
        return send_to_device(batch, self._accelerator.device)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss that is weighed already, scaled if accelerate scales them."""
        self._accelerator.backward(loss)

    def save(self, path: str) -> None:
        """Write this rank's part into a folder; all ranks do so together."""
        self._register()
        self._accelerator.save_state(path)

    def load(self, path: str) -> None:
        """Load what a world of any size has saved."""
        self._register()
        self._accelerator.load_state(path)

    def _register(self) -> None:
        if not self._registered:
            self._registered = True
            self._accelerator.register_for_checkpointing(*self._also.values())


def fault_of_prepared(
    accelerator: Accelerator, model: nn.Module, optimizers: Sequence[Optimizer]
) -> str:
    """Return what accelerate would do besides the loop, and what to write; or ""."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        return "with %s steps and gradients are not the loop's: write a loop of your own" % kind
    mesh = getattr(accelerator, "parallelism_config", None)
    if mesh is not None and mesh.non_data_parallel_size > 1:
        return (
            "ranks of a tensor-, context- or sequence-parallel group train the same samples, and"
            " would get different ones: write a loop of your own"
        )
    if accelerator.gradient_accumulation_steps != 1:
        return (
            "the loop accumulates as many batches as this world needs, and accelerate %d of them:"
            " leave out gradient_accumulation_steps" % accelerator.gradient_accumulation_steps
        )
    if accelerator.project_configuration.automatic_checkpoint_naming:
        return "the loop names its checkpoints: leave out automatic_checkpoint_naming"
    prepared = {id(one) for one in accelerator._models}  # without DistributedDataParallel around it
    if prepared.isdisjoint({id(model), id(getattr(model, "module", model))}) or any(
        one not in accelerator._optimizers for one in optimizers
    ):
        return "give it what accelerator.prepare(model, optimizer) has returned"
    for one in accelerator._schedulers:
        if one.step_with_optimizer and not one.split_batches:
            return (
                "accelerate makes a step of the schedule for each rank, so it would be another one"
                " in another world: leave the scheduler out of accelerator.prepare(), and give it"
                " as also={'scheduler': scheduler}"
            )
    return ""
