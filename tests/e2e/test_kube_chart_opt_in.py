# SPDX-License-Identifier: Apache-2.0
"""The chart with what is off by default: annotations at owners, and evictions. And what a pod of
another namespace makes of it at a job that trains: nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.owner_kinds import Reference
from tests.support.cluster.chart_release import ChartRelease, LabelledJob
from tests.support.cluster.drills import STEPS_BETWEEN, delete_pod, loses_nothing
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import Kubelab, Object
from tests.support.cluster.other_namespace import JOB, TEXT, Intruder, namespaces_that_read, review
from tests.support.cluster.signs import TOLD_S, cordoned_for_a_moment, told
from tests.support.cluster.workload import GRACE_S, NAME, Workload
from tests.support.training.step_log import World
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.kubelab, pytest.mark.timeout(1800)]

DEPLOYMENT = Workload(kind="Deployment", grace_s=GRACE_S)
LEAST, MOST, SLOTS = 17, 93, 7
"""Of a PyTorchJob that is nobody else's business."""
POSTS = 100
NAMED_S = 30.0
PATIENCE_S = 180.0


@pytest.fixture(scope="module")
def chart(kubelab: Kubelab, sidecar_in_lab: str) -> Iterator[ChartRelease]:
    with ChartRelease(kubelab, "rbac.annotations=true", "injection.evict=true") as chart:
        yield chart


def test_a_pod_of_another_namespace_moves_nothing_at_a_job_and_reads_nothing_of_it(
    chart: ChartRelease, operator: Kubelab, tmp_path: Path
) -> None:
    lab, wanted = chart.lab, str(DEPLOYMENT.replicas)
    with Intruder(lab) as intruder, LabelledJob(lab, tmp_path, DEPLOYMENT) as job:

        def is_claimed(_: KubeJob, world: World) -> World:
            job.until(lambda: _wanted(lab, job.namespace, NAME) == wanted, TOLD_S, "it is told")
            victims = job.pods()
            job.tell("records of another namespace name its pods")
            intruder.claims(victims)
            # What the controller writes of the intruder's own pod comes after all that it claims.
            job.until(
                lambda: _wanted(lab, intruder.namespace, JOB) == "1", TOLD_S, "its own is annotated"
            )
            job.until(
                lambda: "Joined" in _events(lab, intruder.namespace), TOLD_S, "its pod has joined"
            )
            job.tell("the intruder's own Deployment has its Events and annotations")
            intruder.forget_drains()
            world = cordoned_for_a_moment(job, world)
            for pod in victims:
                assert pod["metadata"]["uid"] not in intruder.drains(), "a node's state is told"
            assert _wanted(lab, job.namespace, NAME) == wanted
            assert f"job {JOB}" not in _events(lab, job.namespace)
            return world

        loses_nothing(job, is_claimed, delete_pod)
        job.tell("it asks the webhook itself")
        _nothing_is_told(lab, job.namespace, intruder)
        assert namespaces_that_read(lab, TEXT) <= {intruder.namespace}


def _nothing_is_told(lab: Kubelab, namespace: str, intruder: Intruder) -> None:
    """Of text at others' objects, and of a PyTorchJob to who does not know its UID."""
    uid = _suspended_pytorch_job(lab, namespace)
    (made,) = lab.pods(namespace, f"app={NAME}")[0]["metadata"]["ownerReferences"]
    real = Reference(made["apiVersion"], made["kind"], made["name"], made["uid"])
    assert TEXT in str(intruder.posts(review(namespace, real, min=TEXT)))
    proxy = [Reference("apps/v1", "DaemonSet", "kube-proxy", f"uid-{n}") for n in range(POSTS)]
    intruder.posts(*(review("kube-system", one, min=TEXT) for one in proxy))

    def shown(*uids: str) -> set[int]:
        """Those of its numbers that come back."""
        asked = [Reference("kubeflow.org/v1", "PyTorchJob", "secret", one) for one in uids]
        answers = str(intruder.posts(*(review(namespace, one) for one in asked)))
        return {number for number in (LEAST, MOST, SLOTS) if f'"value": "{number}"' in answers}

    # On a busy machine the controller may not have read the object in time.
    wait_until(lambda: shown(uid) == {LEAST, MOST, SLOTS}, TOLD_S, "who knows its UID is told")
    assert shown("", "guess", real.uid) == set()


