# SPDX-License-Identifier: Apache-2.0
"""Kubeflow's training-operator, unmodified: an elastic PyTorchJob with Muster."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar_image.image import sidecar_archive
from tests.support.cluster.drills import STEPS_BETWEEN, Act, befall, scale_down, scale_up
from tests.support.cluster.lab import Kubelab
from tests.support.cluster.operator_job import ElasticPyTorchJob, OperatorJob, delete_worker_0

pytestmark = [
    pytest.mark.kubelab,
    pytest.mark.long,
    pytest.mark.timeout(2400),
]

WORKLOAD = ElasticPyTorchJob(replicas=2, least=1, most=3, grace_s=180)
ACTS: dict[str, Act] = {
    "replicas 2 to 3": scale_up,
    "replicas 3 to 2": scale_down,
    "worker-0 deleted": delete_worker_0,
}


def test_replicas_follow_and_nothing_is_lost(operator: Kubelab, tmp_path: Path) -> None:
    operator.command("load", str(sidecar_archive()), timeout_s=300)
    rows = {}
    with OperatorJob(operator, tmp_path, WORKLOAD, muster=True) as job:
        world = job.world_of(WORKLOAD.replicas)
        job.goes_on(world, STEPS_BETWEEN)
        for name, act in ACTS.items():
            rows[name] = befall(job, job.steps.worlds()[-1], act)
        assert job.conditions()["Running"] == "True"
        assert "Failed" not in job.conditions()
    for row in rows.values():
        assert (row.lost, row.twice, row.went_on) == (0, 0, True)
