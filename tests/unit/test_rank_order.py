# SPDX-License-Identifier: Apache-2.0
"""The order of ranks: blocks together first, then rank 0, then few ranks that move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.c10d.rounds.decision import decide, next_round
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy
from launcher_shim.c10d.rounds.observations import RoundObservations
from launcher_shim.c10d.rounds.world import Location, in_rank_order
from tests.support.records import member, node, run, world

NAMES = "abcdefghijklmnopqrst"

LOCATIONS = st.lists(st.sampled_from("xyz"), max_size=3).map(tuple)
CLUSTERS = st.dictionaries(st.sampled_from(NAMES), LOCATIONS, min_size=1)
PLACED_CLUSTERS = st.dictionaries(
    st.sampled_from(NAMES), st.tuples(st.sampled_from("xyz"), st.sampled_from("uvw")), min_size=2
)


def ranked(
    names: Sequence[str],
    former: Sequence[str] = (),
    locations: Mapping[str, Location] | None = None,
    seed: int = 0,
) -> str:
    # The address of one node says nothing of where its name, or it, is.
    nodes = [node(name, addr=f"10.0.{7 * ord(name) % 10}.{name}") for name in names]
    Random(seed).shuffle(nodes)
    return "".join(one.member for one in in_rank_order(nodes, former, locations or {}))


def torchs(names: Sequence[str]) -> str:
    return "".join(sorted(names, key=lambda name: (7 * ord(name) % 10, name)))


def moved(order: str, former: str) -> int:
    """How many of those that stay have another rank than before."""
    return sum(one in former and former.index(one) != rank for rank, one in enumerate(order))


def is_parted(order: str, locations: Mapping[str, Location]) -> bool:
    """Whether a block, or a part of one, stands apart from itself."""
    for depth in range(1, 4):
        parts = [locations[one][:depth] for one in order]
        known = [part for part in set(parts) if len(part) == depth]
        for part in known:
            first = parts.index(part)
            if set(parts[first : first + parts.count(part)]) != {part}:
                return True
    return False


@given(CLUSTERS, st.data())
def test_each_block_has_one_run_of_ranks_whatever_the_world_before(
    locations: dict[str, Location], data: st.DataObject
) -> None:
    former = "".join(data.draw(st.lists(st.sampled_from(NAMES), unique=True)))
    names = sorted(locations)
    order = ranked(names, former, locations)
    assert sorted(order) == names
    assert not is_parted(order, locations)
    # Rank 0 stays, if it is still there.
    assert former[:1] in ("", order[0]) or former[0] not in names
    # Every sidecar finds the same order, however it came to know the nodes.
    assert ranked(names, former, locations, seed=data.draw(st.integers(1, 9))) == order
    # Once it is found, it is kept.
    assert ranked(names, order, locations) == order


@given(st.sets(st.sampled_from(NAMES), min_size=1), st.permutations(NAMES))
def test_where_nothing_is_known_a_rank_moves_only_if_there_is_no_such_rank(
    names: set[str], former: list[str]
) -> None:
    before = "".join(former)
    order = ranked(sorted(names), before)
    stay = {one for one in names if before.index(one) < len(names)}
    assert {one for one in names if order.index(one) == before.index(one)} == stay
    assert ranked(sorted(names)) == torchs(sorted(names))


@given(PLACED_CLUSTERS, st.data())
def test_who_comes_to_the_same_rack_has_the_rank_of_the_one_that_went(
    locations: dict[str, Location], data: st.DataObject
) -> None:
    before = ranked(sorted(locations), (), locations)
    gone = data.draw(st.sampled_from(before))
    now = {name: where for name, where in locations.items() if name != gone}
    order = ranked([*now, "ü"], before, {**now, "ü": locations[gone]})
    assert order == before.replace(gone, "ü")


@pytest.mark.parametrize("gone", "abcdefgh")
@pytest.mark.parametrize("former", ["abcdefgh", "aebfcgdh"])
def test_of_two_blocks_a_ring_crosses_the_border_twice(former: str, gone: str) -> None:
    locations: dict[str, Location] = {
        **dict.fromkeys("abcd", ("one",)),
        **dict.fromkeys("efgh", ("two",)),
    }
    before = ranked("abcdefgh", former, locations)
    locations["i"] = locations.pop(gone)
    order = ranked(sorted(locations), before, locations)
    assert order == before.replace(gone, "i")
    crossings = [locations[a] != locations[b] for a, b in pairwise(order + order[0])]
    assert sum(crossings) == 2


@pytest.mark.parametrize(
    ("former", "now", "order", "moves"),
    [
        # A block goes, and a new one of its size has its ranks.
        ("abcdef", {"one": "ab", "three": "ef", "new": "uv"}, "abvuef", 0),
        # None comes for it: the last block moves down, and those between keep their ranks.
        ("abcdefgh", {"one": "ab", "three": "ef", "four": "gh"}, "abghef", 2),
        # A block grows: of each that follows, one moves to its end.
        ("abcdef", {"one": "abu", "two": "cd", "three": "ef"}, "abudcfe", 2),
        # It grows over the whole ranks of the next one, which moves to the end.
        ("abcdef", {"one": "abuv", "two": "cd", "three": "ef"}, "abvuefcd", 2),
    ],
)
def test_blocks_that_go_come_and_grow(
    former: str, now: Mapping[str, str], order: str, moves: int
) -> None:
    locations = {name: (block,) for block, names in now.items() for name in names}
    assert ranked(sorted(locations), former, locations) == order
    assert moved(order, former) == moves


def test_a_node_of_which_nothing_is_known_stands_where_there_is_room() -> None:
    locations: dict[str, Location] = {"a": ("x",), "c": ("x",), "d": ("y",), "e": ("y",)}
    assert ranked("acdeu", "acbde", locations) == "acude"


@given(PLACED_CLUSTERS, st.permutations(NAMES))
def test_a_round_is_frozen_in_this_order(locations: dict[str, Location], former: list[str]) -> None:
    names = sorted(locations)
    before = "".join(former)
    membership = RoundMembers(frozenset(names), locations=locations)
    current = next_round(world(before, mod_revision=0))
    snapshot = run(map(node, names), current, membership=membership)
    seen = RoundObservations(
        healthy_since_s=0.0, round_number=4, round_since_s=500.0, met_min_s=500.0
    )
    decision = decide(500.0, snapshot, seen, RoundPolicy(1, len(names)))
    assert decision.round is not None
    order = [one.member for one in in_rank_order([*map(node, names)], before, locations)]
    assert [seat.member for seat in decision.round.frozen] == order


@pytest.mark.parametrize(
    ("topology", "machine", "location"),
    [
        ("", "", ()),
        ("", "m1", ("m1",)),
        ("block/rack", "m1", ("block", "rack", "m1")),
        ("block/rack", "", ("block", "rack")),
        ("/rack", "m1", ("", "rack", "m1")),
    ],
)
def test_a_location_ends_with_the_machine(topology: str, machine: str, location: Location) -> None:
    assert member("a", topology=topology, node=machine).location == location
