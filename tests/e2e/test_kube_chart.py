# SPDX-License-Identifier: Apache-2.0
"""From an empty cluster to a job that trains with Muster: one command, and a label."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chart import HelmFailed
from tests.support.cluster.chart_release import NAMESPACE, RELEASE, ChartRelease, LabelledJob
from tests.support.cluster.drills import STEPS_BETWEEN, delete_pod, delete_rank_0, loses_nothing
from tests.support.cluster.horovod_job import launcher_pod
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import KubectlFailed, Kubelab
from tests.support.cluster.operator_job import ElasticPyTorchJob
from tests.support.cluster.other_namespace import attempts
from tests.support.cluster.service import SqueezedJob, takes_half_then_all
from tests.support.cluster.signs import (
    TOLD_S,
    Sign,
    asked_and_taken_back,
    cordon_and_drain,
    cordoned_for_a_moment,
    disruption,
    is_formed,
    is_told,
    taint,
    told,
)
from tests.support.cluster.workload import GRACE_S, NAME, Workload
from tests.support.training.step_log import World

pytestmark = [pytest.mark.kubelab, pytest.mark.timeout(1800)]

DEPLOYMENT = Workload(kind="Deployment", grace_s=GRACE_S)
AT_MIN = Workload(kind="Deployment", replicas=2, grace_s=GRACE_S)
"""Who drains is held until another comes: there is time to take a sign back."""
PYTORCH_JOB = ElasticPyTorchJob(replicas=2, least=1, most=3, grace_s=GRACE_S)
STATIC = (
    "set -x; TORCHRUN --nproc_per_node=SLOTS --nnodes=3 --node_rank=$JOB_COMPLETION_INDEX"
    " --master_addr=trainer-0.trainer --master_port=3389 SCRIPT"
)
"""As guides of JobSet, LeaderWorkerSet and Volcano have it: torchrun's static rendezvous."""
HOSTNAME = """
set -euo pipefail
export NODE_RANK=${HOSTNAME##*-}
export MASTER_ADDR=trainer-0.trainer
if [ "$NODE_RANK" = 0 ]; then export MASTER_ADDR=localhost; fi
exec TORCHRUN --nnodes=3 --nproc-per-node=SLOTS --node-rank=${NODE_RANK} \\
  --rdzv-id=llm --rdzv-backend=c10d --rdzv-endpoint=${MASTER_ADDR}:29500 \\
  SCRIPT
"""
"""As guides of StatefulSets have it: a rendezvous at the first pod."""
WITHOUT_S = 180.0
SPOT = "aws-node-termination-handler/spot-itn"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
ENFORCE = "pod-security.kubernetes.io/enforce"
DRY_RUN = ("create", "--dry-run=server", "-o", "json", "-f", "-")


@pytest.fixture(scope="module")
def chart(kubelab: Kubelab, sidecar_in_lab: str) -> Iterator[ChartRelease]:
    with ChartRelease(kubelab) as chart:
        yield chart


def test_a_labelled_deployment_trains_and_loses_no_step(
    chart: ChartRelease, tmp_path: Path
) -> None:
    chart.test()
    with LabelledJob(chart.lab, tmp_path, DEPLOYMENT) as job:
        job.world_of(DEPLOYMENT.replicas)
        assert set(job.sidecars().values()) == {True}
        _the_doctor_finds_nothing_wrong(chart)
        loses_nothing(job, delete_pod, cordoned_for_a_moment, cordon_and_drain)
        assert chart.lab.get(job.namespace, "secret", f"{NAME}-muster-store")["type"] == "Opaque"
        _nobody_else_gets_in(chart.lab, job.namespace)
        with pytest.raises(HelmFailed, match="injects pods of the same namespaces"):
            chart.helm(["helm", "install", "second", "charts/muster", "--namespace", "default"])

        # While no controller is there, pods start, without Muster, and the job trains on.
        chart.scale_controller(0)
        before = set(job.sidecars())
        job.scale(DEPLOYMENT.replicas + 1)
        job.until(
            lambda: len(job.sidecars()) > len(before), WITHOUT_S, "a pod is made all the same"
        )
        (late,) = set(job.sidecars()) - before
        assert job.sidecars()[late] is False
        _the_doctor_names_what_is_wrong(chart, job.namespace, late)
        chart.scale_controller(2)
        job.tell("the controller is back")
        job.until(lambda: told(job, "NotInjected"), WITHOUT_S, "it names the pod's owner")
        job.tell("the pod is named")
        job.kubectl("delete", "pod", late, "--wait=false")
        job.until(
            lambda: [*job.sidecars().values()].count(True) == DEPLOYMENT.replicas + 1,
            WITHOUT_S,
            "the pod that takes its place has its sidecar",
        )
        job.world_of(DEPLOYMENT.replicas + 1)


