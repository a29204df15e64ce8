# SPDX-License-Identifier: Apache-2.0
"""What is said of drains and worlds: phases, durations, history; each sentence once."""

from __future__ import annotations

import logging
import os
import pwd
from dataclasses import replace
from typing import get_args

import pytest

from agent.drain.decisions import Chronicle
from console.job.changing import requester
from launcher_shim.c10d.clean_up import MEMBERS_MAX, world_details
from launcher_shim.c10d.rounds.records import Round, Seat
from launcher_shim.pod.hold import FAREWELL_S, FINISHING, OutgoingNotice, reserve_s
from rdzv.drain.standing import DrainPhase, PhaseName, phase_of
from rdzv.keys import JobKeys
from rdzv.records.drain import Commit, Drain, LastCommit, Outcome, Phase
from rdzv.records.job import Happening, HistoryEntry, departures, entry_operations
from rdzv.sentences import Diary
from rdzv.snapshot import Snapshot
from rdzv.store import KeyValue, Operation
from rdzv.store.interface import Interval
from rdzv.store.memory.client import MemoryEngine, transact
from tests.support.records import drain

DRAIN = Drain("uid-b", "b", "spot", "sigterm")
HOLD = Commit(4, "run", 3, "hold", leaving=("uid-a", "uid-b"), reason="holding the ranks")


def told(commit: Commit | None, drain: Drain = DRAIN) -> DrainPhase:
    return phase_of(Snapshot(9, commit=commit), drain)


@pytest.mark.parametrize(
    ("commit", "name", "says"),
    [
        (None, "draining", "b is delisted, and no save has begun"),
        (replace(HOLD, leaving=("uid-a",)), "draining", "b is delisted, and no save has begun"),
        (HOLD, "agreeing", "asked to stop at their next step boundary"),
        (replace(HOLD, phase="commit", step=7), "saving", "all ranks save at step 7"),
        (replace(HOLD, phase="done", step=7), "saved", "step 7 is saved: holding the ranks"),
        (replace(HOLD, phase="void", reason="c could not save"), "draining", "c could not save"),
        (replace(HOLD, phase="idle", reason=""), "draining", "b is delisted"),
    ],
)
def test_before_its_end_a_drain_stands_where_the_commit_does(
    commit: Commit | None, name: str, says: str
) -> None:
    phase = told(commit)
    assert (phase.name, phase.outcome) == (name, "")
    assert says in phase.sentence


@pytest.mark.parametrize("phase", get_args(Phase))
def test_while_the_job_is_finishing_no_drain_speaks_of_a_save(phase: Phase) -> None:
    commit = replace(HOLD, phase=phase, step=9)
    ends = phase_of(Snapshot(9, commit=commit), DRAIN, finishing=True)
    assert ends == DrainPhase("finishing", "the job is finishing: nothing is to be saved")
    served = replace(commit, phase="done", saved=("uid-b",))
    assert phase_of(Snapshot(9, commit=served), DRAIN, finishing=True).name == "saved"


@pytest.mark.parametrize("phase", get_args(Phase))
@pytest.mark.parametrize("outcome", [outcome for outcome in get_args(Outcome) if outcome])
def test_an_outcome_is_the_end_wherever_the_commit_stands(phase: Phase, outcome: Outcome) -> None:
    ended = told(replace(HOLD, phase=phase, step=9), replace(DRAIN, outcome=outcome, step=7))
    assert (ended.name, ended.outcome, ended.step) == ("released", outcome, 7)
    assert "b" in ended.sentence.split()


def test_a_leave_that_is_granted_is_the_end_although_its_record_does_not_say_so_yet() -> None:
    granted = replace(HOLD, phase="done", step=7, granted=("uid-b",))
    assert told(granted).outcome == "uncommitted"
    saved = replace(granted, saved=("uid-b",))
    assert (told(saved).outcome, told(saved).step) == ("committed", 7)


def test_a_launcher_that_has_let_a_pod_go_has_no_step_to_tell() -> None:
    ended = told(None, replace(DRAIN, outcome="committed"))
    assert ended.sentence == "b may go: its launcher has let it go, and no work is lost"


KEYS = JobKeys("team", "digits")


def happened(what: Happening, why: str = "") -> tuple[Operation, ...]:
    """Write that it happened to one member, as somebody who sees revision 7 does."""
    return entry_operations(KEYS, HistoryEntry(what, "w-0", why, 1.0), 7, ())


def found(*written: tuple[Operation, ...]) -> list[KeyValue]:
    """What is in the store once all of it was written, in the order of its keys."""
    engine = MemoryEngine()
    for operations in written:
        assert transact(engine, [], operations).succeeded
    return list(engine.read(Interval.of(KEYS.history, prefix=True)))


def kept(*written: tuple[Operation, ...]) -> list[str]:
    """What it says has happened, in that order."""
    return [HistoryEntry.from_kv(kv).what for kv in found(*written)]


def test_two_things_that_happen_to_a_member_at_one_revision_are_both_kept() -> None:
    what = kept(happened("join"), happened("drain"), happened("leave"))
    assert sorted(what) == ["drain", "join", "leave"]


def test_what_two_members_report_is_one_entry() -> None:
    assert kept(happened("lost", "seen by w-1"), happened("lost", "seen by w-2")) == ["lost"]


