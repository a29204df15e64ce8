# SPDX-License-Identifier: Apache-2.0
"""What the drills share: a failed one shows the timeline of its jobs."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rdzv.store.memory.server import EmbeddedServer
from tests.support.cluster.fixtures import kubelab as kubelab
from tests.support.cluster.fixtures import monitoring as monitoring
from tests.support.cluster.fixtures import operator as operator
from tests.support.cluster.fixtures import sidecar_in_lab as sidecar_in_lab
from tests.support.training.background import Background
from tests.support.training.job import Job, RunJob
from tests.support.training.local import start as start

_jobs: list[Job] = []
_ended: list[tuple[str, str]] = []
"""Name and timeline of each job that ended within the present test."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "setup":
        _ended.clear()
    if report.failed:
        told = [*_ended, *((job.name, job.timeline()) for job in _jobs)]
        report.sections += [(f"timeline of {name}", timeline) for name, timeline in told]
    return report


@pytest.fixture(scope="session")
def background() -> Iterator[Background]:
    with Background() as background:
        yield background


@pytest.fixture(scope="session")
def run_job(tmp_path_factory: pytest.TempPathFactory, background: Background) -> RunJob:
    """Make jobs: ``with run_job(endpoints, ...) as job``; nothing of one outlives its block."""

    @contextmanager
    def run(endpoints: list[str], **settings: Any) -> Iterator[Job]:
        job = Job(tmp_path_factory.mktemp("job"), background, endpoints, **settings)
        _jobs.append(job)
        try:
            yield job
        finally:
            _jobs.remove(job)
            _ended.append((job.name, job.timeline()))
            job.end()

    return run


@pytest.fixture(scope="session")
def embedded(background: Background) -> Iterator[list[str]]:
    """Endpoints of an embedded store."""
    server = EmbeddedServer()
    background.run(server.__aenter__())
    yield [server.endpoint]
    background.run(server.__aexit__(None, None, None))
