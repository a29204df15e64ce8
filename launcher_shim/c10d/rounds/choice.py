# SPDX-License-Identifier: Apache-2.0
"""The choice of the nodes that form the world, if not all that ask can: pure.

Nodes of the world before keep their places, and older members go before younger ones. If the
topology is known, whole blocks go first: a world of four nodes in one block trains faster than one
of two and two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from launcher_shim.c10d.rounds.records import Node


def choose(
    asking: Sequence[Node],
    size: int,
    former: Collection[str],
    quarantined: Collection[str],
    blocks: Mapping[str, str],
) -> list[Node]:
    """Choose ``size`` of the nodes ``asking``, which are in the order of their claims.

    ``former``: the members of the world before. ``quarantined``: those whose torchrun keeps dying;
    they go last. ``blocks``: the block of each member, as far as it is known.
    """
    claims: dict[tuple[bool, bool], list[Node]] = {}
    for node in asking:
        claim = (node.member in quarantined, node.member not in former)
        claims.setdefault(claim, []).append(node)
    chosen: list[Node] = []
    for claim in sorted(claims):
        chosen += _by_blocks(claims[claim], size - len(chosen), chosen, blocks)
    return chosen


def _by_blocks(
    nodes: Sequence[Node], room: int, chosen: Sequence[Node], blocks: Mapping[str, str]
) -> list[Node]:
    """Return ``room`` of ``nodes``: whole blocks, the largest that fit first, then parts of one.

    Blocks that contain some of ``chosen`` go before the others. A node whose block is not known
    counts as a block of its own.
    """
    if len(nodes) <= room or not any(node.member in blocks for node in nodes):
        return list(nodes[:room])
    begun = {blocks.get(node.member) for node in chosen} - {None}
    groups: dict[tuple[bool, str], list[Node]] = {}
    for node in nodes:
        block = blocks.get(node.member)
        groups.setdefault((block is not None, block or node.member), []).append(node)
    # Sorting is stable: of two equal groups, the one with the oldest member goes first.
    order = sorted(groups, key=lambda one: (one[1] not in begun, -len(groups[one])))
    taken: list[Node] = []
    parted: list[Node] = []
    for group in order:
        if len(groups[group]) <= room - len(taken):
            taken += groups[group]
        else:
            parted += groups[group]
    return taken + parted[: room - len(taken)]
