# SPDX-License-Identifier: Apache-2.0
"""Launch lines as people write them, in real jobs: the table of docs/launchers.md.

``scripts/launchers-table --run`` puts on record what comes of them.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.support.launchers.life import living, outcomes
from tests.support.launchers.page import record, recorded
from tests.support.launchers.rows import ROWS, Row
from tests.support.training.job import DRAINED_STATUS, RunJob

pytestmark = [pytest.mark.torch, pytest.mark.timeout(3600)]

WAYS = (
    "`torchrun`, static flags",
    "`torchrun --standalone`",
    "`torchrun` by its path",
    "`accelerate launch`",
    "`elastic_launch` from Python",
)
"""Plain ``torchrun`` is in every test of ``muster local``, ``python -m`` in all other drills."""


def test_pods_that_are_started_in_other_ways_train_together_and_are_drained_at_once(
    run_job: RunJob, embedded: list[str]
) -> None:
    rows = {row.name: replace(row, library="") for row in ROWS}
    ways = [rows[name] for name in WAYS]
    waits = {"MUSTER_GATHER": "120s"}
    with living(ways, run_job, embedded, most=len(ways), sidecar_environ=waits) as life:
        life.grow(len(ways))
        job = life.job
        *leavers, _ = job.nodes.values()
        with job.saves_held():
            for node in leavers:
                job.sigterm(node)
            job.all_noted(leavers)
        assert {job.released(node).outcome for node in leavers} == {"committed"}
        assert {job.gone(node) for node in leavers} == {DRAINED_STATUS}
        life.steps(1)
        assert life.cost() == 0


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row(run_job: RunJob, embedded: list[str], row: Row) -> None:
    found = outcomes(row, run_job, embedded)
    if os.environ.get("MUSTER_TEST_RECORD"):
        record(row, found)
    assert recorded()["rows"].get(row.name) == found
    assert [column for column, came in found.items() if came.startswith("fails")] == []
