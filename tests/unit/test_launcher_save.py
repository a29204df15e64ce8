# SPDX-License-Identifier: Apache-2.0
"""A Horovod launcher that has to go: who saves before, and when it may go then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import muster
import muster.horovod
from agent.rundir.reports import read_ranks
from muster.gate import GateFile
from muster.progress import ProgressFile
from rdzv.drain.decision import decide
from rdzv.drain.gate import Gate, Here, local
from rdzv.drain.inputs import DrainingSnapshot, DrainObservations, DrainPolicy
from rdzv.drain.standing import answer, ask_of, asked, is_withdrawn
from rdzv.records.drain import Drain
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import Snapshot, listing_of
from rdzv.store import KeyValue
from tests.support.records import member

POLICY = DrainPolicy()
LEAVES = Drain("uid-l", "l", "eviction", "sigterm", created_revision=40, mod_revision=50)
PROMISED = replace(LEAVES, saver="a")
SAVED = replace(PROMISED, step=7)
WORKER_LEAVES = replace(LEAVES, pod_uid="uid-a", member="a", created_revision=41)


def job(*drains: Drain, members: str = "lab") -> Snapshot:
    made = {name: member(name, at) for at, name in enumerate(members, 1)}
    if "l" in made:
        made["l"] = replace(made["l"], role="launcher")
    by_pod = {drain.pod_uid: drain for drain in drains}
    return Snapshot(90, Job(JobPolicy(1, 4), mod_revision=7), made, drains=by_pod)


def outcome(
    drain: Drain, seen_for_s: float, due_s: float = 100.0, members: str = "lab"
) -> tuple[str, int | None]:
    """How the launcher's drain ends, so long after its own sidecar has seen it."""
    membership = job(drain, members=members)
    snapshot = DrainingSnapshot(
        membership, listing_of(membership), None, {}, "uid-l", revision=membership.revision
    )
    times = DrainObservations(due_s={"uid-l": due_s}, own_since_s=0.0)
    decision = decide(seen_for_s, snapshot, times, POLICY)
    if not decision.drains:
        assert seen_for_s < decision.wake_at_s < math.inf
        return "", None
    ended = decision.drains["uid-l"]
    return ended.outcome, ended.step


@pytest.mark.parametrize(
    ("drain", "seen_for_s", "ended"),
    [
        (LEAVES, 0.0, ("", None)),
        (LEAVES, POLICY.promise_s, ("uncommitted", None)),
        (PROMISED, POLICY.promise_s, ("", None)),
        (PROMISED, 99.9, ("", None)),
        (PROMISED, 100.0, ("expired", None)),
        (SAVED, 0.5, ("committed", 7)),
    ],
)
def test_a_launcher_waits_for_a_rank_that_has_promised_to_save(
    drain: Drain, seen_for_s: float, ended: tuple[str, int | None]
) -> None:
    assert outcome(drain, seen_for_s) == ended


def test_a_launcher_does_not_wait_for_a_promise_once_all_workers_have_gone() -> None:
    """As where the whole job is deleted, and its workers have less time than the launcher."""
    assert outcome(PROMISED, 1.0, members="l") == ("", None)
    assert outcome(PROMISED, POLICY.promise_s, members="l") == ("uncommitted", None)
    assert outcome(PROMISED, POLICY.promise_s, members="lb") == ("", None), "b may take it over"
    assert outcome(SAVED, POLICY.promise_s, members="l") == ("committed", 7)


@pytest.mark.parametrize(
    ("drain", "members", "saver", "answers", "said"),
    [
        (LEAVES, "lab", False, [], None),
        (LEAVES, "lab", True, [], PROMISED),
        (PROMISED, "lab", True, [], None),
        (replace(LEAVES, saver="b"), "la", True, [], PROMISED),  # b is gone
        (PROMISED, "lab", True, [(39, 6)], None),  # for another launcher
        (PROMISED, "lab", True, [(40, 7)], SAVED),
        (LEAVES, "lab", True, [(40, 7)], SAVED),
        (SAVED, "lab", True, [(40, 7)], None),
        (replace(LEAVES, outcome="expired"), "lab", True, [(40, 7)], None),
    ],
)
def test_a_pod_says_what_its_rank_does_about_it(
    drain: Drain, members: str, saver: bool, answers: list[tuple[int, int]], said: Drain | None
) -> None:
    assert answer(drain, "a", job(drain, members=members), saver=saver, answers=answers) == said


def test_only_a_present_launcher_asks() -> None:
    assert asked(job(WORKER_LEAVES, LEAVES)) == LEAVES
    assert asked(job(WORKER_LEAVES)) is None
    assert asked(job(LEAVES, members="ab")) is None
    assert asked(job(replace(LEAVES, pod_uid="uid-before"))) is None
    assert (ask_of(LEAVES), ask_of(None)) == (40, 0)


def test_a_launcher_asks_though_the_one_before_has_not_left_yet() -> None:
    before = replace(LEAVES, pod_uid="uid-k", member="k", outcome="committed", step=3)
    snapshot = job(before, LEAVES, members="klab")
    members = {**snapshot.members, "k": replace(snapshot.members["k"], role="launcher")}
    assert asked(replace(snapshot, members=members)) == LEAVES


