# SPDX-License-Identifier: Apache-2.0
"""A run's round as drains look at it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from launcher_shim.c10d.generation import Run
from launcher_shim.c10d.rounds.inputs import RoundPolicy
from launcher_shim.c10d.rounds.mirrored_run import (
    counting_round,
    live_round,
    master_token,
    newest_round,
    own,
)
from launcher_shim.c10d.rounds.observations import RoundObservations, stand
from launcher_shim.c10d.rounds.records import Node, Round
from launcher_shim.c10d.rounds.stages import WORLDS_MAX, KeptMasters
from launcher_shim.c10d.rounds.world import reform
from launcher_shim.rundir import layout
from rdzv.drain.inputs import LiveRound
from rdzv.records.drain import Commit, Outcome, Phase
from rdzv.records.job import ROUNDS_PER_LIFE, Incarnation
from rdzv.snapshot import Snapshot
from tests.support.records import drain, member, node, run, world

POLICY = RoundPolicy(2, 4)
WORLD = world("bac", mod_revision=9)


def seen(
    *nodes: Node, current: Round = WORLD, policy: RoundPolicy = POLICY, listed: str = "abcd"
) -> LiveRound:
    snapshot = run(nodes, current, listed=listed)
    standings = stand(0, snapshot, RoundObservations(), policy)
    reforms = reform(0, snapshot, RoundObservations(), policy)
    return live_round("digits", snapshot, standings, reforms.cause, "10.0.0.2:29500")


A, B, C, D = node("a", "in"), node("b", "in"), node("c", "in"), node("d")


def test_members_stand_in_the_order_of_their_ranks() -> None:
    assert seen(A, B, C) == LiveRound(
        "digits", 3, True, ("b", "a", "c"), master="10.0.0.2:29500", mod_revision=9
    )


def test_who_left_is_gone_and_who_was_done_too() -> None:
    assert seen(
        A, node("b", "left", left="closed"), node("c", "left", left="done")
    ).left == frozenset("bc")
    assert seen(A, B).left == frozenset()


@pytest.mark.parametrize(
    ("listed", "most", "expected"), [("abcd", 4, "join"), ("abc", 4, ""), ("abcd", 3, "")]
)
def test_a_newcomer_is_listed_and_has_room(listed: str, most: int, expected: str) -> None:
    one = seen(A, B, C, D, listed=listed, policy=replace(POLICY, max_nodes=most))
    assert one.reforms == expected


def test_an_open_round_has_no_members_and_no_name_yet() -> None:
    one = seen(D, current=Round(4, mod_revision=12))
    assert one == LiveRound("digits", 4, False, mod_revision=12, asking=frozenset("d"))
    assert not one.live


def test_the_first_of_a_life_of_the_job_is_known() -> None:
    assert not seen(A, B, C).first
    assert seen(D, current=Round(0)).first
    assert seen(D, current=Round(ROUNDS_PER_LIFE)).first


def test_finishing_and_closed() -> None:
    one = seen(A, B, C, current=replace(WORLD, finishing=True, closed="success"))
    assert (one.finishing, one.closed, one.succeeded, one.live) == (True, True, True, False)
    failed = seen(A, B, C, current=replace(WORLD, closed="failure"))
    assert (failed.closed, failed.succeeded) == (True, False)


def test_the_master_names_the_round_once_both_halves_are_set() -> None:
    values = {b"/torch.rendezvous.digits.3/MASTER_ADDR": b"10.0.0.2"}
    assert master_token("digits", 3, values.get) == ""
    values[b"/torch.rendezvous.digits.3/MASTER_PORT"] = b"29500"
    assert master_token("digits", 3, values.get) == "10.0.0.2:29500"
    assert master_token("digits", 4, values.get) == ""


class Files(dict[str, bytes]):
    """A run directory."""

    content = dict.get
    put = dict.__setitem__


async def sidecar(files: Files, stored: dict[bytes, bytes]) -> Any:
    """What a sidecar follows of a run, once it has started; the master alone is its live round."""
    masters = KeptMasters(files)
    await masters.read()
    rendezvous: Any = SimpleNamespace(run_id="digits", round=WORLD, live_round=str)
    kv: Any = SimpleNamespace(cells=SimpleNamespace(value=stored.get))
    return Run(kv, rendezvous, members=kv, masters=masters, tasks=())


async def test_a_world_keeps_its_master_in_a_store_that_was_restored_to_before_it() -> None:
    prefix = f"/torch.rendezvous.digits.{WORLD.number}/".encode()
    stored = {prefix + b"MASTER_ADDR": b"10.0.0.2", prefix + b"MASTER_PORT": b"29500"}
    files = Files()
    first = await sidecar(files, stored)
    assert first.live_round() == "10.0.0.2:29500"
    stored.clear()
    lost = replace(WORLD, restored=True, mod_revision=4)
    first.rendezvous.round = replace(WORLD, complete=False, frozen=())
    assert first.live_round() == ""
    first.rendezvous.round = lost
    assert first.live_round() == "10.0.0.2:29500"
    await first.masters.keep()

    second = await sidecar(files, {})
    second.rendezvous.round = lost
    assert second.live_round() == "10.0.0.2:29500"
    # The restored store has used the number again, for others; a later world is of the same seats.
    for other in (
        replace(world("ca", mod_revision=5), number=WORLD.number),
        replace(WORLD, number=WORLD.number + ROUNDS_PER_LIFE),
        replace(WORLD, number=WORLD.number + 1),
    ):
        second.rendezvous.round = other
        assert second.live_round() == ""


async def test_a_damaged_file_of_masters_is_none() -> None:
    files = Files({layout.MASTERS: b"{"})
    run = await sidecar(files, {})
    assert run.live_round() == ""


def test_masters_of_the_newest_worlds_are_kept() -> None:
    masters = KeptMasters(None)
    worlds = [replace(WORLD, number=number) for number in range(WORLDS_MAX + 1)]
    for one in worlds:
        masters.note("digits", one, f"10.0.0.2:{one.number}")
    known = [masters.of("digits", one) for one in worlds]
    assert known == ["", *(f"10.0.0.2:{one.number}" for one in worlds[1:])]
    assert masters.of("other", WORLD) == ""


def test_of_several_runs_the_newest_that_trains_counts() -> None:
    closed = LiveRound("old", 7, True, closed=True, mod_revision=90)
    opened = LiveRound("other", 0, False, mod_revision=95)
    world = LiveRound("digits", 1, True, mod_revision=80)
    assert newest_round([closed, opened, world]) is world
    assert newest_round([closed, opened]) is opened
    assert newest_round([]) is None


OLDER = LiveRound("digits", 3, True, ("a", "b"), mod_revision=80)
NEWER = LiveRound("prepare", 1, True, ("c",), mod_revision=90)
DONE = Commit(5, "digits", 3, "done", 10)
GRANTED = replace(DONE, granted=("uid-b",))


@pytest.mark.parametrize("commit", [DONE, GRANTED, replace(DONE, admitted=True)])
def test_i3_a_round_that_stands_still_after_its_save_counts_until_it_has_ended(
    commit: Commit,
) -> None:
    assert counting_round([OLDER, NEWER], Snapshot(95, commit=commit)) is OLDER
    over = replace(OLDER, number=4, complete=False, members=())
    assert counting_round([over, NEWER], Snapshot(95, commit=commit)) is NEWER
    failed = replace(OLDER, closed=True)
    assert counting_round([failed, NEWER], Snapshot(95, commit=commit)) is NEWER


@pytest.mark.parametrize(
    "commit",
    [
        None,
        replace(DONE, phase="idle"),
        replace(DONE, phase="hold"),
        replace(GRANTED, round=2),
        replace(GRANTED, run="evaluate"),
    ],
)
def test_a_commit_that_is_not_done_in_any_of_these_keeps_no_other_run_waiting(
    commit: Commit | None,
) -> None:
    assert counting_round([OLDER, NEWER], Snapshot(95, commit=commit)) is NEWER


def drains(*members: str, commit: Commit | None = None, outcome: Outcome = "") -> Snapshot:
    """A job in which the pods of these members drain."""
    found = {one.pod_uid: one for one in (drain(name, outcome) for name in members)}
    held = {name: Incarnation(name, 1, f"uid-{name}") for name in "abc"}
    return Snapshot(95, drains=found, commit=commit, incarnations=held)


HOLD = replace(DONE, phase="hold", step=None)


def test_i3_a_round_that_somebody_leaves_counts_though_a_newer_world_trains() -> None:
    assert counting_round([OLDER, NEWER], drains("b")) is OLDER
    assert counting_round([OLDER, NEWER], drains("c")) is NEWER
    assert counting_round([OLDER, NEWER], drains("b", "c")) is NEWER
    assert counting_round([OLDER, NEWER], drains("b", outcome="expired")) is NEWER
    # Somebody else's pod drains, of which that name was taken over.
    other = {"uid-b-1": drain("b", uid="uid-b-1")}
    assert counting_round([OLDER, NEWER], replace(drains(), drains=other)) is NEWER


def test_an_attempt_that_is_under_way_comes_before_a_newer_world_s() -> None:
    assert counting_round([OLDER, NEWER], drains("b", "c", commit=HOLD)) is OLDER
    assert counting_round([OLDER, NEWER], drains("c", commit=HOLD)) is NEWER


def test_i3_a_save_that_has_begun_is_not_broken_off_for_another_world() -> None:
    # Ranks that have read of the step would save it, and those that have not would train on.
    older = replace(OLDER, reforms="join")
    save = replace(HOLD, phase="commit", step=10)
    assert counting_round([older, NEWER], drains("c", commit=save)) is older
    # The leaver's deadline was over before it had saved: the others still do.
    assert counting_round([OLDER, NEWER], drains("b", commit=save, outcome="expired")) is OLDER
    assert counting_round([older, NEWER], drains("c", commit=replace(save, phase="void"))) is NEWER
    assert counting_round([replace(OLDER, closed=True), NEWER], drains("c", commit=save)) is NEWER


@pytest.mark.parametrize("change", [{"closed": True}, {"finishing": True}, {"complete": False}])
def test_a_round_in_which_no_commit_can_be_keeps_no_newer_world_waiting(
    change: dict[str, bool],
) -> None:
    older = replace(OLDER, reforms="join", **change)  # type: ignore[arg-type]
    assert counting_round([older, NEWER], drains("b")) is NEWER


def test_a_round_that_somebody_joins_counts_unless_somebody_leaves_another_one() -> None:
    older = replace(OLDER, reforms="join")
    assert counting_round([older, NEWER], drains()) is older
    newer = replace(NEWER, reforms="join")
    assert counting_round([older, newer], drains()) is newer
    assert counting_round([older, NEWER], drains("c")) is NEWER


@pytest.mark.parametrize("phase", ["idle", "hold", "commit", "void"])
def test_beside_a_sidecar_of_0_1_0_that_round_counts_which_counts_there(phase: Phase) -> None:
    # Else each of the two would write the commit of another run, for as long as both are there.
    commit = replace(HOLD, phase=phase)
    older = replace(OLDER, reforms="join")
    news = {name: member(name, version="0.2.0") for name in "abc"}
    job = replace(drains("b", commit=commit), members=news)
    assert counting_round([older, NEWER], job) is older
    mixed = replace(job, members={**news, "c": member("c")})
    assert counting_round([older, NEWER], mixed) is NEWER
    saved = replace(mixed, commit=DONE)
    assert counting_round([older, NEWER], saved) is older


def test_a_pod_has_a_round_of_its_own_while_its_node_is_in_it() -> None:
    assert own([OLDER, NEWER], "b") is OLDER
    assert own([OLDER, NEWER], "c") is NEWER
    assert own([OLDER, NEWER], "d") is None
    assert own([replace(OLDER, left=frozenset("b")), NEWER], "b") is None
    assert own([replace(OLDER, closed=True), NEWER], "b") is None
