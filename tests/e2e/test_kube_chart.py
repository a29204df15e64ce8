# SPDX-License-Identifier: Apache-2.0
"""From an empty cluster to a job that trains with Muster: one command, and a label."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.chart_release import ChartRelease, LabelledJob, command
from tests.support.cluster.drills import STEPS_BETWEEN, befall, delete_pod, delete_rank_0
from tests.support.cluster.lab import Kubelab
from tests.support.cluster.operator_job import ElasticPyTorchJob
from tests.support.cluster.workload import Workload

pytestmark = [pytest.mark.kubelab, pytest.mark.timeout(1800)]

DEPLOYMENT = Workload(kind="Deployment")
PYTORCH_JOB = ElasticPyTorchJob(replicas=2, least=1, most=3)
WITHOUT_S = 180.0


@pytest.fixture(scope="module")
def chart(kubelab: Kubelab, sidecar_in_lab: str) -> Iterator[ChartRelease]:
    with ChartRelease(kubelab) as chart:
        yield chart


def test_a_labelled_deployment_trains_and_loses_no_step(
    chart: ChartRelease, tmp_path: Path
) -> None:
    assert "Phase:          Succeeded" in chart.helm(command("helm test"))
    with LabelledJob(chart.lab, tmp_path, DEPLOYMENT) as job:
        world = job.world_of(DEPLOYMENT.replicas)
        job.goes_on(world, STEPS_BETWEEN)
        assert set(job.sidecars().values()) == {True}
        drained = befall(job, job.steps.worlds()[-1], delete_pod)
        assert (drained.lost, drained.twice, drained.went_on) == (0, 0, True)

        # While no controller is there, pods start, without Muster, and the job trains on.
        chart.scale_controller(0)
        before = set(job.sidecars())
        job.scale(DEPLOYMENT.replicas + 1)
        job.until(
            lambda: len(job.sidecars()) > len(before), WITHOUT_S, "a pod is made all the same"
        )
        (late,) = set(job.sidecars()) - before
        assert job.sidecars()[late] is False
        chart.scale_controller(2)
        job.kubectl("delete", "pod", late, "--wait=false")
        job.until(
            lambda: [*job.sidecars().values()].count(True) == DEPLOYMENT.replicas + 1,
            WITHOUT_S,
            "the pod that takes its place has its sidecar",
        )
        job.world_of(DEPLOYMENT.replicas + 1)


@pytest.mark.long
def test_a_labelled_pytorch_job_says_min_and_max_by_its_elastic_policy(
    chart: ChartRelease, operator: Kubelab, tmp_path: Path
) -> None:
    with LabelledJob(operator, tmp_path, PYTORCH_JOB) as job:
        job.goes_on(job.world_of(PYTORCH_JOB.replicas), STEPS_BETWEEN)
        (pod, *_) = job.pods()
        env = {v["name"]: v.get("value") for v in pod["spec"]["initContainers"][0]["env"]}
        assert (env["MUSTER_MIN"], env["MUSTER_MAX"]) == ("1", "3")
        drained = befall(job, job.steps.worlds()[-1], delete_rank_0)
        assert (drained.lost, drained.twice, drained.went_on) == (0, 0, True)
        job.kubectl("delete", "pytorchjob", "--all", "--wait=false")
