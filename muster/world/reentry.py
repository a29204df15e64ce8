# SPDX-License-Identifier: Apache-2.0
"""A world for a trainer that owns its loop: its ``train()`` is entered again at each change.

The trainer comes to ``boundary`` before each step, and to ``count_step`` after it. Where the world
has to change, ``boundary`` raises: the trainer is left, and trains on in the next world, in the
same process and with the same objects. What the change costs the trainer is one more beginning.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Mapping, Optional, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from muster.process import sigterm_ends
from muster.progress import own_file
from muster.world import conduct
from muster.world.conduct import IDLE, Order, OrderFile
from muster.world.loop import World
from muster.world.parts import unnamed

Trained = TypeVar("Trained")

CURE = "leave out in_place=True"

PART = "trainer"
"""The name of the part that is neither a model, an optimizer nor the place in the data."""


class WorldChanges(BaseException):
    """Leaves a trainer for the next world; no ``except Exception`` of a callback keeps it."""


class FallsBack(Exception):
    """No world forms in place: the ranks train in the one that their launcher has started."""


class Remade(Protocol):
    """A trainer, with what it makes again in each world: its wrapped model, rank and size."""

    def release(self) -> None:
        """Take all that belongs to a world that is over off the model."""

    def wrap(self) -> None:
        """Have the trainer see the present world, in which all ranks have one state."""

    def leave(self) -> None:
        """Keep the state with which the trainer begins again."""


class Reentry(World):
    """The world of one trainer, with the arguments of ``World``; ``remade`` is that trainer."""

    of_trainer = True

    def __init__(
        self, backend: str, parts: Mapping[str, Any], remade: Remade, *, step: int, timeout: Any
    ) -> None:
        super().__init__(backend, parts, step=step, save=_by_trainer, timeout=timeout)
        self._remade = remade
        self._replicas.append(cast(Any, remade))

    @property
    def drain(self) -> Any:
        """The part in drains; the trainer saves where it says so."""
        return self._drain

    @property
    def group_size(self) -> int:
        """The number of ranks in the process group, from the time when it forms."""
        return int(dist.get_world_size())

    def begin_update(self) -> None:
        """Confirm that the gradients are whole; the caller's optimizer is none of the parts.

        Raises ``RuntimeError`` if a collective of this step was cut.
        """
        self._parts._begin_step()

    def run(self, train: Callable[[], Trained]) -> Trained:
        """Call ``train`` in one world after the other until it returns; return what it returns.

        Raises ``FallsBack`` if the first world cannot be formed in place.
        """
        while True:
            try:
                with self.next_step():
                    return train()
            except WorldChanges:
                pass
            self._remade.leave()  # at a boundary, or in a step that a confirmed loss broke

    def boundary(self) -> None:
        """Come to the boundary before a step; raise ``WorldChanges`` if the world has to change.

        A rank that is held here, or has to go, is ended by SIGTERM: a trainer's own handler may
        wait for ranks that are in another world.
        """
        self._boundary()
        order = self._follow()
        if order is not None:
            with sigterm_ends():
                while order is not None:
                    self._pause()
                    order = self._follow()

    def _follow(self) -> Optional[Order]:
        """Obey the order as far as the trainer need not be left; return it if the rank waits."""
        while self._orders is not None:
            order = self._orders.read() or Order(phase=IDLE)
            verdict, me = conduct.decide(self._me, order)
            if verdict in (conduct.JOIN, conduct.BREAK):
                raise WorldChanges
            self._me = me
            if verdict == conduct.PUBLISH:
                self._publish()
            elif verdict == conduct.TODAY:
                self._return_to_today(order)
            elif verdict == conduct.WAIT:
                return order
            elif verdict == conduct.GO:
                return None
            else:
                self._wait(verdict, order)  # for the end of this process
        return None

    def _boundary(self) -> None:
        """Publish; the drain comes to its boundary where the trainer may save."""
        self._me = conduct.arrive(self._me, self._me.step)
        self._publish()

    def count_step(self) -> None:
        """Count a step that is made: what the trainer does next belongs to it.

        The rank's state is published with the drain's boundary, which comes next.
        """
        super()._end_step()
        self._me = conduct.arrive(self._me, self._me.step)
        self._tell()

    def _end_step(self) -> None:
        """Count nothing: the trainer has returned."""

    def _check(self) -> None:
        wrong = unnamed(self._named, CURE)
        if wrong:
            raise ValueError("in_place=True: " + wrong)

    def _form_alone(self) -> None:
        raise FallsBack


def _by_trainer(step: int) -> None:
    """Save nothing: the trainer saves at the end of its step."""


def stand_alone() -> None:
    """Make a process group of this rank alone, for what it makes before it comes into a world.

    A trainer's arguments make a group if there is none, and would wait for ranks that never come.
    """
    if not dist.is_initialized():
        cuda = torch.cuda.is_available()
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def changes_in_place() -> bool:
    """Return whether this rank has a sidecar that lets its world change in place."""
    file, run_dir = own_file(), os.environ.get("MUSTER_RUN_DIR", "")
    if file is None or file.is_foreign or not run_dir:
        return False
    return OrderFile(run_dir).read() is not None


def fault_in_place(trainer: Any) -> str:
    """Return why transformers' Trainer cannot train on in another world of a process; or ""."""
    args, accelerator = trainer.args, trainer.accelerator
    optimizer = str(getattr(args.optim, "value", args.optim))
    sharded = (
        getattr(trainer, "is_deepspeed_enabled", False)
        or getattr(trainer, "is_fsdp_enabled", False)
        or getattr(trainer, "is_fsdp_xla_enabled", False)
        or getattr(trainer, "is_model_parallel", False)
        or getattr(trainer, "is_distributed_loading_by_transformers", False)
        or args.n_gpu > 1
    )
    if sharded:
        return "it needs a whole model on each rank, by DistributedDataParallel: leave it out"
    refused = {
        "fp16=True": accelerator.scaler is not None,
        "torch_compile": args.torch_compile,
        "auto_find_batch_size": args.auto_find_batch_size,
        "model_init": trainer.model_init is not None,
        "neftune_noise_alpha": trainer.neftune_noise_alpha is not None,
        "use_liger_kernel": args.use_liger_kernel,
        "debug": bool(args.debug),
        "optim=%r" % optimizer: "lomo" in optimizer or "layerwise" in optimizer,
    }
    found = [name for name, given in refused.items() if given]
    if found:
        return "it was not tried with %s: leave one of the two out" % ", ".join(found)
    return ""
