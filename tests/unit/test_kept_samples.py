# SPDX-License-Identifier: Apache-2.0
"""The verdict on samples that goes with each commit: kept, or not kept and why."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.rundir.reports import read_ranks
from agent.verdict.last_save import LastSave
from muster import process, saved_steps
from muster.data import ElasticSampler
from muster.progress import BLOCK_BYTES, ProgressFile
from muster.resuming import world_tag
from muster.saved_steps import CommittedStep, SavedSteps, encode
from rdzv.drain.gate import Gate, Here, local
from rdzv.drain.saves import samples_of
from rdzv.records.drain import NO_CURSOR, NO_VERDICT, LastCommit, verdict
from rdzv.records.progress import PodSaves
from tests.support.commits import (
    HERE,
    MASTER,
    ROUND,
    SAVE,
    last_of,
    periodic,
    rank,
    saves_of_pod,
    vote,
)

WITHOUT_FOLLOW = "not kept: batches were taken without sampler.follow(loader)"
BY_STEPS = "not kept: the place follows from the number of steps"
STOOD = "not kept: the data cursor is the one of step 2"


@pytest.fixture(autouse=True)
def no_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_steps, "listeners", [])


def sampler_of() -> ElasticSampler:
    return ElasticSampler(120, 3, global_batch=12, rank=0, world_size=1)


def followed() -> Iterator[Any]:
    sampler = sampler_of()
    for _ in sampler.follow(sampler):
        yield sampler.cursor


def without_follow() -> Iterator[Any]:
    sampler = sampler_of()
    for _ in sampler:
        yield sampler.cursor


def adopted() -> Iterator[Any]:
    sampler = sampler_of()
    sampler.go_to_step(3)
    while True:
        for _ in sampler.follow(sampler):
            yield sampler.cursor


def of_a_wrong_loader() -> Iterator[Any]:
    process.refuse(ValueError("the loader has another batch sampler"))
    yield from followed()


def with_shards() -> Iterator[Any]:
    saved_steps.listeners.append(saved_steps.Listener(lambda step: None, lambda step: ""))
    yield from iter([None] * 9)


@pytest.mark.parametrize(
    ("script", "verdicts"),
    [
        (followed, ["kept"] * 4),
        (with_shards, ["kept"] * 4),
        (lambda: iter([None] * 9), [NO_CURSOR] * 4),
        (lambda: iter([{"rows": 0}] * 9), ["kept", *[STOOD] * 3]),
        (lambda: iter([1, 1, 2, 2, 3, 3, 3, 4]), ["kept"] * 4),
        (without_follow, [WITHOUT_FOLLOW] * 4),
        (adopted, [*[BY_STEPS] * 3, "kept"]),
        (of_a_wrong_loader,
         ["not kept: MUSTER_CHECKS=warn: the loader has another batch sampler"] * 4),
    ],
    ids=["followed", "shards", "no cursor", "stands still", "own cursor", "without follow",
         "adopted by its steps", "a check passed over"],
)  # fmt: skip
def test_i12_each_save_says_whether_it_keeps_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    script: Callable[[], Iterator[Any]], verdicts: list[str],
) -> None:  # fmt: skip
    """A step a batch, a save every second step; through the progress file to the commit."""
    monkeypatch.setenv("MUSTER_CHECKS", "warn")
    file = ProgressFile(str(tmp_path), {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
                                        "TORCHELASTIC_RUN_ID": "run"})  # fmt: skip
    found: list[str] = []
    for step, cursor in enumerate(script(), 1):
        if step % 2 == 0 and len(found) < len(verdicts):
            file.saved.add(step, encode(cursor, step))
            file.write(step, drain=True, acked=(5, step))
            (told,) = read_ranks(tmp_path)
            assert told.saved[0] == step
            shown = Gate(5, "run", 3, MASTER, "commit", step)
            here = Here("a", "uid-a", shown, (told,))
            commit = replace(SAVE, step=step)
            own = replace(vote("a", ""), acked=None)
            move = local(here, commit=commit, round=ROUND, drain=None, vote=own, last_commit=None)
            assert move.vote is not None
            found.append(verdict(move.vote.samples, move.vote.cursor))
        if len(found) == len(verdicts):
            break
    assert found == verdicts
    assert (tmp_path / "0.json").stat().st_size <= 2 * BLOCK_BYTES


def test_a_save_that_does_not_keep_the_samples_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = SavedSteps()
    with caplog.at_level(logging.WARNING):
        for step in (2, 4, 6):
            saved.add(step, HERE)
    (said,) = caplog.records
    assert said.getMessage() == f"samples of the save of step 4: {STOOD}"
    assert saved.named[0] == 6
    assert 2 not in saved.named, "it has another verdict"


@pytest.mark.parametrize(("former", "kept"), [(False, STOOD), (True, "kept")])
def test_a_cursor_that_stands_still_over_a_change_of_the_world_is_seen(
    former: bool, kept: str
) -> None:
    saved = SavedSteps()
    saved.go_on_from(CommittedStep(2, {"samples": 640}, of_former_life=former))
    saved.add(4, HERE)
    assert saved.samples == kept


def test_a_cursor_that_is_given_in_a_second_call_decides() -> None:
    saved = SavedSteps()
    saved.add(2)
    assert saved.samples == ""
    saved.add(2, HERE)
    assert (saved.samples, saved.named) == ("kept", (2,))


def test_the_longest_line_has_the_length_of_the_first(tmp_path: Path) -> None:
    """Otherwise the end of it would stay behind the next one."""
    most, environ = 10**18, {"RANK": "99999", "LOCAL_RANK": "7", "TORCHELASTIC_RUN_ID": "j"}
    file = ProgressFile(str(tmp_path), {**environ, "MASTER_ADDR": "h" * 253})
    file.write(1)
    first = (tmp_path / "7.json").stat().st_size
    file.take_tag(world_tag("job", most, file.rank.master))
    file.saver, file.page, file.answered = True, True, (most, most)
    for step in range(most, most + 99):
        file.saved.add(step, encode({"unkept": 'as "long" \\ as\n' * 9, "at": step}, step))
        file.write(step, True, False, most, (most, step), (most, "why" * 999), away=True)
        (told,) = read_ranks(tmp_path)
        assert told.samples.startswith("not kept: as 'long' ? as ")
        assert (told.tag, (tmp_path / "7.json").stat().st_size) == (file.tag, first)


def test_what_ranks_say_together() -> None:
    assert samples_of(["", "kept", ""]) == "kept", "rank 0 alone gives a cursor"
    assert samples_of(["kept", "not kept: b", "not kept: a", ""]) == "not kept: a"
    assert samples_of(["", ""]) == ""
    assert verdict("", "") == NO_CURSOR
    assert verdict("", HERE) == NO_VERDICT


@pytest.mark.parametrize(
    ("other", "samples"), [("kept", "kept"), ("", "kept"), (STOOD, STOOD), (None, NO_CURSOR)]
)
def test_i12_a_save_has_the_verdict_of_all_its_ranks(other: str | None, samples: str) -> None:
    def pod(name: str, samples: str) -> PodSaves:
        return PodSaves(name, f"uid-{name}", "run", 3, (20,), 20, cursors=(HERE,), samples=samples)

    if other is None:
        assert last_of(vote("a", ""), vote("b", "")).samples == samples
        return
    own = replace(vote("a", HERE, 0), samples="kept")
    assert last_of(own, replace(vote("b", HERE, 1), samples=other)).samples == samples
    assert periodic(pod("a", "kept"), pod("b", other)).samples == samples
    ranks = replace(rank(0, HERE), samples="kept"), replace(rank(1, HERE), samples=other)
    assert saves_of_pod(*ranks).samples == samples


def test_a_record_of_an_older_sidecar_has_a_verdict_as_well() -> None:
    fields = json.loads(LastCommit(10, 3, 5, samples="kept").to_json())
    assert fields["samples"] == "kept"
    old = LastSave(10, samples=verdict("", ""))
    assert old.sentence(0.0).endswith(f"; samples: {NO_CURSOR}")
    assert old.as_json()["samples"] == NO_CURSOR
    assert "samples" not in LastSave(None, seen_step=3).sentence(0.0)
