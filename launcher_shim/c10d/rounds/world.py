# SPDX-License-Identifier: Apache-2.0
"""The world that a round forms: when it replaces one that is whole, and its order of ranks. Pure.

Each world costs all ranks a restart, so newcomers are gathered: training goes on until the wave of
them is complete, or the gather window is over, and at least to the world's first step. A world that
is larger than the job's sizes allow becomes smaller at once, and that of a paused job ends. A world
that has lost a node forms again in any case, and takes in the nodes that wait.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from launcher_shim.c10d.rounds.inputs import RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.observations import RoundObservations, joins_from_s
from launcher_shim.c10d.rounds.records import Node
from rdzv.dataclass import dataclass
from rdzv.drain.inputs import ReformCause

Location = tuple[str, ...]
"""The topology of a node, the most general part first: block, rack, machine."""


def in_rank_order(
    chosen: Sequence[Node], former: Sequence[str], locations: Mapping[str, Location]
) -> list[Node]:
    """Return ``chosen`` in the order of their ranks.

    ``former``: the members of the world before, in the order of its ranks. ``locations``: the
    topology of each member. A member whose location is empty, or has no further part, may be
    anywhere between the others.

    Rings run along the ranks, so each border between two blocks that they cross costs. A rank
    that moves costs once: the data that its worker has cached, or logs under its number, are
    another rank's now. So the rules are, the first one first: each block has one run of ranks,
    and each part of a block one run within it; rank 0 stays rank 0; few ranks move. Without a
    former world or a topology, it is torch's order.
    """
    ranks = {member: rank for rank, member in enumerate(former)}
    # Nodes that stay, by former rank; then the others, as torch orders them. Groups keep it.
    natural = sorted(
        chosen, key=lambda node: (ranks.get(node.member, len(former)), node.rank_order)
    )
    return list(_Order(ranks, locations).of(natural, 0, 0)) if former or locations else natural


class _Order:
    """The order of the nodes in nested groups, from the most general one down."""

    def __init__(self, ranks: Mapping[str, int], locations: Mapping[str, Location]) -> None:
        self._ranks = ranks
        self._locations = locations

    def of(self, nodes: Sequence[Node], start: int, depth: int) -> Iterator[Node]:
        """Yield ``nodes``, whose locations agree up to ``depth``, for ranks from ``start`` on."""
        for group in self._arranged(self._groups(nodes, depth), start):
            if len(group) == 1:
                yield group[0]
            else:
                yield from self.of(group, start, depth + 1)
            start += len(group)

    def _groups(self, nodes: Sequence[Node], depth: int) -> list[list[Node]]:
        """Group ``nodes`` by location at ``depth``; a node without one is a group by itself."""
        groups: dict[tuple[str, bool], list[Node]] = {}
        for node in nodes:
            parts = self._locations.get(node.member, ())
            known = depth < len(parts)
            groups.setdefault((parts[depth] if known else node.member, known), []).append(node)
        return list(groups.values())

    def _arranged(self, groups: list[list[Node]], start: int) -> Iterator[list[Node]]:
        """Yield ``groups`` in order, so that few of their nodes move.

        A group with former ranks to keep goes where it keeps most of them. The others fill the gaps
        that this leaves, the largest that fits first, and come last otherwise. So a new group takes
        the place of one that has gone.
        """
        if len(groups) == 1:
            yield from groups
            return
        end = start + sum(map(len, groups))
        settled: list[tuple[int, list[int], list[Node]]] = []
        free: dict[int, deque[list[Node]]] = {len(group): deque() for group in groups}
        for group in groups:
            held = (self._ranks.get(node.member, -1) for node in group)
            kept = [rank for rank in held if start <= rank < end]
            if kept:
                settled.append((_best_start(kept, len(group), start, end), kept, group))
            else:
                free[len(group)].append(group)
        settled.sort(key=lambda one: one[0])
        for wished, kept, group in settled:
            while start < wished and (
                fitting := [size for size in free if free[size] and size <= wished - start]
            ):
                size = max(fitting)
                yield free[size].popleft()
                start += size
            if _count(kept, start, len(group)):
                yield group
                start += len(group)
            else:
                # Others have taken its ranks, so it moves anyway: no further group moves for it.
                free[len(group)].append(group)
        left = {id(group) for queue in free.values() for group in queue}
        yield from (group for group in groups if id(group) in left)


def _best_start(ranks: Sequence[int], size: int, start: int, end: int) -> int:
    """Return the first rank of a run of ``size`` that has most of ``ranks``, which are sorted.

    It is the lowest such run between ``start`` and ``end``; rank 0 if ``ranks`` begin with it.
    """
    if ranks[0] == 0:
        return 0
    starts = (min(max(rank - size + 1, start), end - size) for rank in ranks)
    return max(starts, key=lambda first: (_count(ranks, first, size), -first))


def _count(ranks: Sequence[int], first: int, size: int) -> int:
    return bisect_left(ranks, first + size) - bisect_left(ranks, first)


# --- the nodes of the world, if not all that ask can be ---


def choose_nodes(
    asking: Sequence[Node],
    size: int,
    former: Collection[str],
    quarantined: Collection[str],
    blocks: Mapping[str, str],
) -> list[Node]:
    """Choose ``size`` of the nodes ``asking``, which are in the order of their claims.

    Nodes of the world before keep their places, and older members go before younger ones. If the
    topology is known, whole blocks go first: a world of four nodes in one block trains faster than
    one of two and two.

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


