# SPDX-License-Identifier: Apache-2.0
"""Three ways in which Horovod 0.28.1 fails a job whose hosts change, and their one cure.

Each happens to a real horovodrun that sees the host list without its ``rev-`` line, and to none
that sees it as the sidecar writes it. Without the line the tests hold what upstream does: one
that fails there tells that the line may no longer be needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.support.horovod.rig import HorovodJob, horovod_folder

HANGS_S = 15.0
"""A job that makes no step for so long hangs: normally, the first comes at once."""

StartJob = Callable[..., AbstractContextManager[HorovodJob]]


@pytest.fixture(scope="session")
def folder() -> str:
    return horovod_folder()


@pytest.fixture
def start_job(tmp_path: Path, folder: str) -> StartJob:
    @contextmanager
    def start(first: str, least: int, most: int, *, revisions: bool) -> Iterator[HorovodJob]:
        directory = tmp_path / "job"
        with HorovodJob(directory, folder, first, least, most, revisions=revisions) as job:
            job.until_world(first)
            yield job

    return start


def remove_one_while_another_joins(job: HorovodJob) -> None:
    """Of a and b, b is removed while all wait for c, which takes its time to start."""
    job.shut_gate("c")
    job.list("abc")
    job.until_at_the_gate("c")
    job.list("ac")
    job.until_looked()
    job.open_gate("c")


def replace_by_a_spare(job: HorovodJob, before: str, after: str) -> None:
    """Remove one of ``before``; a spare, listed all the time, takes its place."""
    job.list(before + after[-1])
    job.until_looked()
    job.list(after)


def fall_below_min_and_back(job: HorovodJob, rest: str, after: str) -> None:
    job.list(rest)
    job.until_still()
    job.list(after)


@pytest.mark.timeout(900)
def test_with_revisions_every_change_is_followed(start_job: StartJob) -> None:
    with start_job("ab", 2, 3, revisions=True) as job:
        remove_one_while_another_joins(job)
        job.until_world("ac")
        fall_below_min_and_back(job, "a", "ad")
        job.until_world("ad")
        job.list("ade")
        job.until_world("ade")
        replace_by_a_spare(job, "ade", "aef")
        job.until_world("aef")
        job.assert_nothing_lost_or_doubled()


@pytest.mark.timeout(400)
def test_without_revisions_a_spare_that_takes_over_is_waited_for_in_vain(
    start_job: StartJob,
) -> None:
    with start_job("ab", 1, 2, revisions=False) as job:
        replace_by_a_spare(job, "ab", "ac")
        job.until_joined("c")
        assert job.no_step_for(HANGS_S), job.last_words()
        assert not job.ended


@pytest.mark.long
@pytest.mark.timeout(400)
def test_without_revisions_one_that_joins_below_min_is_waited_for_in_vain(
    start_job: StartJob,
) -> None:
    with start_job("ab", 2, 3, revisions=False) as job:
        fall_below_min_and_back(job, "a", "ac")
        job.until_joined("c")
        assert job.no_step_for(HANGS_S), job.last_words()
        assert not job.ended


@pytest.mark.long
@pytest.mark.timeout(400)
def test_without_revisions_a_change_amid_a_reset_is_lost(start_job: StartJob) -> None:
    with start_job("ab", 1, 3, revisions=False) as job:
        remove_one_while_another_joins(job)
        job.until_world("abc")
        job.until_looked(10)
        assert not job.no_step_for(1.0)
        job.until_world("abc", 60.0)
        job.assert_nothing_lost_or_doubled()
