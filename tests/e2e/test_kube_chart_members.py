# SPDX-License-Identifier: Apache-2.0
"""The chart's etcd of three members, with TLS between them, and one that is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.cluster.chart_release import ChartRelease, LabelledJob, command
from tests.support.cluster.drills import STEPS_BETWEEN, befall, delete_pod
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import Kubelab
from tests.support.cluster.workload import Workload
from tests.support.training.step_log import World

pytestmark = [pytest.mark.kubelab, pytest.mark.long, pytest.mark.timeout(1800)]

DEPLOYMENT = Workload(kind="Deployment")


def test_a_job_drains_without_a_lost_step_while_one_of_three_members_is_killed_again_and_again(
    kubelab: Kubelab, sidecar_in_lab: str, tmp_path: Path
) -> None:
    def kill_members(job: KubeJob, world: World) -> World:
        for number in range(3):
            name = f"muster-etcd-{number}"
            job.tell(f"{name} is killed")
            os.kill(process_of(name), signal.SIGKILL)
            job.goes_on(world, STEPS_BETWEEN)
            ready = ("rollout", "status", "statefulset/muster-etcd", "--timeout=180s")
            kubelab.kubectl("-n", "muster-system", *ready, timeout_s=190)
        os.kill(process_of("muster-etcd-0"), signal.SIGKILL)
        return delete_pod(job, world)

    with (
        ChartRelease(kubelab, "etcd.replicas=3") as chart,
        LabelledJob(kubelab, tmp_path, DEPLOYMENT) as job,
    ):
        assert "Phase:          Succeeded" in chart.helm(command("helm test"))
        job.goes_on(job.world_of(DEPLOYMENT.replicas), STEPS_BETWEEN)
        drained = befall(job, job.steps.worlds()[-1], kill_members)
        assert (drained.lost, drained.twice, drained.went_on) == (0, 0, True)


def process_of(member: str) -> int:
    """The process of a member, as this machine sees it, which is all of the lab."""
    words = f"--name={member}".encode()
    (found,) = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if words in path.read_bytes().split(b"\0")
    ]
    return found