CALM_SHARE = 1 / 3
"""Fraction of the gather window without a newcomer after which the wave is over. Smaller: a late
node costs a world of its own. Larger: a node that comes alone waits longer beside the world."""

LEAD_S = 1.1
"""Time from the last newcomer to the end of the world. torch's agents look once a second: with this
notice each of them has a look that is held (``views.held_for``) when the world ends. The ranks
train on meanwhile."""


@dataclass(frozen=True, slots=True)
class Reform:
    """The cause for which the present world is to form again; empty if it is not to.

    ``reason``: one sentence; empty if no node asks for another world. ``wake_at_s``: the time at
    which the decision would change by time alone.
    """

    cause: ReformCause = ""
    reason: str = ""
    wake_at_s: float = math.inf


def reform(
    now: float, snapshot: RunSnapshot, observations: RoundObservations, policy: RoundPolicy
) -> Reform:
    """Decide whether the present world is to form again although it has lost no node."""
    current = snapshot.round
    if not current.complete or current.closed or current.finishing:
        return Reform()
    if policy.paused:
        return Reform("pause", "the job is paused")
    # The world goes on without their torchruns once it has saved.
    nodes = (snapshot.nodes.get(seat.member) for seat in current.frozen)
    silent = [n.member for n in nodes if n is not None and n.silent and n.seat in current.frozen]
    if silent:
        return Reform(
            "hang", f"the torchrun of {', '.join(silent)} is silent while its ranks train"
        )
    here, newcomers = len(current.frozen), len(snapshot.newcomers())
    size = policy.largest(here + newcomers)
    if policy.shrinks and 0 < size < here:
        return Reform("shrink", f"a world of {here} may have no more than {size} nodes")
    if current.world:
        return Reform()  # It takes newcomers in, and lets go, in place.
    # The next world may leave out members of this one: not to become smaller for that.
    size = policy.largest(snapshot.next_size(policy.smallest))
    if size <= here:
        return Reform()
    wave = f"{newcomers} more {'asks' if newcomers == 1 else 'ask'} to join a world of {here}"
    if snapshot.membership.join_agreed:
        return Reform("join", f"{wave}: its ranks were asked to save for that")
    first_s = joins_from_s(current, observations.formed_s)
    if now < first_s:
        return Reform("", f"{wave}: waiting for the first step of its ranks", first_s)
    since_s = now if observations.gather_since_s is None else observations.gather_since_s
    # A world costs at least its start: a shorter window would spend more time on starts than on
    # steps.
    gather_s = max(policy.gather_s, current.start_s)
    over_s = min(since_s + gather_s, observations.newest_s) + LEAD_S
    if size == policy.full:
        what = "which makes it full"
    elif policy.desired is not None and here < policy.desired <= size:
        what = f"which makes the desired {policy.desired}"
    else:
        what = "and the wave is over"
        calm_s = max(since_s, observations.newest_s) + gather_s * CALM_SHARE
        over_s = max(over_s, min(since_s + gather_s, calm_s))
    if now < over_s:
        return Reform("", f"{wave}: gathering others until the wave is over", over_s)
    return Reform("join", f"{wave}, {what}")
