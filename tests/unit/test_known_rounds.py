# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

from launcher_shim.c10d.clean_up import FOLLOWED_MAX, KnownRounds
from launcher_shim.c10d.rounds.records import Round
from launcher_shim.c10d.rounds.stages import SHARED_RUN
from rdzv.keys import JobKeys
from rdzv.store import KeyValue, WatchEvent
from tests.support.records import kv, world

HERE = JobKeys("team", "digits").in_generation(1)
WORLD = world("w", number=0, mod_revision=0)
ENDED = replace(WORLD, finishing=True, closed="success")
FAILED = replace(WORLD, closed="failure")


def put(run_id: str, current: Round, revision: int) -> KeyValue:
    return kv(HERE.run(run_id).round, revision, current.to_json())


def known(*kvs: KeyValue) -> KnownRounds:
    return KnownRounds(HERE, kvs, max((one.mod_revision for one in kvs), default=1))


def lost(run_id: str, revision: int) -> list[WatchEvent]:
    return [WatchEvent("delete", KeyValue(HERE.run(run_id).round, b"", 0, revision, 0, 0))]


def test_a_run_is_over_once_it_was_closed_by_success_and_another_one_has_begun() -> None:
    one = known(put("a", ENDED, 5))
    assert set(one.followed()) == {"a"}
    assert one.apply([WatchEvent("put", put("a (stage 2)", WORLD, 6))], 6)
    assert set(one.followed()) == {"a (stage 2)"}
    assert one.apply([WatchEvent("put", put("a (stage 2)", ENDED, 7))], 7)
    assert set(one.followed()) == {"a (stage 2)"}
    assert one.ended_well("a")
    assert one.ended_well("a (stage 2)")
    assert not one.ended_well("b")


def test_a_run_that_failed_or_goes_on_is_never_over() -> None:
    one = known(put("a", FAILED, 5), put("b", WORLD, 6), put("c", WORLD, 7))
    assert set(one.followed()) == {"a", "b", "c"}
    assert one.any_closed
    assert not known(put("b", WORLD, 6)).any_closed


def test_one_that_ended_well_is_over_while_an_older_one_trains() -> None:
    assert set(known(put("a", WORLD, 5), put("b", ENDED, 9)).followed()) == {"a"}


def test_what_the_store_has_lost_is_followed_until_it_is_put_back() -> None:
    one = known(put("a", ENDED, 5), put("b", WORLD, 6))
    assert one.apply(lost("a", 7), 7)
    assert set(one.followed()) == {"a", "b"}
    assert one.of("a") == replace(ENDED, restored=True, mod_revision=0)
    assert one.apply([WatchEvent("put", put("a", ENDED, 8))], 8)
    assert set(one.followed()) == {"b"}
    # Restored to when it still trained.
    assert one.apply([WatchEvent("put", put("a", WORLD, 4))], 6)
    assert set(one.followed()) == {"a", "b"}
    assert one.ended_well("a")


def test_keys_that_are_no_rounds_and_rounds_that_cannot_be_read_are_no_runs() -> None:
    junk = kv(HERE.run("junk").round, 3, b"no record")
    others = [put(SHARED_RUN, WORLD, 4)]
    others += [
        kv(key, 5, WORLD.to_json())
        for key in (
            HERE.run("digits").value(b"round"),
            HERE.job.in_generation(2).run("digits").round,
            f"{HERE.runs}%64igits/round",
        )
    ]
    one = known(junk, *others)
    assert set(one.followed()) == frozenset()
    assert not one.apply([WatchEvent("put", one) for one in others], 6)
    assert one.apply([WatchEvent("put", put("junk", WORLD, 7))], 7)
    assert one.apply([WatchEvent("put", junk)], 8)
    assert set(one.followed()) == {"junk"}


def test_any_number_of_rounds_is_followed_up_to_a_bound_the_newest_first() -> None:
    one = known(*(put(f"r-{number}", WORLD, number + 1) for number in range(1000)))
    assert set(one.followed()) == {f"r-{999 - number}" for number in range(FOLLOWED_MAX)}
    assert len(one.names()) == 1000


def test_a_life_has_trained_once_a_world_has_formed_in_any_run() -> None:
    assert not known().trained
    assert known(put("a", Round(1), 5)).trained
    assert known(put("a", ENDED, 5)).trained
    assert not known(put("a", Round(0, closed="failure"), 5)).trained