def test_entries_sort_by_revision_whatever_happened() -> None:
    later = KEYS.history_entry(10, "a", "drain")
    assert KEYS.history_entry(9, "w-9", "round") < later < KEYS.history_entry(10, "b", "closed")


def test_departures_are_the_last_leave_of_each_member_and_nothing_else() -> None:
    def written(what: Happening, member: str, revision: int) -> tuple[Operation, ...]:
        return entry_operations(KEYS, HistoryEntry(what, member, "", 1.0), revision, ())

    entries = found(
        written("join", "a", 3),
        written("leave", "a", 5),
        written("leave", "leave", 6),
        written("join", "b.leave", 7),
        written("lost", "c", 8),
        written("leave", "a", 9),
    )
    last = {kv.key: kv.mod_revision for kv in entries}
    assert departures(entries) == {
        "a": last[KEYS.history_entry(9, "a", "leave")],
        "leave": last[KEYS.history_entry(6, "leave", "leave")],
    }


log = logging.getLogger("tests.diary")


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=log.name)
    return caplog


def test_a_sentence_is_logged_again_only_after_another(logged: pytest.LogCaptureFixture) -> None:
    diary = Diary(log)
    for sentence in ("waits", "waits", "goes on", "waits"):
        diary.say(sentence)
    assert logged.messages == ["waits", "goes on", "waits"]
    assert diary.last == "waits"


def test_a_topic_is_logged_once_however_it_is_spelled(logged: pytest.LogCaptureFixture) -> None:
    diary = Diary(log)
    diary.say("refuses: no rights", topic="refuses")
    diary.say("refuses: still no rights", topic="refuses")
    assert logged.messages == ["refuses: no rights"]


def test_what_is_forgotten_is_new(logged: pytest.LogCaptureFixture) -> None:
    diary = Diary(log)
    diary.say("waits")
    diary.forget()
    assert diary.last == ""
    diary.say("waits")
    assert logged.messages == ["waits", "waits"]


def test_a_line_has_the_level_and_the_fields_of_its_caller(
    logged: pytest.LogCaptureFixture,
) -> None:
    Diary(log).say("refuses", level=logging.WARNING, extra={"event": "store_version"})
    (record,) = logged.records
    assert (record.levelno, record.name, vars(record)["event"]) == (
        logging.WARNING,
        log.name,
        "store_version",
    )


BEGUN = Snapshot(9, drains={"uid-b": DRAIN})
CHRONICLE_HOLD = Commit(1, "run", 0, "hold", leaving=("uid-b",))


def test_each_phase_is_timed_from_the_first_sight_of_the_drain() -> None:
    chronicle = Chronicle()
    for at, snapshot in [
        (10.0, BEGUN),
        (10.5, replace(BEGUN, commit=CHRONICLE_HOLD)),
        (10.75, replace(BEGUN, commit=CHRONICLE_HOLD)),
        (12.0, replace(BEGUN, commit=replace(CHRONICLE_HOLD, phase="commit", step=7))),
    ]:
        chronicle.see(at, snapshot)
    assert chronicle.phases_s(14.25, "uid-b") == {
        "agreeing_after_s": 0.5,
        "saving_after_s": 2.0,
        "took_s": 4.25,
    }


def test_the_phase_in_which_a_drain_is_first_seen_has_no_time_before_it() -> None:
    chronicle = Chronicle()
    chronicle.see(10.0, replace(BEGUN, commit=CHRONICLE_HOLD))
    assert chronicle.phases_s(11.0, "uid-b") == {"took_s": 1.0}


def test_a_drain_that_is_off_the_record_is_forgotten() -> None:
    chronicle = Chronicle()
    chronicle.see(10.0, BEGUN)
    chronicle.see(11.0, Snapshot(10))
    assert chronicle.phases_s(12.0, "uid-b") == {}
    chronicle.see(20.0, BEGUN)
    assert chronicle.phases_s(21.0, "uid-b") == {"took_s": 1.0}


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


END_S = 1000.0


def notice(grace_s: float) -> OutgoingNotice:
    return OutgoingNotice("sigterm", "test", END_S, END_S - reserve_s(grace_s))


@pytest.mark.parametrize("grace_s", [1.5, 3.0, 30.0, 600.0])
def test_while_the_job_is_finishing_only_a_second_of_the_grace_is_kept(grace_s: float) -> None:
    held = notice(grace_s)
    assert held.until_s(FINISHING) == END_S - FAREWELL_S
    phases: tuple[PhaseName, ...] = ("draining", "agreeing", "saving", "saved", "released")
    for phase in ("", "noted", *phases):
        assert held.until_s(phase) == held.deadline_s == END_S - reserve_s(grace_s)


def test_a_wait_that_may_already_last_longer_is_not_cut() -> None:
    held = OutgoingNotice("sigterm", "test", END_S, END_S)
    assert held.until_s(FINISHING) == END_S


def test_both_sides_have_one_word_for_it() -> None:
    assert phase_of(Snapshot(9), drain("b"), finishing=True).name == FINISHING


NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")


def test_who_asks_is_a_user_and_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMES[0], "ada")
    assert requester("host-1") == "ada@host-1"


def test_a_user_without_a_name_is_told_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> object:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    # As in a container whose user is in no passwd file: that of the sidecar.
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert requester("pod-0") == f"{os.getuid()}@pod-0"
