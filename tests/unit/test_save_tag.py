# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the tag and the mark of their world, and what proves a file whole."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import muster.gate
from agent.rundir.reports import read_ranks
from muster.lightning_files import step_in, whole_step
from muster.lightning_loops import recount
from muster.resuming import ALONE, FIRST, TAG, save_tag, world_tag
from rdzv.drain.gate import Gate, Here, local
from rdzv.drain.inputs import LiveRound
from rdzv.records.codec import TAG as STORED
from rdzv.records.drain import Commit, LastCommit, Vote
from rdzv.records.job import ROUNDS_PER_LIFE
from tests.support.sidecars.pod_gate import PodGate, forget_sidecar

MASTER = "10.0.0.7:40123"
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "40123",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
}
SHOWN = Gate(run="job", round=ROUNDS_PER_LIFE + 12, master=MASTER)
OWN = world_tag("job", ROUNDS_PER_LIFE + 12, MASTER)


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PodGate:
    """A pod with a sidecar, whose one rank is this process."""
    pod = PodGate(tmp_path, MASTER)
    (tmp_path / "env").write_text("")
    pod.be_rank(monkeypatch, **TORCHRUN)
    monkeypatch.setattr(muster.gate, "OWN_ROUND_WAIT_S", 0.02)
    return pod


def test_rounds_of_a_life_are_counted_alike() -> None:
    assert muster.resuming.ROUNDS_PER_LIFE == ROUNDS_PER_LIFE


@given(st.integers(0, 10**9), st.text(max_size=20), st.integers(0, 10**9), st.text(max_size=20))
def test_tags_sort_as_rounds_and_fit_a_path(one: int, run: str, two: int, master: str) -> None:
    tags = world_tag(run, one, master), world_tag(run, two, master)
    places = [tag[: -len("-8f3a1c2d9b")] for tag in tags]
    assert (places[0] < places[1]) == (one < two)
    for tag in tags:
        assert TAG.fullmatch(tag)
        assert STORED.fullmatch(tag)
        assert len(tag) <= 40
        assert tag > ALONE


def test_worlds_of_one_number_have_tags_of_their_own() -> None:
    """As after a restore of the store; two at once never meet at one address."""
    assert world_tag("job", 3, "10.0.0.7:1") != world_tag("job", 3, "10.0.0.8:1")
    assert world_tag("job", 3, MASTER) != world_tag("job#2", 3, MASTER)


def test_without_a_sidecar_the_tag_is_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUSTER_RUN_DIR", raising=False)
    forget_sidecar(monkeypatch)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert save_tag() == save_tag() == ALONE
    assert TAG.fullmatch(ALONE)


def test_a_rank_has_the_tag_of_its_round(pod: PodGate) -> None:
    pod.show(SHOWN)
    assert save_tag() == OWN
    pod.show(replace(SHOWN, round=SHOWN.round + 1, master="10.0.0.8:1"))
    assert save_tag() == OWN, "the process is still of the former round"


def test_a_round_that_no_sidecar_confirms_has_the_first_of_tags(pod: PodGate) -> None:
    pod.show(replace(SHOWN, master="10.0.0.8:1"))
    unconfirmed = save_tag()
    assert ALONE < unconfirmed < FIRST < OWN
    assert TAG.fullmatch(unconfirmed)


def test_what_was_saved_under_another_tag_is_reported_no_more(pod: PodGate) -> None:
    with muster.drain() as drain:
        drain.commit_due(1)
        save_tag()
        drain.committed(1)
        assert read_ranks(pod.run_dir / "progress")[0].saved == (1,)
        pod.show(SHOWN)
        drain.commit_due(2)
        assert save_tag() == OWN
        drain.committed(2)
        (rank,) = read_ranks(pod.run_dir / "progress")
    assert (rank.saved, rank.tag) == ((2,), OWN)


def test_horovods_worlds_differ_by_their_driver(
    pod: PodGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "10.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1234")
    tag = save_tag()
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1235")
    assert ALONE < save_tag() < FIRST
    assert save_tag() != tag


def test_a_save_is_on_record_with_its_tag(pod: PodGate) -> None:
    pod.show(SHOWN)
    with muster.drain() as drain:
        drain.commit_due(1)
        assert read_ranks(pod.run_dir / "progress")[0].tag == "", "it has asked for none"
        pod.show(replace(SHOWN, epoch=4, phase="commit", step=2))
        assert drain.commit_due(2)
        save_tag()
        pod.show(SHOWN)
        drain.committed(2)
    ranks = read_ranks(pod.run_dir / "progress")
    here = Here("a", "uid-a", replace(SHOWN, epoch=4, phase="commit", step=2), ranks)
    acked = replace(ranks[0], acked=(4, 2), drain=True, local_world_size=1)
    move = local(
        replace(here, ranks=(acked,)),
        commit=Commit(4, "job", SHOWN.round, "commit", 2),
        round=LiveRound("job", SHOWN.round, True, ("a", "b"), master=MASTER),
        drain=None,
        vote=Vote(4, SHOWN.round, "uid-a", 2, mod_revision=9),
        last_commit=None,
    )
    assert move.vote is not None, move.reason
    assert (move.vote.acked, move.vote.tag) == (2, OWN)


