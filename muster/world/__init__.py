# SPDX-License-Identifier: Apache-2.0
"""Worlds that change in place: ranks live through a join, a drain and a loss (docs/in-place.md).

    with World("nccl", {"net": net, "optimizer": optimizer}) as world:
        model = world.replicate(net)
        while world.step < steps:
            with world.next_step() as step:
                train_one_step(model, batch(step, world.rank, world.size))

Needs torch, from the first use of one of its names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.world.group import Feed
    from muster.world.loop import World

__all__ = ["Feed", "World"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError("module %r has no attribute %r" % (__name__, name))
    from muster.world import group, loop

    return {"Feed": group.Feed, "World": loop.World}[name]
