# SPDX-License-Identifier: Apache-2.0
"""Kubeflow's training-operator, unmodified: an elastic PyTorchJob with Muster."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar_image.image import sidecar_archive
from tests.support.cluster.drills import loses_nothing, scale_down, scale_up
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import Kubelab
from tests.support.cluster.operator_job import ElasticPyTorchJob, OperatorJob, delete_worker_0
from tests.support.cluster.workload import NAME
from tests.support.training.step_log import World

pytestmark = [pytest.mark.kubelab, pytest.mark.long, pytest.mark.timeout(2400)]

WORKLOAD = ElasticPyTorchJob(replicas=2, least=1, most=3, grace_s=180)


def test_replicas_follow_and_nothing_is_lost(operator: Kubelab, tmp_path: Path) -> None:
    operator.command("load", str(sidecar_archive()), timeout_s=300)
    with OperatorJob(operator, tmp_path, WORKLOAD, muster=True) as job:
        loses_nothing(job, scale_up, scale_down, scaled_by_verbs, delete_worker_0)
        assert job.conditions()["Running"] == "True"
        assert "Failed" not in job.conditions()


def scaled_by_verbs(job: KubeJob, world: World) -> World:
    """``muster scaleout``, and ``scalein``: the highest index goes."""
    size = len(world.nodes)
    for verb, after in (("scaleout", size + 1), ("scalein", size)):
        done = job.typed(verb, "--count", "1", "--timeout", "5m")
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        world = job.world_of(after, not_=world)
    assert f"{NAME}-worker-{size}" not in world.nodes
    return world
