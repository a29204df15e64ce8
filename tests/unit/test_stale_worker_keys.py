# SPDX-License-Identifier: Apache-2.0
"""What workers of former worlds have left where clients without a rendezvous store."""

from __future__ import annotations

import pytest

from agent.upkeep import stale_worker_keys
from launcher_shim.c10d.rounds.records import Round
from launcher_shim.c10d.rounds.stages import SHARED_RUN
from rdzv.keys import JobKeys
from rdzv.records.history import ROUNDS_PER_LIFE, HistoryEntry
from rdzv.store import KeyValue
from tests.support.records import kv

KEYS = JobKeys("team", "digits")
HERE = KEYS.in_generation(2)
SHARED = HERE.run(SHARED_RUN)
FIRST = ROUNDS_PER_LIFE


def formed(number: int, revision: int, run_id: str = "digits", what: str = "round") -> KeyValue:
    entry = HistoryEntry(what, "w-0", "", 1.0, {"run_id": run_id, "round": number})  # type: ignore[arg-type]
    return kv(KEYS.history_entry(revision, "w-0", what), revision, entry.to_json())


def present(number: int, run_id: str = "digits", *, closed: bool = False) -> KeyValue:
    record = Round(number, complete=True, closed="success" if closed else "")
    return kv(HERE.run(run_id).round, 99, record.to_json())


def worker(name: bytes, revision: int) -> KeyValue:
    return kv(SHARED.value(b"/worker/attempt_0/" + name), revision)


def test_what_was_stored_before_the_former_world_is_found() -> None:
    rounds = [formed(FIRST + 1, 10), formed(FIRST + 2, 20), formed(FIRST + 3, 30)]
    old = worker(b"old", 15)
    kvs = [*rounds, present(FIRST + 3), old, worker(b"former", 25), worker(b"now", 35)]
    assert stale_worker_keys(HERE, kvs) == [old]


def test_a_key_goes_whole_or_not_at_all() -> None:
    rounds = [formed(FIRST, 10), formed(FIRST + 1, 20), present(FIRST + 1)]
    old = [kv(SHARED.value(b"init/"), 3), kv(SHARED.addend(b"init/", "w-0.1"), 5)]
    assert stale_worker_keys(HERE, [*rounds, *old]) == old
    assert stale_worker_keys(HERE, [*rounds, *old, kv(SHARED.addend(b"init/", "w-0.2"), 15)]) == []


def test_keys_of_other_clients_stay() -> None:
    rounds = [formed(FIRST, 10), formed(FIRST + 1, 20), present(FIRST + 1)]
    theirs = [SHARED.value(b"/mine"), SHARED.operation("w-0.1"), HERE.run("digits").value(b"init/")]
    assert stale_worker_keys(HERE, [*rounds, *(kv(key, 1) for key in theirs)]) == []


@pytest.mark.parametrize(
    "others",
    [
        [present(FIRST + 7, "faces")],
        [present(FIRST + 7, "faces"), formed(FIRST + 7, 90, "faces")],
        [
            present(FIRST + 7, "faces"),
            formed(FIRST + 6, 4, "faces"),
            formed(FIRST + 7, 90, "faces"),
        ],
    ],
)
def test_the_worlds_of_all_runs_that_go_on_count(others: list[KeyValue]) -> None:
    rounds = [formed(FIRST, 10), formed(FIRST + 1, 20), present(FIRST + 1)]
    old = worker(b"old", 5)
    assert stale_worker_keys(HERE, [*rounds, *others, old]) == []
    over = [present(FIRST + 7, "faces", closed=True), *others[1:]]
    assert stale_worker_keys(HERE, [*rounds, *over, old]) == [old]


def test_worlds_of_another_life_tell_nothing() -> None:
    rounds = [formed(5, 10), formed(6, 20), formed(FIRST + 1, 30), present(FIRST + 1)]
    assert stale_worker_keys(HERE, [*rounds, worker(b"old", 5)]) == []
    assert stale_worker_keys(HERE, [worker(b"old", 5)]) == []