def _the_doctor_finds_nothing_wrong(chart: ChartRelease) -> None:
    status, findings = chart.doctor()
    parts = ("version", "controller", "webhook", "certificate", "etcd", "sidecars", "clocks")
    assert {(one["check"], one["level"]) for one in findings} == {(part, "ok") for part in parts}
    assert status == 0


def _the_doctor_names_what_is_wrong(chart: ChartRelease, namespace: str, late: str) -> None:
    """No controller is there, and a labelled pod has started without its sidecar."""
    status, findings = chart.doctor()
    wrong = {one["check"]: one for one in findings if one["level"] not in ("ok", "note")}
    assert {name: one["level"] for name, one in wrong.items()} == {
        "controller": "fault",
        "webhook": "fault",
        "injection": "warning",
    }
    assert f"{namespace}/{late}" in wrong["injection"]["sentence"]
    assert f"kubectl delete pod -n {namespace} {late}" in wrong["injection"]["remedy"]
    assert status == 1


def _nobody_else_gets_in(lab: Kubelab, trains_in: str) -> None:
    """A pod of another namespace, with the Secret that it can see, reads and writes nothing."""
    other = f"other-{secrets.token_hex(4)}"
    lab.make_namespace(other)
    try:
        tried = attempts(lab, other, f"/muster/v1/{trains_in}/{NAME}/")
    finally:
        lab.remove_namespace(other)
    status, said = tried.pop("own")
    assert status == 0, said
    for name, (status, said) in tried.items():
        assert status != 0, name
        assert "permission denied" in said, f"{name}: {said}"


def test_a_restricted_namespace_takes_the_launcher_that_an_operator_makes(
    chart: ChartRelease,
) -> None:
    """Asked of the API server alone: nothing is made."""
    lab, namespace = chart.lab, f"restricted-{secrets.token_hex(4)}"
    lab.make_namespace(namespace)
    try:
        lab.kubectl("label", "namespace", namespace, f"{ENFORCE}=restricted")
        with pytest.raises(KubectlFailed, match=r'violates PodSecurity "restricted.*delivery'):
            lab.kubectl(*DRY_RUN, "-n", namespace, stdin=json.dumps(launcher_pod(labelled=False)))
        made = lab.kubectl(*DRY_RUN, "-n", namespace, stdin=json.dumps(launcher_pod(labelled=True)))
    finally:
        lab.remove_namespace(namespace)
    names = {one["name"] for one in json.loads(made)["spec"]["initContainers"]}
    assert names == {"muster", "kubectl-delivery"}


@pytest.mark.long
@pytest.mark.parametrize(
    "workload",
    [
        Workload(kind="Job", grace_s=GRACE_S, line=STATIC),
        Workload(kind="StatefulSet", grace_s=GRACE_S, line=HOSTNAME),
    ],
    ids=lambda one: one.kind,
)
def test_a_labelled_job_of_each_kind_keeps_its_launch_line_and_loses_no_step(
    chart: ChartRelease, tmp_path: Path, workload: Workload
) -> None:
    with LabelledJob(chart.lab, tmp_path, workload) as job:
        loses_nothing(job, delete_pod)
        assert set(job.sidecars().values()) == {True}


