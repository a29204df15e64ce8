# SPDX-License-Identifier: Apache-2.0
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.observations import RoundObservations, stand
from launcher_shim.c10d.rounds.records import Node, Round
from launcher_shim.c10d.rounds.views import must_form_again

POLICY = RoundPolicy(2, 4)


def node(name: str, state: str, ask: int = 1) -> Node:
    return Node(name, state, f"nonce-{name}", ask, "127.0.0.1", 7, 0)  # type: ignore[arg-type]


def forms_again(*nodes: Node, frozen: tuple[Node, ...]) -> bool:
    snapshot = RunSnapshot(
        9,
        Round(0, complete=True, frozen=tuple(one.seat for one in frozen)),
        {one.member: one for one in nodes},
        RoundMembers(listed=frozenset(one.member for one in nodes)),
    )
    return must_form_again(snapshot, stand(0, snapshot, RoundObservations(), POLICY), POLICY)


def test_who_is_frozen_and_not_handed_the_round_yet_makes_nobody_form_again() -> None:
    handed, not_yet = node("a", "in"), node("b", "asking")
    assert not forms_again(handed, not_yet, frozen=(handed, not_yet))


def test_who_asks_beside_a_world_with_room_makes_it_form_again() -> None:
    a, b, newcomer = node("a", "in"), node("b", "in"), node("c", "asking")
    assert forms_again(a, b, newcomer, frozen=(a, b))
    assert forms_again(a, node("b", "asking", ask=2), frozen=(a, b))


def test_a_newcomer_waits_until_it_is_known_who_of_the_world_is_still_there() -> None:
    a, b, newcomer = node("a", "in"), node("b", "in"), node("c", "asking")
    assert not forms_again(a, newcomer, frozen=(a, b))
