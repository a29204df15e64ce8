# SPDX-License-Identifier: Apache-2.0
"""A job that is created again: what of its former life counts; the mark of its newest world."""

from __future__ import annotations

import logging
import os
import re
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import muster
import muster.gate
import muster.progress
from console.job.by_hand import forgetting
from muster import resuming
from muster.resuming import (
    ALONE,
    ROUNDS_PER_LIFE,
    LaterWorld,
    WorldMark,
    is_left_behind,
    mark,
    marked,
    world_tag,
)
from muster.saved_steps import CommittedStep
from rdzv.drain.decision import decide
from rdzv.drain.gate import Gate
from rdzv.drain.inputs import DrainingSnapshot, DrainObservations, DrainPolicy, LiveRound
from rdzv.drain.transactions import transaction
from rdzv.keys import JobKeys
from rdzv.records.drain import NO_CURSOR, Commit, Drain, LastCommit, Vote
from rdzv.records.job import HistoryEntry, Job
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import Snapshot, listing_of
from rdzv.store import Compare, Delete, GuardedWrites, KeyValue, Operation, Put
from tests.support.records import member
from tests.support.sidecars.pod_gate import PodGate

KEYS = JobKeys("team", "digits")
MASTER = "10.0.0.7:40123"
LAST = LastCommit(60, 0, 1)
TAG = world_tag("job", 0, "10.0.0.7:40122")


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PodGate:
    """A pod whose rank this process is."""
    environ = {"TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "40123"}
    for name, value in {**environ, "MUSTER_RUN_DIR": str(tmp_path / "run")}.items():
        monkeypatch.setenv(name, value)
    for module, name in ((muster.progress, "_file"), (muster.gate, "_gate")):
        monkeypatch.setattr(module, name, None)
    monkeypatch.setattr(muster.progress, "_looked", False)
    return PodGate(tmp_path / "run", MASTER)


def show(pod: PodGate, last: LastCommit | None, *, of_former_life: bool = False) -> None:
    pod.show(Gate(run="job", master=MASTER, last_commit=last, of_former_life=of_former_life))


# --- what a script is told ---


def test_a_new_life_without_checkpoint_trains(
    pod: PodGate, caplog: pytest.LogCaptureFixture
) -> None:
    show(pod, LAST, of_former_life=True)
    with caplog.at_level(logging.WARNING):
        assert resuming.check_start(0, "/new") == 0
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == (
        "an earlier job of this name committed step 60, but there is no checkpoint in /new: this"
        " job trains from scratch; to resume from step 60 instead, give it the checkpoint directory"
        " of the earlier job"
    )


def test_a_new_life_resumes_from_its_own(pod: PodGate, caplog: pytest.LogCaptureFixture) -> None:
    show(pod, LAST, of_former_life=True)
    assert resuming.check_start(20, "/new") == 20
    assert "is of step 20: this job resumes from that one" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("tag", "former", "saved", "start"),
    [
        (TAG, False, [f"{TAG}-60.pt", "61.pt"], 60),
        ("", False, ["40.pt", "60.pt"], 60),
        (TAG, True, [], 0),
        (TAG, True, ["20.pt"], 20),
    ],
    ids=["tagged", "saved-by-a-script-of-0.1", "another-directory", "own-periodic-save"],
)
def test_the_loop_of_the_page_of_training_resumes(
    pod: PodGate, tmp_path: Path, tag: str, former: bool, saved: list[str], start: int
) -> None:
    for at, name in enumerate(saved):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (at, at))
    show(pod, replace(LAST, tag=tag), of_former_life=former)
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    code = re.search(r"## A loop of your own\n\n((?:    .*\n|\n)+?)    with ", page)
    assert code is not None

    def load(path: str | Path) -> int:
        Path(path).read_bytes()
        return int(Path(path).stem.rpartition("-")[2])

    names: dict[str, Any] = {"load": load}
    exec(textwrap.dedent(code[1]).replace("/shared", str(tmp_path)), names)
    assert names["start"] == start


def test_the_same_directory_goes_on(pod: PodGate, caplog: pytest.LogCaptureFixture) -> None:
    for former in (True, False):
        show(pod, LAST, of_former_life=former)
        assert muster.last_commit() == 60
        for step in (60, 61):
            assert resuming.check_start(step, "/same") == step
    assert caplog.records == []


