# SPDX-License-Identifier: Apache-2.0
"""The batches of a script's steps in whichever world, and its model replicated in each.

A loader reads ahead, by the division of the world that it has begun in. So it begins again at the
cursor when the world has changed, and when a step broke. The constructor of
``DistributedDataParallel`` is a collective, so all ranks make theirs as a world forms.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, Iterator, Mapping, Optional, Tuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from muster.batches import MicroBatch
from muster.data import ElasticSampler


class Feed:
    """The micro batches of this rank, as made by ``world.feed(loader)``: each pass is one step."""

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
