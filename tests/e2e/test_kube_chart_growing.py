# SPDX-License-Identifier: Apache-2.0
"""The chart's etcd from one member to three, by the commands of the page, under a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chart import HelmFailed
from tests.support.cluster.chart_release import (
    MEMBERS_PAGE,
    SNAPSHOTS,
    ChartRelease,
    LabelledJob,
    command,
)
from tests.support.cluster.drills import STEPS_BETWEEN, delete_pod, loses_nothing
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import Kubelab
from tests.support.cluster.members import PATIENCE_S, Members
from tests.support.cluster.workload import Workload
from tests.support.training.step_log import World

pytestmark = [pytest.mark.kubelab, pytest.mark.long, pytest.mark.timeout(1800)]

DEPLOYMENT = Workload(kind="Deployment", grace_s=180)
UPGRADE = "helm upgrade muster charts/muster --namespace muster-system --reuse-values"


@pytest.fixture
def chart(kubelab: Kubelab, sidecar_in_lab: str, tmp_path: Path) -> Iterator[ChartRelease]:
    claims = {f"data-muster-etcd-{number}": tmp_path / f"volume-{number}" for number in range(3)}
    claims[SNAPSHOTS] = tmp_path / SNAPSHOTS
    backup = ("etcd.backup.enabled=true", f"etcd.backup.claim={SNAPSHOTS}")
    with ChartRelease(kubelab, *backup, claims=claims) as chart:
        chart.claim_snapshots()
        chart.test()
        yield chart


def test_one_member_becomes_three_under_a_job(chart: ChartRelease, tmp_path: Path) -> None:
    with LabelledJob(chart.lab, tmp_path / "job", DEPLOYMENT) as job:

        def grows(_: KubeJob, world: World) -> World:
            with pytest.raises(HelmFailed, match="but muster-etcd runs 1"):
                chart.upgrade("etcd.replicas=3")
            chart.take_snapshot()
            job.tell("a snapshot was taken")
            words = command("kubectl -n muster-system delete statefulset", MEMBERS_PAGE)
            chart.lab.kubectl(*words[1:], timeout_s=PATIENCE_S)
            job.tell("the one member has ended")
            job.goes_on(world, STEPS_BETWEEN)
            chart.helm(command(f"{UPGRADE} --wait-for-jobs", MEMBERS_PAGE))
            job.tell("three volumes have the snapshot")
            chart.helm(command(f"{UPGRADE} --set", MEMBERS_PAGE))
            Members(chart.lab, 3).until_ready()
            job.tell("three members are ready")
            job.until(job.all_listed, PATIENCE_S, "all pods are listed again, and no other")
            job.goes_on(world, STEPS_BETWEEN)
            assert job.steps.worlds()[-1] is world, "another world has formed"
            # One that knows all three members joins those that know the first alone.
            world = delete_pod(job, world)
            chart.test()
            return delete_pod(job, world)

        loses_nothing(job, grows)