@pytest.mark.long
def test_a_labelled_pytorch_job_says_min_and_max_by_its_elastic_policy(
    chart: ChartRelease, operator: Kubelab, tmp_path: Path
) -> None:
    with LabelledJob(operator, tmp_path, PYTORCH_JOB) as job:
        loses_nothing(job, delete_rank_0)
        (pod, *_) = job.pods()
        env = {v["name"]: v.get("value") for v in pod["spec"]["initContainers"][0]["env"]}
        assert (env["MUSTER_MIN"], env["MUSTER_MAX"]) == ("1", "3")
        job.kubectl("delete", "pytorchjob", "--all", "--wait=false")


@pytest.mark.long
def test_a_service_that_takes_all_the_room_has_it_once_all_have_saved(
    chart: ChartRelease, tmp_path: Path
) -> None:
    workload = Workload(kind="Deployment", replicas=4, least=1, cpu="600m", grace_s=GRACE_S)
    with SqueezedJob(chart.lab, tmp_path, workload) as job:
        job.world_of(workload.replicas)
        with job.use:
            loses_nothing(job, takes_half_then_all)


@pytest.mark.long
@pytest.mark.parametrize(
    "sign", [taint(SPOT), taint(OUT_OF_SERVICE), disruption()], ids=lambda sign: sign.words
)
def test_a_sign_that_goes_before_the_pods_have_gone_takes_nobody(
    chart: ChartRelease, tmp_path: Path, sign: Sign
) -> None:
    with LabelledJob(chart.lab, tmp_path, AT_MIN) as job:
        loses_nothing(job, asked_and_taken_back(sign, job))
        assert len(job.steps.worlds()[-1].nodes) == AT_MIN.replicas


@pytest.mark.long
def test_what_happens_while_no_controller_is_there_is_told_afterwards(
    chart: ChartRelease, tmp_path: Path
) -> None:
    with LabelledJob(chart.lab, tmp_path, DEPLOYMENT) as job:
        job.goes_on(job.world_of(DEPLOYMENT.replicas), STEPS_BETWEEN)
        chart.scale_controller(0)
        (pod, *_) = (pod["metadata"]["name"] for pod in job.pods())
        world = job.steps.worlds()[-1]
        job.kubectl("delete", "pod", pod, "--wait=false")
        # The pod that takes its place comes without Muster: nobody was there to inject it.
        job.world_of(DEPLOYMENT.replicas - 1, job.patience_s, not_=world)
        assert not is_told(job, pod)
        chart.scale_controller(2)
        try:
            job.until(lambda: is_told(job, pod), TOLD_S, "it is told of")
            job.until(lambda: is_formed(job, DEPLOYMENT.replicas - 1), TOLD_S, "so is the world")
        except AssertionError as error:
            error.add_note(chart.story())
            raise


@pytest.mark.long
def test_a_job_trains_on_while_the_chart_is_upgraded_and_when_it_is_gone(
    chart: ChartRelease, tmp_path: Path
) -> None:
    def upgrade(job: KubeJob, world: World) -> World:
        before = _authorities(chart.lab)
        chart.upgrade("controller.resources.limits.memory=300Mi")
        assert _authorities(chart.lab) == before
        job.goes_on(world, STEPS_BETWEEN)
        return delete_pod(job, world)

    def uninstall(job: KubeJob, world: World) -> World:
        chart.helm(["helm", "uninstall", RELEASE, "--namespace", NAMESPACE])
        job.goes_on(world, 2 * STEPS_BETWEEN)
        return world

    with LabelledJob(chart.lab, tmp_path, DEPLOYMENT) as job:
        loses_nothing(job, upgrade, uninstall)


def _authorities(lab: Kubelab) -> tuple[str, str]:
    held = lab.get(NAMESPACE, "secret", f"{RELEASE}-etcd-access")["data"]
    return held["ca.crt"], held["client-ca.crt"]