def test_a_new_world_finds_the_tag_of_the_last_commit(pod: PodGate) -> None:
    tag = world_tag("job", 11, MASTER)
    pod.show(replace(SHOWN, last_commit=LastCommit(40, 11, 3, tag=tag)))
    committed = muster.last_commit()
    assert committed == 40
    assert committed is not None
    assert committed.tag == tag
    pod.show(replace(SHOWN, last_commit=LastCommit(41, 11, 3)))
    committed = muster.last_commit()
    assert committed is not None
    assert committed.tag == ""


WEIGHTS = bytes(range(256)) * 64


def archive(state: Any, *, name: str = "archive/data.pkl") -> bytes:
    """A checkpoint as ``torch.save`` lays it out: a description, weights, a table of contents."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as parts:
        parts.writestr(name, pickle.dumps(state, protocol=2))
        parts.writestr("archive/data/0", WEIGHTS)
    return content.getvalue()


WHOLE = archive(OrderedDict(epoch=3, global_step=70_000, state_dict={"w": [1, 2]}))


def step_of(path: Path, content: bytes) -> int | None:
    path.write_bytes(content)
    return whole_step(str(path))


def test_a_whole_file_tells_its_step(tmp_path: Path) -> None:
    assert step_of(tmp_path / "a.ckpt", WHOLE) == 70_000


@pytest.mark.parametrize("length", [0, 1, 100, len(WHOLE) // 2, len(WHOLE) - 1])
def test_a_file_that_was_cut_short_is_not_whole(tmp_path: Path, length: int) -> None:
    assert step_of(tmp_path / "a.ckpt", WHOLE[:length]) is None


def test_a_file_whose_end_was_written_before_its_middle_is_not_whole(tmp_path: Path) -> None:
    for hole in (0, WHOLE.index(b"archive/data/0") - 30):
        torn = WHOLE[:hole] + bytes(64) + WHOLE[hole + 64 :]
        assert step_of(tmp_path / "a.ckpt", torn) is None


def test_what_describes_the_rest_must_be_unharmed(tmp_path: Path) -> None:
    at = WHOLE.index(b"state_dict")
    assert step_of(tmp_path / "a.ckpt", WHOLE[:at] + b"X" + WHOLE[at + 1 :]) is None


@pytest.mark.parametrize(
    "content", [b"text", archive({"epoch": 3}), archive({"global_step": 7}, name="archive/other")]
)
def test_a_file_of_another_kind_has_no_step(tmp_path: Path, content: bytes) -> None:
    assert step_of(tmp_path / "a.ckpt", content) is None


def test_what_is_no_file_is_not_whole(tmp_path: Path) -> None:
    assert whole_step(str(tmp_path)) is None
    assert whole_step(str(tmp_path / "absent")) is None


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("step", [0, 255, 65_536, 2**40])
def test_the_step_is_read_and_nothing_is_run(protocol: int, step: int) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("it was run",)

    state = {"other": "global", "before": Harm(), "global_step": step, "after": 3}
    assert step_in(pickle.dumps(state, protocol)) == step


def test_another_number_is_not_taken_for_the_step() -> None:
    assert step_in(pickle.dumps({"a": "global_step", "global_step": "text", "n": 5})) is None
    with pytest.raises(ValueError, match="pickle"):
        step_in(b"")


@pytest.mark.parametrize(
    ("ready", "completed", "former", "present", "expected"),
    [
        (8, 7, 4, 2, (4, 3)),  # at the end of a step, as the callback saves
        (8, 8, 4, 2, (4, 4)),
        (9, 8, 4, 2, (4, 3)),  # a checkpoint by the clock, in the middle of a step
        (3, 2, 4, 2, (0, -1)),
        (6, 6, 1, 3, (18, 18)),
    ],
)
def test_a_step_that_was_not_complete_is_none(
    ready: int, completed: int, former: int, present: int, expected: tuple[int, int]
) -> None:
    counts = {"ready": ready, "started": ready, "processed": ready, "completed": completed}
    progress = {"current": dict(counts), "total": dict(counts)}
    recount({"loops": {"fit_loop": {"epoch_loop.batch_progress": progress}}}, former, present)
    for counted in progress.values():
        assert (counted["ready"], counted["completed"]) == expected
