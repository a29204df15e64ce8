# SPDX-License-Identifier: Apache-2.0
"""What the history says of a world: its members, and the save that it starts from."""

from __future__ import annotations

from launcher_shim.c10d.clean_up import MEMBERS_MAX, world_details
from launcher_shim.c10d.rounds.records import Round, Seat
from rdzv.records.drain import LastCommit

WORLD = Round(4, complete=True, frozen=(Seat("b", "n", 1), Seat("a", "n", 1)))
BARE = {"run_id": "digits", "round": 4, "nodes": 2, "members": ["b", "a"]}


def test_members_are_in_rank_order() -> None:
    assert world_details("digits", WORLD, None) == BARE


def test_a_save_for_a_change_of_the_world_is_of_its_round() -> None:
    asked, periodic = LastCommit(45, 3, 7), LastCommit(45, 3, 7, periodic=True)
    assert world_details("digits", WORLD, asked) == {**BARE, "step": 45, "saved_round": 3}
    assert world_details("digits", WORLD, periodic) == {**BARE, "step": 45}


def test_the_save_of_another_run_has_steps_of_its_own() -> None:
    assert world_details("digits", WORLD, LastCommit(45, 3, 7, run="other")) == BARE


def test_a_large_world_does_not_fill_the_history() -> None:
    many = tuple(Seat(f"w-{number}", "n", 1) for number in range(MEMBERS_MAX + 1))
    large = Round(4, complete=True, frozen=many)
    assert "members" not in world_details("digits", large, None)
    assert world_details("digits", large, None)["nodes"] == MEMBERS_MAX + 1
