# SPDX-License-Identifier: Apache-2.0
"""A model that is replicated on all ranks: within another ``DistributedDataParallel`` each world.

The constructor of ``DistributedDataParallel`` is a collective, so all ranks make theirs as a world
forms, survivors and newcomers alike.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel


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
