# SPDX-License-Identifier: Apache-2.0
"""Stages and runs of a container: which is now, which launch lines they had, what of them goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.upkeep import stale_worker_keys
from launcher_shim.c10d.clean_up import FOLLOWED_MAX, KnownRounds, surplus
from launcher_shim.c10d.launchers import line_key, recorded, was_run
from launcher_shim.c10d.rounds.records import Round, Seat
from launcher_shim.c10d.rounds.stages import (
    SHARED_RUN,
    Stages,
    container_of,
    split_stage,
    stage_name,
    torch_run_id,
)
from launcher_shim.tcpstore import wire
from rdzv.errors import RecordError
from rdzv.keys import JobKeys
from rdzv.records.job import ROUNDS_PER_LIFE, HistoryEntry
from rdzv.store import KeyValue, WatchEvent
from tests.support.records import kv, node, world

HERE, AGAIN = "a" * 16, "b" * 16


@pytest.mark.parametrize("run_id", ["digits", "a (stage x)", "a (stage 1)", "a (stage 02)", "a\nb"])
@pytest.mark.parametrize("stage", [1, 2, 10])
def test_a_stage_is_named_after_its_run(run_id: str, stage: int) -> None:
    name = stage_name(run_id, stage)
    assert split_stage(name) == (run_id, stage)
    assert torch_run_id(name) == run_id


def test_one_that_has_ended_well_leads_to_the_next_stage_of_its_run() -> None:
    stages = Stages()
    assert stages.next(HERE, "digits") == "digits"
    assert stages.finish(HERE, "digits")
    assert stages.next(HERE, "digits") == "digits (stage 2)"
    assert stages.next(HERE, "faces") == "faces"
    assert stages.finish(HERE, "digits (stage 2)")
    assert stages.next(HERE, "digits") == "digits (stage 3)"


def test_a_stage_counts_once() -> None:
    stages = Stages()
    stages.finish(HERE, "digits")
    stages.finish(HERE, "digits (stage 2)")
    assert not stages.finish(HERE, "digits")
    assert stages.next(HERE, "digits") == "digits (stage 3)"


def test_a_container_that_is_started_again_begins_at_its_first_stage() -> None:
    stages = Stages()
    stages.finish(HERE, "digits")
    assert stages.next(AGAIN, "digits") == "digits"
    stages.finish(AGAIN, "faces")
    assert stages.next(AGAIN, "digits") == "digits"


def test_where_nobody_tells_of_containers_there_is_one_stage() -> None:
    stages = Stages()
    assert not stages.finish("", "digits")
    assert stages.next("", "digits") == "digits"
    assert container_of(None) == container_of("0123456789abcdef") == ""
    assert container_of(HERE + "c" * 16) == HERE


def test_what_is_known_is_kept() -> None:
    stages = Stages()
    stages.finish(HERE, "digits")
    stages.passed_by = "c" * 32
    assert Stages.from_json(stages.to_json()) == stages


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"schema": 1}', b'{"schema": 1, "container": "", "finished": {"a": ""}}'],
)
def test_i8_what_is_no_record_is_said(content: bytes) -> None:
    with pytest.raises(RecordError):
        Stages.from_json(content)


ONE, TWO, LAUNCH_AGAIN = "1" * 16, "2" * 16, "3" * 16
FROZEN = (Seat("w-0", ONE + "c" * 16, 1), Seat("w-1", TWO + "c" * 16, 1))


@pytest.mark.parametrize(
    ("line", "member", "container", "was"),
    [
        (b"zero", "w-0", ONE, True),
        (b"one", "w-0", ONE, False),
        (b"zero", "w-2", ONE, True),
        (b"one", "w-2", ONE, True),
        (b"two", "w-2", ONE, False),
        # What w-0 asked with in a container that was started after the stage had ended:
        (b"zero", "w-0", LAUNCH_AGAIN, False),
        (b"one", "w-0", LAUNCH_AGAIN, True),
        (b"zero", "w-2", LAUNCH_AGAIN, False),
    ],
)
def test_the_line_is_that_of_who_trained(
    line: bytes, member: str, container: str, was: bool
) -> None:
    values = {"w-0": recorded(container, b"zero"), "w-1": recorded(TWO, b"one")}
    assert was_run(line, member, FROZEN, values) == was


def test_what_nobody_recorded_was_not_run() -> None:
    assert not was_run(b"", "w-0", FROZEN, {"w-0": None, "w-1": b""})
    assert not was_run(b"", "w-0", (Seat("w-0", "c" * 16, 1),), {"w-0": recorded("", b"")})
    assert len({line_key(seat.member) for seat in FROZEN}) == 2


PAST_HERE = JobKeys("team", "digits").in_generation(1)
WORLD = Round(0, complete=True, frozen=(Seat("w-0", "n", 1),))
ENDED = replace(WORLD, finishing=True, closed="success")
FAILED = replace(WORLD, closed="failure")

BARRIER = b"/torch.rendezvous.digits.0/torchelastic/agent/terminal_state/num_members"


def run(name: str, current: Round, revision: int, state: str = "left") -> list[KeyValue]:
    """All that a run has in the store, what may go first."""
    keys = PAST_HERE.run(name)
    inside = node("w-0", "in") if state == "in" else node("w-0", "left", left="done")
    return [
        kv(keys.value(b"/torch.rendezvous.digits.0/MASTER_ADDR")),
        kv(keys.value(b"/mine")),
        kv(keys.addend(b"/count", "w-0.1")),
        kv(keys.element(b"/queue", "w-0.1.2")),
        kv(keys.operation("w-0.1")),
        kv(keys.value(wire.STAGE), value=b"line"),
        kv(keys.value(wire.STAGE + b"w-0"), value=b"line"),
        kv(keys.addend(BARRIER, "w-0.1")),
        kv(keys.node("w-0"), value=inside.to_json()),
        kv(keys.round, revision, current.to_json()),
    ]


def gone(*runs: list[KeyValue], present: str = "d") -> list[str]:
    return surplus(PAST_HERE, [one for kvs in runs for one in kvs], present)


def may_go(kvs: list[KeyValue]) -> list[str]:
    return [one.key for one in kvs[:5]]


def test_what_launchers_stored_in_a_run_two_back_goes_but_for_who_was_done_by_which_line() -> None:
    a, b, c, d = (run(name, ENDED, at) for at, name in enumerate("abcd"))
    assert gone(d, c, b, a) == may_go(a) + may_go(b)
    assert gone(d, c) == []


def test_a_run_goes_on_to_keep_what_somebody_may_still_read() -> None:
    still, others = run("a", ENDED, 1, "in"), [run("c", ENDED, 8), run("d", WORLD, 9)]
    assert gone(still, *others) == []
    assert gone(run("a", WORLD, 1), run("b", FAILED, 2), *others) == []
    unreadable = [*run("a", ENDED, 1)[:-1], kv(PAST_HERE.run("a").round, value=b"no record")]
    assert gone(unreadable, *others) == []


def test_a_node_that_cannot_be_read_keeps_nothing() -> None:
    a, others = run("a", ENDED, 1), [run("c", ENDED, 8), run("d", WORLD, 9)]
    a[8] = kv(PAST_HERE.run("a").node("w-0"), value=b"no record")
    assert gone(a, *others) == may_go(a)


def test_what_clients_without_a_rendezvous_share_stays_whoever_wrote_a_round_beside_it() -> None:
    others = [run(name, ENDED, at) for at, name in enumerate("bcd", 2)]
    assert gone(run(SHARED_RUN, ENDED, 1), *others) == may_go(others[0])


KEYS = JobKeys("team", "digits")
STALE_HERE = KEYS.in_generation(2)
SHARED = STALE_HERE.run(SHARED_RUN)
FIRST = ROUNDS_PER_LIFE


def formed(number: int, revision: int, run_id: str = "digits", what: str = "round") -> KeyValue:
    entry = HistoryEntry(what, "w-0", "", 1.0, {"run_id": run_id, "round": number})  # type: ignore[arg-type]
    return kv(KEYS.history_entry(revision, "w-0", what), revision, entry.to_json())


def present(number: int, run_id: str = "digits", *, closed: bool = False) -> KeyValue:
    record = Round(number, complete=True, closed="success" if closed else "")
    return kv(STALE_HERE.run(run_id).round, 99, record.to_json())


def worker(name: bytes, revision: int) -> KeyValue:
    return kv(SHARED.value(b"/worker/attempt_0/" + name), revision)


def test_what_was_stored_before_the_former_world_is_found() -> None:
    rounds = [formed(FIRST + 1, 10), formed(FIRST + 2, 20), formed(FIRST + 3, 30)]
    old = worker(b"old", 15)
    kvs = [*rounds, present(FIRST + 3), old, worker(b"former", 25), worker(b"now", 35)]
    assert stale_worker_keys(STALE_HERE, kvs) == [old]


def test_a_key_goes_whole_or_not_at_all() -> None:
    rounds = [formed(FIRST, 10), formed(FIRST + 1, 20), present(FIRST + 1)]
    old = [kv(SHARED.value(b"init/"), 3), kv(SHARED.addend(b"init/", "w-0.1"), 5)]
    assert stale_worker_keys(STALE_HERE, [*rounds, *old]) == old
    assert (
        stale_worker_keys(STALE_HERE, [*rounds, *old, kv(SHARED.addend(b"init/", "w-0.2"), 15)])
        == []
    )


def test_keys_of_other_clients_stay() -> None:
    rounds = [formed(FIRST, 10), formed(FIRST + 1, 20), present(FIRST + 1)]
    theirs = [
        SHARED.value(b"/mine"),
        SHARED.operation("w-0.1"),
        STALE_HERE.run("digits").value(b"init/"),
    ]
    assert stale_worker_keys(STALE_HERE, [*rounds, *(kv(key, 1) for key in theirs)]) == []


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
    assert stale_worker_keys(STALE_HERE, [*rounds, *others, old]) == []
    over = [present(FIRST + 7, "faces", closed=True), *others[1:]]
    assert stale_worker_keys(STALE_HERE, [*rounds, *over, old]) == [old]


def test_worlds_of_another_life_tell_nothing() -> None:
    rounds = [formed(5, 10), formed(6, 20), formed(FIRST + 1, 30), present(FIRST + 1)]
    assert stale_worker_keys(STALE_HERE, [*rounds, worker(b"old", 5)]) == []
    assert stale_worker_keys(STALE_HERE, [worker(b"old", 5)]) == []


KNOWN_HERE = JobKeys("team", "digits").in_generation(1)
KNOWN_WORLD = world("w", number=0, mod_revision=0)


def put(run_id: str, current: Round, revision: int) -> KeyValue:
    return kv(KNOWN_HERE.run(run_id).round, revision, current.to_json())


def known(*kvs: KeyValue) -> KnownRounds:
    return KnownRounds(KNOWN_HERE, kvs, max((one.mod_revision for one in kvs), default=1))


def lost(run_id: str, revision: int) -> list[WatchEvent]:
    return [WatchEvent("delete", KeyValue(KNOWN_HERE.run(run_id).round, b"", 0, revision, 0, 0))]


def test_a_run_is_over_once_it_was_closed_by_success_and_another_one_has_begun() -> None:
    one = known(put("a", ENDED, 5))
    assert set(one.followed()) == {"a"}
    assert one.apply([WatchEvent("put", put("a (stage 2)", KNOWN_WORLD, 6))], 6)
    assert set(one.followed()) == {"a (stage 2)"}
    assert one.apply([WatchEvent("put", put("a (stage 2)", ENDED, 7))], 7)
    assert set(one.followed()) == {"a (stage 2)"}
    assert one.ended_well("a")
    assert one.ended_well("a (stage 2)")
    assert not one.ended_well("b")


def test_a_run_that_failed_or_goes_on_is_never_over() -> None:
    one = known(put("a", FAILED, 5), put("b", KNOWN_WORLD, 6), put("c", KNOWN_WORLD, 7))
    assert set(one.followed()) == {"a", "b", "c"}
    assert one.any_closed
    assert not known(put("b", KNOWN_WORLD, 6)).any_closed


def test_one_that_ended_well_is_over_while_an_older_one_trains() -> None:
    assert set(known(put("a", KNOWN_WORLD, 5), put("b", ENDED, 9)).followed()) == {"a"}


def test_what_the_store_has_lost_is_followed_until_it_is_put_back() -> None:
    one = known(put("a", ENDED, 5), put("b", KNOWN_WORLD, 6))
    assert one.apply(lost("a", 7), 7)
    assert set(one.followed()) == {"a", "b"}
    assert one.of("a") == replace(ENDED, restored=True, mod_revision=0)
    assert one.apply([WatchEvent("put", put("a", ENDED, 8))], 8)
    assert set(one.followed()) == {"b"}
    # Restored to when it still trained.
    assert one.apply([WatchEvent("put", put("a", KNOWN_WORLD, 4))], 6)
    assert set(one.followed()) == {"a", "b"}
    assert one.ended_well("a")


def test_keys_that_are_no_rounds_and_rounds_that_cannot_be_read_are_no_runs() -> None:
    junk = kv(KNOWN_HERE.run("junk").round, 3, b"no record")
    others = [put(SHARED_RUN, KNOWN_WORLD, 4)]
    others += [
        kv(key, 5, KNOWN_WORLD.to_json())
        for key in (
            KNOWN_HERE.run("digits").value(b"round"),
            KNOWN_HERE.job.in_generation(2).run("digits").round,
            f"{KNOWN_HERE.runs}%64igits/round",
        )
    ]
    one = known(junk, *others)
    assert set(one.followed()) == frozenset()
    assert not one.apply([WatchEvent("put", one) for one in others], 6)
    assert one.apply([WatchEvent("put", put("junk", KNOWN_WORLD, 7))], 7)
    assert one.apply([WatchEvent("put", junk)], 8)
    assert set(one.followed()) == {"junk"}


def test_any_number_of_rounds_is_followed_up_to_a_bound_the_newest_first() -> None:
    one = known(*(put(f"r-{number}", KNOWN_WORLD, number + 1) for number in range(1000)))
    assert set(one.followed()) == {f"r-{999 - number}" for number in range(FOLLOWED_MAX)}
    assert len(one.names()) == 1000


def test_a_life_has_trained_once_a_world_has_formed_in_any_run() -> None:
    assert not known().trained
    assert known(put("a", Round(1), 5)).trained
    assert known(put("a", ENDED, 5)).trained
    assert not known(put("a", Round(0, closed="failure"), 5)).trained
