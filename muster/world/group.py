# SPDX-License-Identifier: Apache-2.0
"""The parts of a loop that each world needs its own of: process group, replicated model, batches.

Gloo has no abort: a collective with a frozen peer ends after its own timeout, of half an hour. So
a thread of its own shuts down the connections that were made since the group began to form. It
finds them by inode, as the number of a descriptor is used again at once. It spares a listening
socket: Gloo ends the process if its ``accept`` fails. NCCL has an abort; it has not been run here.
A loader reads ahead, by the division of the world that it has begun in: it begins again at the
cursor when the world has changed, and when a step broke.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import stat
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from inspect import signature
from types import TracebackType
from typing import Any, Callable, FrozenSet, Iterator, Mapping, Optional, Tuple, Type

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from muster.batches import MicroBatch
from muster.data import ElasticSampler
from muster.world.conduct import Order

log = logging.getLogger(__name__)

FORM_S = 30.0
"""Time that a world has to form: a rank that needs more gives it up."""

LOOK_S = 0.02
"""Interval at which the thread reads the order."""

SOCKETS = "/proc/self/fd"

OF_COLLECTIVE = re.compile(r"gloo|nccl|process ?group|connection|socket|store", re.IGNORECASE)
"""Words in what torch raises if a peer is gone, by one of its classes or as a RuntimeError."""


class Group:
    """The process group of this rank, of one world at a time.

    ``is_lost`` tells the thread whether the group of a world cannot work any more; the second
    argument is whether it is still forming.
    """

    def __init__(
        self,
        backend: str,
        timeout: Optional[timedelta],
        is_lost: Callable[[int, bool], bool],
    ) -> None:
        self.backend = backend
        self._timeout = timeout
        self._is_lost = is_lost
        self._number = -1
        self._before: FrozenSet[int] = frozenset()
        self._own: FrozenSet[int] = frozenset()
        self._forming_until_s: Optional[float] = None
        self._busy = False
        self._cut = -1
        self._turn = threading.Lock()
        """Held as a world is judged and cut, and as the next begins to form: a cut hits its own."""
        self._thread: Optional[threading.Thread] = None

    @property
    def device(self) -> torch.device:
        """The device through which states go."""
        if "nccl" in self.backend:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def watch(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._watch, name="muster-world", daemon=True)
        self._thread.start()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Let the thread cut the group within the block if its world is lost."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    @contextmanager
    def forming(self, order: Order, rank: int) -> Iterator[None]:
        """Join the world of ``order``; what belongs to its form comes into the block."""
        self.destroy()
        with self._turn:
            self._before, self._own = _sockets(), frozenset()
            self._number = order.number
            self._forming_until_s = time.monotonic() + FORM_S
            self._busy = True
        try:
            host, _, port = order.store.rpartition(":")
            limit = timedelta(seconds=FORM_S)
            store = dist.TCPStore(host, int(port), is_master=False, timeout=limit)
            self._init(dist.PrefixStore(order.prefix, store), rank, order.size)
            yield
            self._own = _sockets() - self._before
        finally:
            self._busy, self._forming_until_s = False, None

    def _init(self, store: Any, rank: int, size: int) -> None:
        timeout: Any = {} if self._timeout is None else {"timeout": self._timeout}
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=size, **timeout)

    def alone(self) -> None:
        """Make the group of a torchrun's ranks, or of one process, as every script does."""
        if dist.is_initialized():
            return
        if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
            timeout: Any = {} if self._timeout is None else {"timeout": self._timeout}
            dist.init_process_group(self.backend, **timeout)
        else:
            self._init(dist.HashStore(), 0, 1)

    def destroy(self) -> None:
        """Leave the group; its peers' collectives then fail."""
        if dist.is_initialized():
            with suppress(RuntimeError):  # of a group that is broken already
                if "nccl" in self.backend:
                    _abort_nccl()
                else:
                    dist.destroy_process_group()

    def synchronise(self) -> None:
        """Wait until the device has done all that a step has asked for; raises what failed."""
        if "nccl" in self.backend:
            torch.cuda.synchronize()

    def confirm(self) -> None:
        """Confirm that what this world's collectives have given is whole; else ``RuntimeError``.

        NCCL's return before they are done, and go on with anything after an abort.
        """
        self.synchronise()
        if self._cut >= 0 and self._cut == self._number:
            raise RuntimeError("the process group of world %d was cut" % self._number)

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self._judge()

    def _judge(self) -> None:
        with self._turn:
            until_s, number = self._forming_until_s, self._number
            if not self._busy or number == self._cut:
                return
            late = until_s is not None and time.monotonic() > until_s
            if late or self._is_lost(number, until_s is not None):
                self._cut = number
                self.cut()

    def cut(self) -> None:
        """End the collectives of this group, from any thread."""
        if "nccl" in self.backend:
            _abort_nccl()
            return
        for name in os.listdir(SOCKETS):
            with suppress(OSError):  # closed meanwhile
                self._shut(int(name))

    def _shut(self, number: int) -> None:
        descriptor = os.dup(number)  # it stays this socket, whatever becomes of the number
        found = os.fstat(descriptor)
        ours = found.st_ino in self._own or (not self._own and found.st_ino not in self._before)
        if not stat.S_ISSOCK(found.st_mode) or not ours:
            os.close(descriptor)
            return
        with socket.socket(fileno=descriptor) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                return
            if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                one.shutdown(socket.SHUT_RDWR)