@pytest.mark.parametrize(
    ("step", "found"),
    [(0, "there is no checkpoint in /ck"), (20, "the newest checkpoint in /ck is of step 20")],
)
def test_a_missing_checkpoint_has_causes_and_remedies(pod: PodGate, step: int, found: str) -> None:
    show(pod, LAST)
    with pytest.raises(muster.CheckpointMissing) as caught:
        resuming.check_start(step, Path("/ck"))
    assert str(caught.value) == (
        f"all ranks of this job have saved step 60, and {found}: either it is not the directory"
        " that all pods share, or it was emptied to train from scratch; share it, or run `muster"
        " forget` for this job and start it again; see docs/operations.md#a-job-is-created-again"
    )


def test_where_nothing_was_saved_or_it_is_forgotten_any_start_will_do(pod: PodGate) -> None:
    show(pod, None)
    assert resuming.check_start(0, "/ck") == 0


@pytest.mark.parametrize("step", [1, 59])
def test_a_loop_that_begins_before_the_last_commit_is_refused(pod: PodGate, step: int) -> None:
    show(pod, LAST)
    with muster.drain() as drain, pytest.raises(muster.CheckpointMissing) as caught:
        drain.commit_due(step)
    assert str(caught.value) == (
        f"all ranks of this job have saved step 60, and training begins at step {step}: load its"
        " checkpoint, and give its step to muster.drain(start=); to train from scratch, run `muster"
        " forget` for this job and start it again"
    )


def test_a_loop_may_precede_a_former_life(pod: PodGate, caplog: pytest.LogCaptureFixture) -> None:
    show(pod, LAST, of_former_life=True)
    with muster.drain() as drain:
        for step in (1, 2, 3):
            assert not drain.commit_due(step)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("an earlier job of this name committed step 60, and this job trains")


def test_a_loop_may_begin_at_the_last_commit(
    pod: PodGate, caplog: pytest.LogCaptureFixture
) -> None:
    """It has trained nothing there; the same number after a step is said."""
    show(pod, LAST)
    with muster.drain() as drain:
        for step in (60, 61):
            assert not drain.commit_due(step)
    assert "begin at step 61" in caplog.text


def test_only_the_first_loop_of_a_process_is_checked(pod: PodGate) -> None:
    show(pod, LAST)
    for first in (61, 1):
        with muster.drain() as drain:
            drain.commit_due(first)
            with pytest.raises(ValueError, match="steps must grow"):
                drain.commit_due(first)


