# SPDX-License-Identifier: Apache-2.0
"""An MPIJob of the real operator, injected: it trains without ssh, and outlives its preemptions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.chart_release import ChartRelease
from tests.support.cluster.horovod_job import NAME, RESTRICTED, ElasticMPIJob, HorovodJob, prepare
from tests.support.cluster.lab import TRAINER_IMAGE, Kubelab, Object
from tests.support.cluster.signs import TOLD_S, told
from tests.support.cluster.workload import GRACE_S

pytestmark = [pytest.mark.kubelab, pytest.mark.timeout(1800)]


@pytest.fixture
def chart(kubelab: Kubelab, sidecar_in_lab: str) -> Iterator[ChartRelease]:
    with ChartRelease(kubelab) as chart:
        yield chart


@pytest.fixture
def mpi_operator(operator: Kubelab, sidecar_in_lab: str) -> Kubelab:
    prepare(operator)
    return operator


def inference(node: str, name: str = "inference") -> Object:
    """A pod of a higher PriorityClass, for which one worker has to go."""
    resources = {"requests": {"cpu": "1500m", "memory": "64Mi"}}
    container: Object = {
        "name": "inference",
        "image": TRAINER_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sleep", "3600"],
        "resources": resources,
        "securityContext": RESTRICTED,
    }
    spec = {
        "priorityClassName": "preserved-pc",
        "nodeSelector": {"kubernetes.io/hostname": node},
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def test_a_preempted_worker_is_drained_and_taken_in_again(
    mpi_operator: Kubelab, tmp_path: Path
) -> None:
    workload = ElasticMPIJob(cpu="1100m", grace_s=GRACE_S)
    with HorovodJob(mpi_operator, tmp_path, workload) as job:
        both = job.trains_with(2)
        job.tell("an inference pod is applied")
        job.apply(inference("node-b"))
        job.trains_with(1)
        assert "Failed" not in job.conditions()
        job.kubectl("delete", "pod", "inference", "--wait=false")
        job.trains_with(2, other_than=both)
        job.nothing_is_lost()
        assert job.conditions()["Running"] == "True"


@pytest.mark.long
def test_a_job_of_which_a_part_cannot_be_injected_says_so_and_has_no_sidecar(
    chart: ChartRelease, mpi_operator: Kubelab, tmp_path: Path
) -> None:
    workload = ElasticMPIJob(taken_port=9401)
    with HorovodJob(mpi_operator, tmp_path, workload, labelled=True) as job:
        about = f"MPIJob/{NAME}"
        job.until(lambda: about in told(job, "NotInjected"), TOLD_S, "it is told at the MPIJob")
        assert "has port 9401" in str(told(job, "NotInjected")[about])
        label = "training.kubeflow.org/job-name=mnist-elastic"
        job.until(
            lambda: len(job.lab.pods(job.namespace, label)) == 3, TOLD_S, "all its pods are made"
        )
        for pod in job.lab.pods(job.namespace, label):
            names = [one["name"] for one in pod["spec"].get("initContainers", [])]
            assert "muster" not in names


@pytest.mark.long
def test_workers_come_and_go_as_the_object_is_edited_and_rank_0_leaves(
    mpi_operator: Kubelab, tmp_path: Path
) -> None:
    with HorovodJob(mpi_operator, tmp_path, ElasticMPIJob(cpu="400m", grace_s=GRACE_S)) as job:
        world = job.trains_with(2)
        job.tell(f"kubectl delete pod {world[0].pod}, which has rank 0")
        job.kubectl("delete", "pod", world[0].pod, "--wait=false")
        world = job.trains_with(2, other_than=world)
        done = job.typed("scaleout", "--count", "1", "--timeout", "5m")
        assert done.returncode == 0, done.stderr
        world = job.trains_with(3, other_than=world)
        assert " training " in job.typed("get").stdout
        done = job.typed("scalein", "--count", "1", "--timeout", "5m")
        assert done.returncode == 0, done.stderr
        world = job.trains_with(2, other_than=world)
        job.edit_replicas(1)
        world = job.trains_with(1, other_than=world)
        assert [one.pod for one in world] == ["mnist-elastic-worker-0"]
        job.edit_replicas(2)
        job.trains_with(2, other_than=world)
        job.nothing_is_lost()
        assert "Failed" not in job.conditions()


@pytest.mark.long
def test_all_workers_make_room_once_one_rank_has_saved(
    chart: ChartRelease, mpi_operator: Kubelab, tmp_path: Path
) -> None:
    workload = ElasticMPIJob(cpu="1100m", grace_s=GRACE_S, starts_again=True)
    with HorovodJob(mpi_operator, tmp_path, workload, labelled=True) as job:
        both = job.trains_with(2)
        pods = {node: f"inference-{node}" for node in ("node-a", "node-b")}
        job.tell("an inference pod is applied for each node")
        job.apply(*(inference(node, name) for node, name in pods.items()))
        # Less than half of the grace of the workers.
        ready = ("wait", "--for=condition=Ready", "pod", *pods.values(), "--timeout=85s")
        job.kubectl(*ready)
        job.tell("both are ready")
        assert "Failed" not in job.conditions()
        job.kubectl("delete", "pod", *pods.values(), "--wait=false")
        job.trains_with(2, other_than=both)
        job.nothing_is_lost()
