# SPDX-License-Identifier: Apache-2.0
"""Which of the nodes that ask form the world."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.c10d.rounds.decision import decide
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy
from launcher_shim.c10d.rounds.observations import RoundObservations
from launcher_shim.c10d.rounds.world import choose_nodes
from tests.support.records import node, run

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
