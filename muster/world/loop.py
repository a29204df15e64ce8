# SPDX-License-Identifier: Apache-2.0
"""``World``: a training loop whose world changes around it, in the same process.

``muster.world.conduct`` decides what follows from the sidecar's order; this module carries it out.
Without a sidecar, or beside one that changes no world in place, it is a torchrun script as any.
"""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from types import TracebackType
from typing import Any, Callable, List, Mapping, Optional, Type

import torch
import torch.distributed as dist
from torch import nn

from muster.draining import Drain, drain
from muster.process import Lineage, end_well, end_without_torchrun, refuse, sigterm_ends
from muster.progress import own_file
from muster.resuming import save_tag
from muster.world import conduct
from muster.world.conduct import IDLE, OVER, Order, OrderFile, WorldRank
from muster.world.group import Feed, Group, Replica, Step, sampler_of
from muster.world.parts import Parts, fault, unnamed

log = logging.getLogger(__name__)

POLL_S = 0.002
"""Interval at which a rank that waits looks at the order."""

LOSS_S = 60.0
"""Time in which a sidecar has to confirm that a rank is lost, after a collective failed here: the
script's own exception goes on then."""

TRIES = 3
"""Times that a step may break in worlds of one size: a script's own error breaks it each time."""


class World:
    """One training loop in a world that changes in place; enter it before ``next_step``.

    ``backend``: that of torch's process group, which is made here and made again at each change.
    ``parts``: all that changes in training, by name: models, optimizers, schedules, a scaler, an
    ``ElasticSampler``. ``step``: that of the checkpoint which they were loaded from. ``save``:
    saves a step, on every rank, and may return the data's cursor; it is called every ``save_every``
    steps and where a drain needs it. ``timeout``: that of torch's process group.

    Raises ``ValueError`` as the first step begins if something changes that is not among the parts.
    """

    of_trainer = False
    """Whether a trainer has made a process group before, and may need one afterwards."""

    def __init__(
        self,
        backend: str,
        parts: Mapping[str, Any],
        *,
        step: int = 0,
        save: Optional[Callable[[int], Any]] = None,
        save_every: int = 0,
        timeout: Optional[timedelta] = None,
    ) -> None:
        wrong = fault(parts, ())
        if wrong:
            refuse(ValueError("World: " + wrong))
        self._named = parts
        self._save = save
        self._save_every = save_every
        self._replicas: List[Replica] = []
        self._file = own_file()
        self._me = WorldRank(step=step)
        self._step = self._at = step
        self._size = 0
        self._broken = (-1, 0, 0)
        """A step, the size of its world, and how often it broke there."""
        self._drain: Optional[Drain] = None
        self._lineage: Optional[Lineage] = None
        self._group = Group(backend, timeout, self._is_lost)
        self._parts = Parts(parts, self._group.confirm)
        run_dir = os.environ.get("MUSTER_RUN_DIR", "")
        opted = self._file is not None and not self._file.is_foreign and run_dir
        self._orders = OrderFile(run_dir) if opted else None
        self._watched = OrderFile(run_dir) if opted else None
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def step(self) -> int:
        """The number of steps that were made, in all worlds together."""
        return self._step

    @property
    def size(self) -> int:
        """The number of ranks; raises ``RuntimeError`` before the first step."""
        if not self._size:
            raise RuntimeError(
                "the world forms with the first world.next_step(): read world.rank and world.size"
                " in its block"
            )
        return self._size

    @property
    def rank(self) -> int:
        """The number of this rank; raises as ``size`` does."""
        return dist.get_rank() if self.size else 0

    @property
    def in_place(self) -> bool:
        """Whether changes of this world happen in place."""
        return self._orders is not None

    def replicate(self, net: nn.Module, **options: Any) -> Replica:
        """Return ``net`` as it trains on all ranks; ``options``: of ``DistributedDataParallel``.

        Call it before the first step. Raises ``ValueError`` if the net is not among the parts.
        """
        if self._size or "process_group" in options:
            raise ValueError(
                "world.replicate(net): call it before the first step, without a process_group"
            )
        wrong = fault(self._named, [net])
        if wrong:
            refuse(ValueError(wrong))
        replica = Replica(net, options)
        self._replicas.append(replica)
        return replica

    def feed(self, loader: Any) -> Feed:
        """Return the batches of a loader, for one pass in each step.

        ``loader``: of an ``ElasticSampler`` that is among the parts, or the sampler itself. Raises
        ``ValueError`` if it is not.
        """
        sampler = sampler_of(loader)
        if not any(sampler is one for one in self._parts.samplers.values()):
            raise ValueError(
                "world.feed(loader): name the loader's ElasticSampler among the parts, and give it"
                " to the loader as batch_sampler="
            )
        return Feed(loader, sampler)

    def next_step(self) -> Step:
        """Return the block of the next step: in it one optimizer step is made, and made last.

        The world changes as it begins. If a rank is lost, the step that this broke is left by no
        exception and does not count: the loop makes it again. So a loop goes by ``world.step``.
        """
        return Step(self._group, self._begin_step, self._end_step, self._break)

    def __enter__(self) -> World:
        if self._orders is not None and self._orders.read() is None:
            self._orders = None
        if self._orders is not None:
            if dist.is_initialized() and not self.of_trainer:
                raise RuntimeError(
                    "World: a process group is there already: leave out init_process_group, as the"
                    " world makes one at each change"
                )
            assert self._file is not None
            self._lineage = Lineage(os.environ) if self._file.rank.of_torchrun else None
            self._file.make_room()
            self._tell()
        if self._save is not None:
            self._drain = drain(self._step, "the directory").__enter__()
        if self._orders is not None:
            self._publish()
            self._group.watch()
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        if error is None and self._size:
            self._boundary()
            self._me = self._me._replace(over=True)
        if self._orders is not None:
            self._publish()
        if self._drain is not None:
            self._drain.__exit__(kind, error, traceback)
            self._drain = None
        for replica in self._replicas:
            replica.release()
        if error is None and not self.of_trainer:
            self._group.destroy()

    def _tell(self) -> None:
        if self._file is not None and self._orders is not None:
            self._file.world = self._me.told(torch.__version__)

    def _publish(self) -> None:
        """Publish the state in this rank's line, before the order is read."""
        self._tell()
        if self._drain is not None:
            self._drain.repeat()
        elif self._file is not None:
            try:
                self._file.write(self._step)
            except OSError as error:  # the sidecar then falls back, as it waits in vain
                log.warning("the state of this rank cannot be published: %s", error)

    def _boundary(self) -> None:
        """Come to the boundary after the last step; save there if that is due."""
        self._me = conduct.arrive(self._me, self._me.step)
        if self._step <= self._at or self._drain is None:
            self._publish()
        else:
            self._at = self._step
            self._tell()
            due = self._drain.commit_due(self._step)
            if due or (self._save_every and self._step % self._save_every == 0):
                assert self._save is not None
                self._drain.committed(self._step, self._save(self._step))

    def _begin_step(self) -> int:
        """Come to the boundary, and change the world there if the order says so."""
        wrong = "" if self._size else unnamed(self._named)
        if wrong:
            refuse(ValueError("World: " + wrong))
        if self._orders is None and not self._size:
            self._form_alone()
        elif not self._size and not self._me.ready:
            self._me = self._me._replace(ready=True)
        self._boundary()
        self._settle()
        return self._step + 1

    def _settle(self) -> None:
        """Obey the orders until this rank may make its next step."""
        while self._orders is not None:
            order = self._orders.read() or Order(phase=IDLE)
            verdict, self._me = conduct.decide(self._me, order)
            if verdict == conduct.GO:
                return
            if verdict == conduct.PUBLISH:
                self._publish()
            elif verdict == conduct.BREAK:
                self._leave_group()
                self._publish()
            elif verdict == conduct.JOIN:
                self._join(order)
                self._publish()
            elif verdict == conduct.TODAY:
                self._return_to_today(order)
            else:
                self._wait(verdict, order)

    def _wait(self, verdict: str, order: Order) -> None:
        if verdict == conduct.END:
            end_well("%s: this rank exits with status 0" % (order.why or "the run has ended well"))
        if verdict == conduct.PARK:
            self._leave_group()
            self._publish()
            with sigterm_ends():
                while self._orders is not None:
                    later = self._orders.read()
                    if later is not None and later.phase == OVER:
                        self._wait(conduct.END, later)
                    self._pause()
        self._pause()

    def _pause(self) -> None:
        if self._lineage is not None and self._lineage.broken:
            end_without_torchrun()
        time.sleep(POLL_S)

    def _join(self, order: Order) -> None:
        """Form a world; a failure is published, and its number never tried again."""
        rank = order.first_rank + self._local_rank
        self._me = conduct.begin_form(self._me, order, rank)
        try:
            self._release()
            with self._group.forming(order, rank):
                self._renumber(rank, order.size)
                told = self._take_state(order.source, order.tag)
                for replica in self._replicas:
                    replica.wrap()
        except (RuntimeError, OSError, ValueError, TypeError) as error:
            why = "%s: %s" % (
                type(error).__name__,
                str(error).splitlines()[0] if str(error) else "",
            )
            log.warning("world %d could not form here: %s", order.number, why)
            self._group.destroy()
            self._release()
            self._me = self._me._replace(failed=(order.number, why))
            return
        self._size, self._step = order.size, told["step"]
        self._at = min(self._at, self._step) if self._drain is None else self._at
        self._me = conduct.has_formed(self._me, order, self._step)

    def _take_state(self, source: int, tag: str = "") -> Mapping[str, Any]:
        self._parts.undo()
        tag = tag or (save_tag() if dist.get_rank() == source and self._save is not None else "")
        told = self._parts.hand_over(source, self._group.device, {"step": self._step, "tag": tag})
        if told["tag"] and self._file is not None:
            self._file.take_tag(told["tag"])
        return told

    def _renumber(self, rank: int, size: int) -> None:
        """Say the new rank and size where scripts and libraries read them."""
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        if self._file is not None:
            self._file.renumber(rank, size)
        self._parts.divide(rank, size)

    def _form_alone(self) -> None:
        """Form the world that the launcher has started, for good; all take the state of rank 0."""
        self._group.alone()
        self._parts.divide(dist.get_rank(), dist.get_world_size())
        self._step = self._take_state(0)["step"]
        for replica in self._replicas:
            replica.wrap()
        self._size = dist.get_world_size()

    def _return_to_today(self, order: Order) -> None:
        """Go on without changes in place, for good."""
        log.warning(
            "this world does not change in place from step %d on: %s",
            self._step,
            order.why or "the sidecar says so",
        )
        if self._file is not None:
            self._file.world = ""
        self._orders = None
        if not self._size:
            self._form_alone()
        if self._drain is not None:
            self._drain.repeat()

    def _release(self) -> None:
        for replica in self._replicas:
            replica.release()

    def _leave_group(self) -> None:
        self._release()
        self._group.destroy()
        self._me = self._me._replace(grouped=False)

    def _end_step(self) -> None:
        self._group.synchronise()
        self._step += 1
        self._me = self._me._replace(step=self._step)
        self._parts.keep()

    def _is_lost(self, number: int, forming: bool) -> bool:
        """Return whether a world is lost, for the thread that watches."""
        order = self._watched.read() if self._watched is not None else None
        return (conduct.is_given_up if forming else conduct.is_lost)(order, number)

    def _break(self, error: Exception) -> bool:
        """Give up a step that failed; return whether a loss, which the sidecar confirms, broke it.

        This rank leaves its group first: that ends the collectives of the others.
        """
        if self._orders is None:
            return False
        self._me = conduct.break_off(self._me, -1 if self._parts.stepped else self._step)
        self._leave_group()
        self._publish()
        log.warning("step %d is broken: %s", self._step + 1, str(error).partition("\n")[0])
        at = (self._step, self._size)
        times = self._broken[2] + 1 if self._broken[:2] == at else 1
        self._broken = (*at, times)
        until_s = time.monotonic() + LOSS_S
        while times < TRIES and self._orders is not None:
            if conduct.confirms_loss(self._orders.read(), self._me):
                self._parts.undo()
                return True
            if time.monotonic() > until_s:
                log.error(
                    "no rank was confirmed lost within %g s after step %d failed: it is the"
                    " script's own error",
                    LOSS_S,
                    self._step + 1,
                )
                break
            self._pause()
        return False
