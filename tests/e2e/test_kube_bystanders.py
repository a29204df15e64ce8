# SPDX-License-Identifier: Apache-2.0
"""Pods of a real cluster that cannot train, beside a job whose pods can: nobody waits for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import KubectlFailed, Kubelab, Object
from tests.support.cluster.workload import NAME, Workload

pytestmark = [pytest.mark.kubelab, pytest.mark.timeout(1200)]

NO_IMAGE = "127.0.0.1:1/nobody:serves-this"
"""Of a registry that refuses every connection."""
UID = "batch.kubernetes.io/controller-uid"
INDEX = "batch.kubernetes.io/job-completion-index"


def test_a_pod_whose_image_cannot_be_pulled_keeps_no_healthy_pod_from_training(
    kubelab: Kubelab, sidecar_in_lab: str, tmp_path: Path
) -> None:
    whole = Workload(replicas=0, least=2, most=2, lease_ttl="30s")
    with KubeJob(kubelab, tmp_path, whole, muster=True) as job:
        template = whole.manifest(job.directory)["spec"]["template"]["spec"]
        (container,) = template["containers"]
        container |= {"image": NO_IMAGE, "imagePullPolicy": "IfNotPresent"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bad-0"}, "spec": template}
        job.apply(job.injected(json.dumps(pod), f"--job={NAME}"))
        job.until(lambda: _is_registered(job, "bad-0"), 120, "bad-0 has registered")
        job.scale(2)
        world = job.world_of(2)
        assert "bad-0" not in world.nodes
        job.goes_on(world)
        assert _waiting_for(job, "bad-0") in ("ErrImagePull", "ImagePullBackOff")


@pytest.mark.long
def test_a_late_pod_of_a_deleted_job_does_not_disturb_the_one_that_was_created_again(
    kubelab: Kubelab, sidecar_in_lab: str, tmp_path: Path
) -> None:
    with KubeJob(kubelab, tmp_path, Workload(kind="Job", replicas=2), muster=True) as job:
        first = job.world_of(2)
        former = job.lab.get(job.namespace, "job", NAME)["metadata"]["uid"]
        job.kubectl("delete", f"job/{NAME}", "--cascade=foreground", timeout_s=120)
        job.apply(job.manifest())
        world = job.world_of(2, not_=first)
        job.tell("a pod of the deleted job comes late")
        job.apply(_late_pod(job, former))
        present = job.lab.get(job.namespace, "job", NAME)["metadata"]["uid"]
        words = f"the job was created again with UID {present}"
        job.until(lambda: words in _log(job, "late"), 120, "its sidecar says why it waits")
        job.goes_on(world)
        assert job.steps.worlds()[-1] is world, "another world has formed"
        assert {pod["metadata"]["name"] for pod in job.pods()} - {"late"} == world.nodes


def _late_pod(job: KubeJob, former: str) -> Object:
    """A pod as the deleted Job would still have made it."""
    made: dict[str, Any] = json.loads(job.manifest())
    template = made["spec"]["template"]
    labels = {**template["metadata"]["labels"], UID: former, INDEX: "0"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": "late", "labels": labels},
        "spec": template["spec"],
    }


def _is_registered(job: KubeJob, pod: str) -> bool:
    status = job.lab.get(job.namespace, "pod", pod)["status"]
    sidecars: list[Object] = status.get("initContainerStatuses", [])
    return any(s["name"] == "muster" and s["ready"] for s in sidecars)


def _waiting_for(job: KubeJob, pod: str) -> str | None:
    (status,) = job.lab.get(job.namespace, "pod", pod)["status"]["containerStatuses"]
    reason: str | None = status["state"].get("waiting", {}).get("reason")
    return reason


def _log(job: KubeJob, pod: str) -> str:
    """What its sidecar has logged; nothing before it has started."""
    try:
        return job.kubectl("logs", pod, "-c", "muster")
    except KubectlFailed:
        return ""
