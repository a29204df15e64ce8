# SPDX-License-Identifier: Apache-2.0
"""The model and the optimizers of a ``Training`` that accelerate has prepared."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.optim import Optimizer

from muster.checks import refuse
from muster.torch_parts import Stateful, TorchParts


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
        wrong = fault(accelerator, model, optimizers)
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


def fault(accelerator: Accelerator, model: nn.Module, optimizers: Sequence[Optimizer]) -> str:
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
