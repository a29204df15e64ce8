# SPDX-License-Identifier: Apache-2.0
"""Turns to write a decision that every sidecar sees due at the same moment: pure.

One write is enough, as each carries the whole round. The sidecar whose write made the decision due
goes first; the others follow in an order that all compute alike, so one that is away costs a turn.
The number of writes depends on the watch's delay, and not on the number of sidecars.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from launcher_shim.c10d.rounds.inputs import RunSnapshot
from launcher_shim.c10d.rounds.records import Round

TURN_S = 0.5
"""Seconds between two turns. Longer than the usual delay of a watch on a busy store."""

SPREAD = 0.2
"""Jitter: the largest random delay of a turn, as a fraction of ``TURN_S``."""


def order(wanted: Round, stored: RunSnapshot) -> list[str]:
    """Return all members with a stored node, in the order in which they may write ``wanted``."""
    nodes = stored.nodes
    newest = max(nodes.values(), key=lambda node: node.mod_revision, default=None)
    first = [] if newest is None else [newest.member]
    frozen = [seat.member for seat in wanted.frozen or stored.round.frozen]
    members = dict.fromkeys([*first, *frozen, *sorted(nodes)])
    return [member for member in members if member in nodes]


def delay_s(member: str, members: Sequence[str], random: Random) -> float:
    """Return for how many seconds ``member`` leaves a decision to those before it in ``members``.

    The number of members that may write doubles with each turn, so hundreds that are away at once
    cost a few turns. A member that is not in ``members`` comes last.
    """
    place = members.index(member) if member in members else len(members)
    return place.bit_length() * TURN_S * random.uniform(1, 1 + SPREAD)
