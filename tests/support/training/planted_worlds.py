# SPDX-License-Identifier: Apache-2.0
"""Defects of worlds that change in place, planted into the process of one rank."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from muster.world import conduct, group, parts
from muster.world.group import Step


def formed_before_the_state() -> None:
    """A rank says that it has formed, and has not taken the state."""

    def hand_over(self: Any, source: int, device: Any, told: Any) -> Any:
        box = [told]
        dist.broadcast_object_list(box, src=source)
        return box[0]

    parts.Parts.hand_over = hand_over  # type: ignore[method-assign]


def without_buffers() -> None:
    """The state has no buffers."""
    parts._tensors_of = lambda module: [*module.named_parameters()]


def without_moments() -> None:
    """The state of an optimizer is left out."""
    parts._parameters = lambda optimizer: []


def number_reused() -> None:
    """A world that could not form is tried again under its number."""
    decide = conduct.decide

    def again(rank: Any, order: Any) -> Any:
        if rank.failed and rank.failed[0] == order.number:
            rank = rank._replace(tried=order.number - 1)
        return decide(rank, order)

    conduct.decide = again


def listening_socket_cut() -> None:
    """The thread shuts down listening sockets, too."""

    class Blind(socket.socket):
        def getsockopt(self, *_: Any) -> Any:
            return 0

    fake: Any = type("Module", (), {**vars(socket), "socket": Blind})
    vars(group)["socket"] = fake


def no_cut() -> None:
    """Nothing ends a collective with a frozen peer."""
    group.Group.cut = lambda self: None  # type: ignore[method-assign]


def broken_step_counted() -> None:
    """A step that a loss broke counts as made."""
    leave = Step.__exit__

    def counted(self: Step, kind: Any, error: Any, traceback: Any) -> bool:
        swallowed = leave(self, kind, error, traceback)
        if error is not None and swallowed:
            self._end()
        return swallowed

    Step.__exit__ = counted  # type: ignore[method-assign]


def steps_before_all_have_formed() -> None:
    """A rank trains on as soon as it has the state itself."""
    decide = conduct.decide

    def hasty(rank: Any, order: Any) -> Any:
        if rank.grouped and rank.formed > rank.number:
            return conduct.GO, rank._replace(number=rank.formed)
        return decide(rank, order)

    conduct.decide = hasty


def batch_not_read_again() -> None:
    """The place in the data stays after the batch of a broken step."""
    parts.Parts.undo = lambda self: None  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], None]] = {
    plant.__name__: plant
    for plant in (
        formed_before_the_state,
        without_buffers,
        without_moments,
        number_reused,
        listening_socket_cut,
        no_cut,
        broken_step_counted,
        steps_before_all_have_formed,
        batch_not_read_again,
    )
}
