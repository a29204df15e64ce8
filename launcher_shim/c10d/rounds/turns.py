# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is to write a decision that every sidecar sees due at the same moment: pure.

One write is enough, and each carries the whole round. Whose write made the decision due goes first;
the others follow in an order that all of them know, so that one that is away only costs a turn.
How late the watch is decides how many write, and not how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from launcher_shim.c10d.rounds.inputs import RunSnapshot
from launcher_shim.c10d.rounds.records import Round

TURN_S = 0.5
"""Between two turns. Longer than a watch on a busy store is late, mostly."""

SPREAD = 0.2
"""By how much of itself a turn comes later, by chance."""


def order(wanted: Round, stored: RunSnapshot) -> list[str]:
    """Members in the order in which they are to write ``wanted``: all with a node in the store."""
    nodes = stored.nodes
    newest = max(nodes.values(), key=lambda node: node.mod_revision, default=None)
    first = [] if newest is None else [newest.member]
    frozen = [seat.member for seat in wanted.frozen or stored.round.frozen]
    members = dict.fromkeys([*first, *frozen, *sorted(nodes)])
    return [member for member in members if member in nodes]


def delay_s(member: str, members: Sequence[str], random: Random) -> float:
    """For how long ``member`` leaves a decision to those before it among ``members``.

    At each turn twice as many may write as before, so that hundreds that are away at once cost
    a few turns. Who is not among them comes last.
    """
    place = members.index(member) if member in members else len(members)
    return place.bit_length() * TURN_S * random.uniform(1, 1 + SPREAD)
