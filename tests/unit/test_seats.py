# SPDX-License-Identifier: Apache-2.0
"""Who gets a place in the next round, which nodes form the world, and in which order of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.c10d.rounds.decision import decide, next_round
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.observations import RoundObservations, observe
from launcher_shim.c10d.rounds.records import LeftReason, Node, NodeState, Round
from launcher_shim.c10d.rounds.views import view
from launcher_shim.c10d.rounds.world import Location, Reform, choose_nodes, in_rank_order, reform
from rdzv.store import KeyValue
from tests.support import records
from tests.support.records import member, node, run, world

NOW = 500.0
POLICY = RoundPolicy(min_nodes=3, max_nodes=3)
WATCHED = RoundObservations(
    healthy_since_s=NOW - 100, round_number=4, round_since_s=NOW, met_min_s=NOW
)


def place_run(
    nodes: Iterable[Node], current: Round | None = None, *, by_age: str = "abcd"
) -> RunSnapshot:
    ages = {member: age for age, member in enumerate(by_age)}
    return records.run(nodes, current, membership=RoundMembers(frozenset(by_age), ages=ages))


def after(members: str) -> Round:
    """The round that follows one in which ``members`` trained."""
    return next_round(world(members, mod_revision=0))


def seated(
    snapshot: RunSnapshot, seen: RoundObservations = WATCHED, policy: RoundPolicy = POLICY
) -> str:
    decision = decide(NOW, snapshot, seen, policy)
    return "".join(seat.member for seat in decision.round.frozen) if decision.round else ""


def test_a_standby_that_asks_has_the_place_of_a_launcher_that_never_came() -> None:
    assert seated(place_run(map(node, "acd"))) == "acd"


def test_among_those_who_ask_the_oldest_have_the_places() -> None:
    asking = [node(m, revision=r) for m, r in zip("dcba", (1, 2, 3, 4), strict=True)]
    assert seated(place_run(asking)) == "abc"
    assert seated(place_run(asking, by_age="dcba")) == "bcd"


def test_who_trained_keeps_its_place_from_an_older_one_that_comes_back() -> None:
    assert seated(place_run(map(node, "abcd"), after("bcd"))) == "bcd"
    assert (
        seated(place_run([node("a", left="closed", state="left"), *map(node, "bcd")], after("bcd")))
        == "bcd"
    )


@pytest.mark.parametrize("state", ["left", "in"])
def test_a_standby_leaves_the_place_to_who_is_about_to_ask_again(state: NodeState) -> None:
    snapshot = place_run([*map(node, "abd"), node("c", state)], after("abc"))
    decision = decide(NOW, snapshot, WATCHED, POLICY)
    assert (decision.round, decision.wake_at_s) == (None, NOW + POLICY.last_call_s)
    assert "waiting for c" in decision.reason
    assert decide(decision.wake_at_s, snapshot, WATCHED, POLICY).round is not None


@pytest.mark.parametrize("state", ["left", "in"])
def test_a_world_that_becomes_smaller_keeps_the_oldest_whoever_asks_first(state: NodeState) -> None:
    policy = replace(POLICY, min_nodes=1, max_nodes=2)
    snapshot = place_run([*map(node, "ac"), node("b", state), node("d", state)], after("abcd"))
    decision = decide(NOW, snapshot, WATCHED, policy)
    assert (decision.round, decision.wake_at_s) == (None, NOW + policy.last_call_s)
    assert decision.reason.endswith("waiting for b")
    late = decide(decision.wake_at_s, snapshot, WATCHED, policy).round
    assert late is not None
    assert [seat.member for seat in late.frozen] == ["a", "c"]
    # The youngest are on their way, too, and have no place.
    youngest = [node("c", state), node("d", state)]
    assert seated(place_run([*map(node, "ab"), *youngest], after("abcd")), policy=policy) == "ab"
    ended = node("b", "left", left="closed")
    assert seated(place_run([*map(node, "ac"), ended], after("abcd")), policy=policy) == "ac"


@pytest.mark.parametrize("reason", ["closed", "hung", "done"])
def test_nobody_keeps_a_place_for_a_torchrun_that_has_ended(reason: LeftReason) -> None:
    assert (
        seated(place_run([*map(node, "abd"), node("c", "left", left=reason)], after("abc")))
        == "abd"
    )


def test_nobody_waits_at_a_re_form_for_a_launcher_that_never_came() -> None:
    policy = replace(POLICY, min_nodes=2)
    snapshot = place_run(map(node, "ab"), after("ab"), by_age="abc")
    seen = replace(WATCHED, absent_s={"c": NOW - policy.first_call_s})
    assert seated(snapshot, seen, policy) == "ab"
    recent = replace(WATCHED, absent_s={"c": NOW - 5})
    waits = decide(NOW, snapshot, recent, policy)
    assert (waits.round, waits.wake_at_s) == (None, NOW - 5 + policy.first_call_s)


def test_the_first_world_waits_for_its_first_call_from_when_it_could_form() -> None:
    policy = replace(POLICY, min_nodes=2)
    seen = replace(WATCHED, round_number=0, absent_s={"c": NOW - 500})
    waits = decide(NOW, place_run(map(node, "ab"), by_age="abc"), seen, policy)
    assert (waits.round, waits.wake_at_s) == (None, NOW + policy.first_call_s)


def test_a_member_is_absent_from_when_it_was_first_seen_without_a_torchrun() -> None:
    def look(seen: RoundObservations, nodes: str, now: float) -> RoundObservations:
        snapshot = place_run(map(node, nodes), by_age="ab")
        return observe(now, seen, snapshot, POLICY, healthy_s=9, cut_off=False)

    seen = look(RoundObservations(), "a", 10)
    assert look(seen, "a", 20).absent_s == {"b": 10}
    assert look(seen, "ab", 20).absent_s == {}
    assert look(look(seen, "ab", 20), "a", 30).absent_s == {"b": 30}


def test_a_standby_that_asks_is_no_newcomer_to_a_full_world() -> None:
    snapshot = place_run([node("a"), *(node(m, "in") for m in "bcd")], world("bcd"))
    reforms = reform(NOW, snapshot, WATCHED, POLICY)
    assert reforms == Reform()
    spare = view(snapshot, POLICY, node("a"), parked=False, parks=True)
    assert (spare.role, spare.full) == ("parked", True)


def test_who_trained_last_is_on_record_until_the_next_world_is() -> None:
    opened = after("cab")
    assert opened.former == ("c", "a", "b")
    kv = KeyValue("/r/round", opened.to_json(), 1, 7, 1, 0)
    assert Round.from_kv(kv) == replace(opened, mod_revision=7)
    frozen = decide(NOW, place_run(map(node, "abc"), opened), WATCHED, POLICY).round
    assert frozen is not None
    assert frozen.former == ()


WAITED = RoundObservations(met_min_s=-1e9)


def chosen(
    asking: str, size: int, *, former: str = "", quarantined: str = "", blocks: str = ""
) -> str:
    """Choose of members a, b, c, …; ``blocks`` has a letter for each, a dot where none is known."""
    known = dict(zip("abcdefghij", blocks, strict=False))
    where = {member: block for member, block in known.items() if block != "."}
    picked = choose_nodes([node(member) for member in asking], size, former, quarantined, where)
    return "".join(sorted(one.member for one in picked))


@pytest.mark.parametrize(
    ("asking", "size", "former", "blocks", "expected"),
    [
        ("abcd", 2, "", "", "ab"),
        ("abcd", 2, "cd", "", "cd"),
        ("abcd", 3, "cd", "", "acd"),
        ("abcdefg", 4, "", "xxxyyyy", "defg"),
        ("abcdefg", 4, "abcdefg", "xxxyyyy", "defg"),
        ("abcdef", 4, "", "xxyyzz", "abcd"),
        ("abcdefg", 5, "", "xxxyyyy", "adefg"),
        ("abcdef", 4, "ef", "xxyyzz", "abef"),
        ("abcdef", 4, "cd", "xyxyzz", "abcd"),
        ("abcde", 3, "c", "xxyyy", "cde"),
        ("abcde", 2, "", "...xx", "de"),
        ("abcde", 3, "", "...xx", "ade"),
    ],
)
def test_who_has_trained_goes_first_then_whole_blocks_then_the_oldest(
    asking: str, size: int, former: str, blocks: str, expected: str
) -> None:
    assert chosen(asking, size, former=former, blocks=blocks) == expected


def test_a_quarantined_one_goes_last_wherever_it_is() -> None:
    assert chosen("abcd", 3, former="b", quarantined="b", blocks="xyxx") == "acd"
    assert chosen("abcd", 3, quarantined="bd", blocks="zxyx") == "abc"


MEMBERS = st.sets(st.sampled_from("abcdefghij"))


@given(st.permutations("abcdefghij"), st.integers(0, 12), MEMBERS, st.text("xyz.", max_size=10))
def test_as_many_as_there_is_room_for_and_nobody_who_trained_for_one_who_did_not(
    asking: list[str], size: int, former: set[str], blocks: str
) -> None:
    picked = chosen("".join(asking), size, former="".join(sorted(former)), blocks=blocks)
    assert len(picked) == len(set(picked)) == min(size, len(asking))
    assert former <= set(picked) or set(picked) <= former


def test_the_world_that_forms_is_of_those_who_are_chosen() -> None:
    members = RoundMembers(frozenset("abcdef"), blocks={"a": "x", **dict.fromkeys("bcdef", "y")})
    policy = RoundPolicy(2, 6, sizes=(5,))
    decision = decide(0, run(map(node, "abcdef"), membership=members), WAITED, policy)
    assert decision.round is not None
    assert "".join(seat.member for seat in decision.round.frozen) == "bcdef"


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
