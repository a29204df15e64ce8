# SPDX-License-Identifier: Apache-2.0
"""Other bounds reach a job of a real cluster while it trains: no step is lost, no pod refused."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar_image.image import sidecar_archive
from tests.support.cluster.account import account
from tests.support.cluster.drills import STEPS_BETWEEN, saved_step
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import KubectlFailed, Kubelab
from tests.support.cluster.operator_job import WORKER_0, ElasticPyTorchJob, OperatorJob
from tests.support.cluster.workload import NAME, Workload
from tests.support.training.step_log import World

pytestmark = [pytest.mark.kubelab, pytest.mark.long, pytest.mark.timeout(1800)]

DEPLOYMENT = f"deployment/{NAME}"
ROLL_OUT_TIMEOUT_S = 600
WORKER_1 = f"{NAME}-worker-1"


@pytest.mark.parametrize(("few", "many"), [(2, 4), (4, 8)], ids=str)
def test_a_rolling_update_of_a_deployment_raises_its_max_and_one_back_lowers_it(
    kubelab: Kubelab, sidecar_in_lab: str, tmp_path: Path, few: int, many: int
) -> None:
    # Of a grace that no drain uses up, however busy the machine is.
    workload = Workload(kind="Deployment", replicas=few, least=1, most=few, grace_s=180)
    with KubeJob(kubelab, tmp_path, workload, muster=True) as job:
        world = job.world_of(few)
        began_s = time.monotonic()
        job.goes_on(world, STEPS_BETWEEN)

        job.tell(f"max {few} to {many}")
        raise_max(job, many)
        until_rolled_out(job)
        world = job.world_of(few, not_=world, without=world.nodes)
        assert bounds_of_history(job)[-1] == f"max is {many} (before: {few})"
        job.goes_on(world, STEPS_BETWEEN)
        job.scale(many)
        world = job.world_of(many, not_=world)
        job.goes_on(world, STEPS_BETWEEN)
        none_was_refused(job)

        job.tell("kubectl rollout undo")
        job.kubectl("rollout", "undo", DEPLOYMENT)
        until_rolled_out(job)
        # Where its last old pod is ready before the last newer one goes, three lease times later.
        lowered = f"max is {few} (before: {many})"

        def is_lowered() -> bool:
            try:
                return bounds_of_history(job)[-1] == lowered
            except KubectlFailed:
                return False  # the store, or that pod, is away

        job.until(is_lowered, job.patience_s, lowered)
        world = job.world_of(few, not_=world, without=world.nodes)
        assert len(job.names() - world.nodes) == many - few
        nothing_is_lost(job, world, began_s)


def test_a_pytorchjob_has_the_max_of_its_newest_pod_and_the_youngest_leave_a_smaller_one(
    operator: Kubelab, tmp_path: Path
) -> None:
    operator.command("load", str(sidecar_archive()), timeout_s=300)
    workload = ElasticPyTorchJob(replicas=2, least=1, most=2, grace_s=180)
    with OperatorJob(operator, tmp_path, workload, muster=True) as job:
        world = job.world_of(2)
        began_s = time.monotonic()
        job.goes_on(world, STEPS_BETWEEN)
        oldest = uid(job, WORKER_0)

        raise_max(job, 4)
        job.tell(f"kubectl delete pod {WORKER_1}")
        job.kubectl("delete", "pod", WORKER_1, "--wait=false")
        world = job.world_of(2, not_=world)
        assert bounds_of_history(job)[-1] == "max is 4 (before: 2)"
        job.goes_on(world, STEPS_BETWEEN)
        job.scale(4)
        world = job.world_of(4, not_=world)
        job.goes_on(world, STEPS_BETWEEN)
        assert uid(job, WORKER_0) == oldest, "the operator has replaced a pod by itself"

        told = job.kubectl(*IN_WORKER_0, "muster", "set", NAME, "--max", "2")
        assert "2 of 4 members will stand by" in told
        world = job.world_of(2, not_=world)
        assert world.nodes == {WORKER_0, WORKER_1}
        job.scale(2)
        job.until(lambda: job.names() == world.nodes, 60, "the pods that stand by are gone")
        nothing_is_lost(job, world, began_s)
        assert job.steps.worlds()[-1] is world, "another world has formed"
        assert job.conditions()["Running"] == "True"
        assert "Failed" not in job.conditions()


IN_WORKER_0 = ("exec", WORKER_0, "-c", "muster", "--")


def raise_max(job: KubeJob, most: int) -> None:
    """What a user does: inject again with another ``--max``, and apply."""
    job.workload = replace(job.workload, most=most)
    job.apply(job.manifest())


def until_rolled_out(job: KubeJob) -> None:
    """Wait until every pod is of the present template, and its sidecar ready."""
    ready = ("rollout", "status", DEPLOYMENT, f"--timeout={ROLL_OUT_TIMEOUT_S}s")
    job.kubectl(*ready, timeout_s=ROLL_OUT_TIMEOUT_S + 10)
    job.tell("all pods are replaced")


def uid(job: KubeJob, pod: str) -> str:
    """Of a pod."""
    found: str = job.lab.get(job.namespace, "pod", pod)["metadata"]["uid"]
    return found


def bounds_of_history(job: KubeJob) -> list[str]:
    """How the bounds have changed by pods of another template, as ``muster history`` tells it."""
    pod = job.pods()[0]["metadata"]["name"]
    shown = job.kubectl("exec", pod, "-c", "muster", "--", "muster", "history", "--json")
    entries = [json.loads(line) for line in shown.splitlines()]
    return [entry["why"].partition(": ")[2] for entry in entries if entry["what"] == "set"]


def nothing_is_lost(job: KubeJob, world: World, began_s: float) -> None:
    """Assert that each step since then was made once, and that no container ended meanwhile."""
    job.goes_on(world, STEPS_BETWEEN)
    none_was_refused(job)
    told = account(job.steps.directory, began_s, time.monotonic(), saved_step(job), watched=True)
    job.tell(f"still for {told.still_s:.1f} s at most")
    assert (told.lost, told.twice) == (0, 0)


def none_was_refused(job: KubeJob) -> None:
    """Assert that no sidecar, and no torchrun, has ended and been started again."""
    for pod in job.pods():
        status = pod["status"]
        for container in (*status["initContainerStatuses"], *status["containerStatuses"]):
            assert container["restartCount"] == 0, (pod["metadata"]["name"], container)