def _suspended_pytorch_job(lab: Kubelab, namespace: str) -> str:
    """One that makes no pods; its UID."""
    container = {"name": "pytorch", "image": "x", "command": ["torchrun", "train.py"]}
    bounds = {"minReplicas": LEAST, "maxReplicas": MOST, "nProcPerNode": SLOTS}
    spec = {
        "elasticPolicy": bounds,
        "runPolicy": {"suspend": True},
        "pytorchReplicaSpecs": {
            "Worker": {"replicas": LEAST, "template": {"spec": {"containers": [container]}}}
        },
    }
    kind = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "secret"}}
    lab.apply(namespace, {**kind, "spec": spec})
    return str(lab.get(namespace, "pytorchjob", "secret")["metadata"]["uid"])


def _wanted(lab: Kubelab, namespace: str, deployment: str) -> str:
    """What the controller has written at a Deployment."""
    metadata = lab.get(namespace, "deployment", deployment)["metadata"]
    return str(metadata.get("annotations", {}).get("muster.dev/members-wanted", ""))


def _events(lab: Kubelab, namespace: str) -> str:
    """The controller's Events in a namespace."""
    items: list[Object] = lab.get(namespace, "events")["items"]
    ours = [one for one in items if one["source"].get("component") == "muster-controller"]
    return "\n".join(f"{one['reason']} {one['message']}" for one in ours)


def test_a_pod_that_came_without_its_sidecar_is_evicted_within_its_budget(
    chart: ChartRelease, tmp_path: Path
) -> None:
    with LabelledJob(chart.lab, tmp_path, DEPLOYMENT) as job:
        job.goes_on(job.world_of(DEPLOYMENT.replicas), STEPS_BETWEEN)
        before = job.names()
        chart.scale_controller(0)
        job.scale(DEPLOYMENT.replicas + 1)
        job.until(lambda: len(job.names()) > len(before), PATIENCE_S, "a pod is made all the same")
        (late,) = job.names() - before
        job.kubectl("wait", "--for=condition=Ready", f"pod/{late}", "--timeout=80s")
        job.apply(_budget(DEPLOYMENT.replicas + 1))
        chart.scale_controller(2)
        back_s = time.monotonic()
        job.tell("the controller is back")
        job.until(lambda: told(job, "NotInjected"), NAMED_S, "the pod is named within 30 s")
        job.tell(f"{late} is named {time.monotonic() - back_s:.1f} s after that")
        refused = f"cannot evict pod {late}"
        job.until(lambda: refused in _log(chart), PATIENCE_S, "its budget lets no pod go")
        job.tell("its eviction was refused")
        assert job.names() == before | {late}
        assert job.sidecars()[late] is False

        job.apply(_budget(DEPLOYMENT.replicas))
        job.tell("the budget allows one")
        job.until(lambda: late not in job.names(), PATIENCE_S, f"{late} is evicted")
        job.tell(f"{late} is evicted")
        job.until(
            lambda: [*job.sidecars().values()] == [True] * (DEPLOYMENT.replicas + 1),
            PATIENCE_S,
            "the pod in its place has its sidecar",
        )
        job.world_of(DEPLOYMENT.replicas + 1)
        assert before <= job.names(), "no other pod was evicted"


def _budget(least: int) -> Object:
    spec = {"minAvailable": least, "selector": {"matchLabels": {"app": NAME}}}
    kind = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": NAME}}
    return {**kind, "spec": spec}


def _log(chart: ChartRelease) -> str:
    """What all replicas of the controller have logged."""
    selector = "app.kubernetes.io/component=controller"
    return chart.kubectl("logs", "-l", selector, "--tail=-1")
