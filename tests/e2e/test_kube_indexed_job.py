# SPDX-License-Identifier: Apache-2.0
"""A Job whose pods have numbers, as in docs/kubernetes.md: what is drained is no failure of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster.drills import befall, delete_pod, scale_down
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import Kubelab
from tests.support.cluster.workload import NAME, Workload

INDEX = "batch.kubernetes.io/job-completion-index"


@pytest.mark.kubelab
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_an_indexed_job_makes_a_pod_again_and_drops_the_highest_index(
    kubelab: Kubelab, sidecar_in_lab: str, tmp_path: Path
) -> None:
    with KubeJob(kubelab, tmp_path, Workload(kind="Job"), muster=True) as job:
        world = job.world_of(3)
        job.goes_on(world)
        for act, left in ((delete_pod, {"0", "1", "2"}), (scale_down, {"0", "1"})):
            told = befall(job, world, act)
            assert told.went_on, act.__name__
            assert (told.lost, told.twice) == (0, 0), act.__name__
            assert {pod["metadata"]["labels"][INDEX] for pod in job.pods()} == left, act.__name__
            world = job.steps.worlds()[-1]
        status = job.lab.get(job.namespace, "job", NAME)["status"]
        assert status.get("failed", 0) == 0, status
        assert not status.get("failedIndexes"), status