def host(drain: Drain, *others: Drain, seen_for_s: float, commands: int | None = 1) -> Drain | None:
    """How the drain of ``a`` ends, with its ranks in it, by its own sidecar."""
    membership = job(drain, *others)
    listed = listing_of(membership)
    snapshot = DrainingSnapshot(membership, listed, None, {}, "uid-a", commands, revision=90)
    times = DrainObservations(due_s={"uid-a": 100.0}, own_since_s=0.0, own_ran=True)
    return decide(seen_for_s, snapshot, times, POLICY).drains.get("uid-a")


def test_if_all_hosts_make_room_one_rank_saves_and_all_go() -> None:
    first = replace(WORKER_LEAVES, preempted=True)
    last = replace(first, pod_uid="uid-b", member="b", created_revision=42)
    assert asked(job(first, last)) == last
    promised, saved = replace(last, saver="b"), replace(last, saver="b", step=7)
    assert host(first, promised, seen_for_s=99.0) is None
    assert host(first, saved, seen_for_s=0.5) == replace(first, outcome="committed", step=7)
    assert host(first, last, seen_for_s=POLICY.promise_s) == replace(first, outcome="uncommitted")
    # Others go on without it.
    assert host(first, seen_for_s=99.0) is None
    # A pod that comes for the other one gets the ranks' state handed over.
    assert host(first, replace(last, preempted=False), seen_for_s=99.0) is None


def test_a_promise_outlives_its_record() -> None:
    kv = KeyValue("/uid-l", SAVED.to_json(), 40, 50, 1, 0)
    assert Drain.from_kv(kv) == SAVED
    assert b"saver" not in LEAVES.to_json()


def test_a_rank_is_asked_by_its_gate_and_answers_by_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ProgressFile(str(tmp_path / "progress"), {})
    gate = GateFile(str(tmp_path))
    monkeypatch.setattr(muster.horovod, "own_file", lambda: file)
    monkeypatch.setattr(muster.horovod, "own_gate", lambda: gate)
    here = Here("a", "uid-a", None, ())

    def show(ask: int) -> None:
        move = local(
            here, commit=None, round=None, drain=None, vote=None, last_commit=None, ask=ask
        )
        assert move.gate == Gate(ask=ask)
        (tmp_path / "gate.part").write_bytes(move.gate.to_json())
        (tmp_path / "gate.part").replace(tmp_path / "gate.json")

    assert not muster.horovod.save_asked()
    muster.horovod.committed(4)
    file.write(5)
    (rank,) = read_ranks(tmp_path / "progress")
    assert (rank.saver, rank.answered) == (True, None)
    show(40)
    assert muster.horovod.save_asked()
    # It is let go on once the launcher is not to go any more.
    monkeypatch.setattr("muster.horovod.time.sleep", lambda _: show(0))
    muster.horovod.committed(6)
    (rank,) = read_ranks(tmp_path / "progress")
    assert (rank.answered, rank.step) == ((40, 6), 6)
    show(40)
    assert not muster.horovod.save_asked()  # once for each launcher


def test_a_rank_that_stays_is_known_to_save_after_a_reset_of_horovod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muster.progress, "_file", None)
    monkeypatch.setattr(muster.progress, "_looked", False)
    monkeypatch.setattr(muster.gate, "_gate", None)
    monkeypatch.setenv("MUSTER_RUN_DIR", str(tmp_path))
    (tmp_path / "gate.json").write_bytes(Gate().to_json())

    def told(step: int, rank: int, size: int) -> tuple[bool, tuple[int, int] | None]:
        muster.report_step(step, rank, size)
        (line,) = read_ranks(tmp_path / "progress")
        return line.saver, line.answered

    told(1, 0, 2)
    muster.horovod.save_asked()
    file = muster.progress.own_file()
    assert file is not None
    file.answered = (40, 2)
    assert told(3, 0, 2) == (True, (40, 2))
    assert told(4, 0, 1) == (True, (40, 2)), "a world that is smaller"
    assert told(5, 1, 2) == (False, (40, 2)), "another rank saves now"


@pytest.mark.parametrize(
    ("drains", "paused", "withdrawn"),
    [
        ((), False, False),
        ((LEAVES,), False, False),
        ((), True, True),  # as for a launcher that comes while the job is paused
        ((LEAVES,), True, False),  # the ranks are to save first
        ((replace(SAVED, outcome="committed"),), True, True),
    ],
)
def test_hosts_are_withdrawn_once_a_paused_job_has_saved(
    drains: Sequence[Drain], paused: bool, withdrawn: bool
) -> None:
    snapshot = job(*drains)
    assert snapshot.job is not None
    snapshot = replace(snapshot, job=replace(snapshot.job, paused=paused))
    members = {name: replace(one, version="0.2.0") for name, one in snapshot.members.items()}
    assert is_withdrawn(replace(snapshot, members=members)) == withdrawn