def _abort_nccl() -> None:
    """Abort all groups of NCCL; torch has this since 2.6, as an experiment."""
    dist.distributed_c10d._abort_process_group()


def _sockets() -> FrozenSet[int]:
    """Return the inodes of this process's sockets."""
    found = set()
    for name in os.listdir(SOCKETS):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add(status.st_ino)
    return frozenset(found)


class Feed:
    """The micro batches of this rank, as made by ``world.feed(loader)``: each pass is one step.

    So it begins again at the cursor when the world has changed, and when a step broke: that
    step's batch is read once more.
    """

    def __init__(self, loader: Any, sampler: ElasticSampler) -> None:
        self._loader = loader
        self._sampler = sampler
        self._moves = -1
        self._batches: Optional[Iterator[Tuple[Any, MicroBatch]]] = None

    def __iter__(self) -> Iterator[Tuple[Any, MicroBatch]]:
        """Yield the micro batches of the next step, each with its part in the global batch."""
        while True:
            if self._batches is None or self._moves != self._sampler.moves:
                self._moves = self._sampler.moves
                self._batches = self._sampler.follow(self._loader)
            found = next(self._batches, None)
            if found is None:  # the end of an epoch
                self._batches = None
                continue
            yield found
            if found[1].ends_step:
                return


def sampler_of(loader: Any) -> Any:
    """Return what divides the batches of a loader."""
    return loader if isinstance(loader, ElasticSampler) else getattr(loader, "batch_sampler", None)


class Replica:
    """The model to call, as made by ``world.replicate(net)``.

    Attributes are those of the present ``DistributedDataParallel``; before the first world they are
    those of the model, which is called as it is then: a newcomer can compile beside the training
    world.

    The constructor of ``DistributedDataParallel`` is a collective, so all ranks make theirs as
    a world forms, survivors and newcomers alike.
    """

    def __init__(self, net: nn.Module, options: Mapping[str, Any]) -> None:
        self._net = net
        self._options = dict(options)
        if "init_sync" in signature(DistributedDataParallel).parameters:
            self._options = {"init_sync": False, **options}  # all have one rank's state already
        self._model: Any = net

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model."""
        return getattr(self._model, name)

    def release(self) -> None:
        """Take the hooks of a world that is over off the model."""
        if isinstance(self._model, DistributedDataParallel):
            self._model._remove_autograd_hooks()
        self._model = self._net

    def wrap(self) -> None:
        """Replicate the model in the present world, together with all its ranks."""
        self.release()
        self._model = DistributedDataParallel(self._net, **self._options)


class Step:
    """The block of one step, as made by ``world.next_step()``; entering it gives the number.

    ``begin`` returns that number; ``end`` counts the step; ``break_off`` returns whether the loss
    of a rank broke it.
    """

    def __init__(
        self,
        group: Group,
        begin: Callable[[], int],
        end: Callable[[], None],
        break_off: Callable[[Exception], bool],
    ) -> None:
        self._busy = group.busy()
        self._begin = begin
        self._end = end
        self._break_off = break_off

    def __enter__(self) -> int:
        number = self._begin()
        self._busy.__enter__()
        return number

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> bool:
        failed = error
        try:
            if failed is None:
                self._end()
        except RuntimeError as late:  # the device was asked, and failed, only now
            failed = late
        self._busy.__exit__(None, None, None)
        if failed is None:
            return False
        if isinstance(failed, Exception) and is_of_collective(failed) and self._break_off(failed):
            failed.__traceback__ = None  # frames of the step keep a half-done backward pass
            return True
        if failed is not error:
            raise failed
        return False


def is_of_collective(error: Exception) -> bool:
    """Return whether an exception may come of a peer that is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(OF_COLLECTIVE.search(str(error)))
