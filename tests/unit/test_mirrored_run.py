# SPDX-License-Identifier: Apache-2.0
"""A run as the mirror shows it, of a store that was restored."""

from __future__ import annotations

from dataclasses import replace

from launcher_shim.c10d.rounds.mirrored_run import MirroredRun
from launcher_shim.c10d.rounds.records import Node, Round
from rdzv.keys import JobKeys
from rdzv.store import KeyValue, WatchEvent

RUN = JobKeys("team", "digits").in_generation(1).run("digits")
NODE = Node("a", "asking", "n", 1, "10.0.0.1", 7, 0)


def put(key: str, value: bytes, revision: int) -> WatchEvent:
    return WatchEvent("put", KeyValue(key, value, 1, revision, 1, 1))


def test_a_store_that_was_restored_and_has_come_as_far_again_is_known_by_its_records() -> None:
    for key, value in ((RUN.node("a"), NODE.to_json()), (RUN.round, Round(3).to_json())):
        run = MirroredRun(RUN)
        for revision in (9, 15):
            event = put(key, value, revision)
            assert not run.went_back(revision, [event])
            run.apply(event)
        assert run.went_back(17, [put(key, value, 9)])


def test_a_world_that_the_store_has_lost_is_marked_when_it_is_written_again() -> None:
    world = Round(3, True, frozen=(NODE.seat,))
    run = MirroredRun(RUN)
    assert not run.went_back(9, [])
    run.apply(put(RUN.round, world.to_json(), 9))
    assert run.went_back(4, [])
    run.apply(put(RUN.round, Round(2).to_json(), 3))
    assert run.lacks_round
    assert run.round == replace(world, restored=True, mod_revision=3)
    run.apply(put(RUN.round, run.round.to_json(), 5))
    assert not run.lacks_round
    assert run.round.restored


def test_an_open_round_that_the_store_has_lost_may_be_entered() -> None:
    run = MirroredRun(RUN)
    assert not run.went_back(9, [])
    run.apply(put(RUN.round, Round(3).to_json(), 9))
    assert run.went_back(4, [])
    run.apply(put(RUN.round, Round(2).to_json(), 3))
    assert run.round == Round(3, mod_revision=3)


def test_a_store_that_goes_on_was_not_restored() -> None:
    run = MirroredRun(RUN)
    run.apply(put(RUN.node("a"), NODE.to_json(), 9))
    assert not run.went_back(15, [put(RUN.node("a"), NODE.to_json(), 12)])
    assert not run.went_back(17, [put(RUN.node("b"), NODE.to_json(), 5)])
    assert run.went_back(16, [])