def test_with_muster_checks_warn_it_is_logged(
    pod: PodGate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    show(pod, LAST)
    monkeypatch.setenv("MUSTER_CHECKS", "warn")
    with muster.drain() as drain:
        assert not drain.commit_due(1)
        assert not drain.commit_due(2)
    assert "training begins at step 1" in caplog.text


# --- what is on record ---


def test_a_last_commit_names_the_job_that_made_it() -> None:
    members = {name: member(name, at) for at, name in enumerate("ab", 1)}
    saved = {name: Vote(5, 3, f"uid-{name}", 10, acked=10) for name in "ab"}
    membership = Snapshot(
        90,
        Job(JobPolicy(1, 4), uid="uid-of-the-job", mod_revision=7),
        members,
        drains={"uid-a": Drain("uid-a", "a", "spot", "sigterm", mod_revision=50)},
        commit=Commit(5, "run", 3, "commit", 10, leaving=("uid-a",), mod_revision=60),
    )
    live = LiveRound("run", 3, True, ("a", "b"), master=MASTER, mod_revision=70)
    snapshot = DrainingSnapshot(
        membership, listing_of(membership), live, saved, "uid-b", None, revision=90
    )
    decision = decide(
        1000.0, snapshot, DrainObservations(5, "commit", 990.0, 990.0, {}), DrainPolicy()
    )
    _, operations = transaction(KEYS, snapshot, decision)
    expected = LastCommit(
        10, 3, 5, job_uid="uid-of-the-job", run="run", samples=NO_CURSOR, mod_revision=1
    )
    assert written(operations) == expected


def written(operations: list[Operation]) -> LastCommit:
    (put,) = [one for one in operations if isinstance(one, Put) and one.key == KEYS.last_commit]
    return LastCommit.from_kv(KeyValue(put.key, put.value, 1, 1, 1, 0))


def forgotten(**stored: Any) -> GuardedWrites | None:
    return forgetting(KEYS, Snapshot(40, Job(JobPolicy(1, 2)), **stored), "ada@host", 5.0, [])


def test_forgetting_keeps_the_epoch_and_is_in_the_history() -> None:
    planned = forgotten(last_commit=LastCommit(60, 2, 7, job_uid="uid", mod_revision=33))
    assert planned is not None
    compares, operations = planned
    assert compares == [Compare(KEYS.last_commit, "mod", "=", 33)]
    assert written(operations) == LastCommit(60, 2, 7, "uid", forgotten=True, mod_revision=1)
    (entry,) = [one for one in operations if isinstance(one, Put) and "/history/" in one.key]
    told = HistoryEntry.from_kv(KeyValue(entry.key, entry.value, 1, 1, 1, 0))
    assert (told.what, told.member) == ("forget", "ada@host")
    assert told.why == "the last commit, step 60, is forgotten"


def test_what_cannot_be_read_is_forgotten_and_nothing_twice() -> None:
    planned = forgotten(corrupt={KEYS.last_commit: "not JSON"})
    assert planned is not None
    # A commit that has been made since is not what was asked to be forgotten.
    assert planned[0] == [Compare(KEYS.last_commit, "mod", "<", 41)]
    assert planned[1][0] == Delete(KEYS.last_commit)
    assert forgotten(last_commit=LastCommit(60, 2, 7, forgotten=True)) is None
    assert forgotten() is None


Make = Callable[..., WorldMark]
EARLIER, LATER = world_tag("job", 3, "a:1"), world_tag("job", 4, "b:1")


@pytest.fixture
def world(tmp_path: Path) -> Make:
    def make(*tags: str, marks: bool = True) -> WorldMark:
        """Each call of ``save_tag()`` gives the next of ``tags``, and then the last of them."""
        left = [*tags]
        tag = lambda: left.pop(0) if len(left) > 1 else left[0]  # noqa: E731
        return WorldMark(str(tmp_path / "out"), marks=marks, tag=tag)

    return make


def test_i1_a_world_saves_no_more_once_a_later_one_has_begun(tmp_path: Path, world: Make) -> None:
    earlier, later = world(EARLIER), world(LATER)
    earlier.begin()
    earlier.check()
    later.begin()
    later.check()
    with pytest.raises(LaterWorld, match=f"{LATER}.*{EARLIER}.*cut off"):
        earlier.check()
    with pytest.raises(LaterWorld):
        world(EARLIER, marks=False).check()
    assert marked(str(tmp_path / "out")) == LATER


def test_an_earlier_world_that_begins_late_stops_itself(tmp_path: Path, world: Make) -> None:
    """As its ranks take longer to load: the later world does not stop for it."""
    earlier, later = world(EARLIER), world(LATER)
    later.begin()
    earlier.begin()
    later.check()
    with pytest.raises(LaterWorld):
        earlier.check()


def test_what_another_store_has_left_stops_no_world(tmp_path: Path, world: Make) -> None:
    """Rounds of a store that was emptied count from 0."""
    world(LATER).begin()
    fresh = world(EARLIER)
    fresh.begin()
    fresh.check()
    assert marked(str(tmp_path / "out")) == EARLIER


def test_a_rank_whose_round_is_unknown_neither_marks_nor_stops(tmp_path: Path, world: Make) -> None:
    world(ALONE).begin()
    assert not (tmp_path / "out").exists()
    world(LATER).begin()
    world(ALONE).check()


def test_i1_a_round_confirmed_late_is_guarded_from_then_on(tmp_path: Path, world: Make) -> None:
    late = world(ALONE, EARLIER)
    late.begin()
    assert not (tmp_path / "out").exists()
    late.check()
    assert marked(str(tmp_path / "out")) == EARLIER
    world(LATER).begin()
    with pytest.raises(LaterWorld, match=f"{LATER}.*{EARLIER}"):
        late.check()


def test_what_cannot_be_marked_can_be_trained(
    tmp_path: Path, world: Make, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "out").write_text("a file")
    world(LATER).begin()
    world(LATER).check()
    assert "cannot write which world saves to" in caplog.text
    mark(str(tmp_path), "no tag")
    assert marked(str(tmp_path)) == ""


@pytest.mark.parametrize(
    ("step", "tag", "behind"),
    [
        (40, EARLIER, False),
        (41, EARLIER, True),
        (41, LATER, False),
        (41, world_tag("job", 5, "c:1"), False),
        (41, "", False),
    ],
)
def test_later_steps_of_an_earlier_world_are_left_behind(step: int, tag: str, behind: bool) -> None:
    assert is_left_behind(step, tag, CommittedStep(40, tag=LATER)) is behind
    assert not is_left_behind(step, tag, CommittedStep(40))
    assert not is_left_behind(step, tag, CommittedStep(40, tag=LATER, of_former_life=True))
    assert not is_left_behind(step, tag, None)


def test_a_tag_of_another_life_leaves_no_checkpoint_behind() -> None:
    """As in a directory that another job has left to this one."""
    this_life = world_tag("job", ROUNDS_PER_LIFE, "b:1")
    assert this_life > EARLIER
    assert not is_left_behind(800, EARLIER, CommittedStep(500, tag=this_life))
