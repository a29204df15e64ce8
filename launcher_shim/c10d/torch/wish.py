# SPDX-License-Identifier: Apache-2.0
"""The sender's own wish, read from a compare-and-set of the rendezvous state.

A request carries two whole states. Of their difference only the sender's own membership and
``closed`` are read; the sidecars decide everything else that torch changes (heartbeats, nodes that
it believes dead, the round that the last node to leave starts).
"""

from __future__ import annotations

from typing import Literal

from launcher_shim.c10d.torch.state_codec import NodeDesc, TorchState
from rdzv.dataclass import dataclass
from rdzv.records.codec import INT64_MAX

ADDRESS_MAX = 255
"""Maximum length of a host name or address, in characters."""

Change = Literal["", "join", "leave", "step_off"]
"""``step_off``: off the redundancy list, as torch does before it looks for a place again."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The change that the sender of one request wants for itself."""

    change: Change = ""
    closes: bool = False


def wish(expected: TorchState, desired: TorchState, me: NodeDesc) -> Wish:
    """Read the wish of ``me`` out of the two states of its request."""
    was_in = me in expected.participants or me in expected.wait_list
    was_redundant = me in expected.redundancy_list
    is_in = me in desired.participants or me in desired.wait_list
    is_in = is_in or me in desired.redundancy_list
    change: Change = ""
    if not is_in and was_in:
        change = "leave"
    elif not is_in and was_redundant:
        change = "step_off"
    elif is_in and not was_in and not was_redundant:
        change = "join"
    return Wish(change, closes=desired.closed and not expected.closed)


def first_name(desired: TorchState) -> NodeDesc | None:
    """Return the sender of a state made from nothing: the one node that it names; else None."""
    named = {*desired.participants, *desired.wait_list, *desired.redundancy_list}
    me = named.pop() if len(named) == 1 else None
    if me is None or len(me.addr) > ADDRESS_MAX:
        return None
    return me if min(me.pid, me.local_id) >= 0 and max(me.pid, me.local_id) <= INT64_MAX else None


def foreign_size(desired: TorchState, min_nodes: int, max_nodes: int) -> bool:
    """Return whether a first own state shows that ``--nnodes`` of the launcher is not the job's.

    With itself as the only participant, torch sets a deadline if its minimum is 1, and marks the
    round complete, which clears the deadline again, if its maximum is 1.
    """
    its_max_is_1 = desired.complete
    if its_max_is_1 or max_nodes == 1:
        return its_max_is_1 != (max_nodes == 1)
    return (desired.deadline is not None) != (min_nodes == 1)
