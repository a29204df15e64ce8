# SPDX-License-Identifier: Apache-2.0
"""Signs of an end to come, in a real cluster: saved before the eviction, or taken back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.cluster.chart_release import ChartRelease, LabelledJob
from tests.support.cluster.drills import STEPS_BETWEEN, Act, befall
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import NODES, Kubelab
from tests.support.cluster.workload import LABEL, Workload
from tests.support.training.step_log import World

pytestmark = [pytest.mark.kubelab, pytest.mark.timeout(1800)]

GRACE_S = 180
"""Longer than any drain takes, however busy the machine is."""
DEPLOYMENT = Workload(kind="Deployment", grace_s=GRACE_S)
AT_MIN = Workload(kind="Deployment", replicas=2, grace_s=GRACE_S)
"""Who drains is held until another comes: there is time to take a sign back."""
TOLD_S = 120.0
SPOT = "aws-node-termination-handler/spot-itn"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


@pytest.fixture(scope="module")
def chart(kubelab: Kubelab, sidecar_in_lab: str) -> Iterator[ChartRelease]:
    with ChartRelease(kubelab) as chart:
        yield chart


def told(job: KubeJob, reason: str) -> dict[str, list[str]]:
    """Events of this reason, as kubectl shows them, by object: each leader writes its own."""
    said = job.kubectl("get", "events", "--field-selector", f"reason={reason}", "-o", "json")
    found: dict[str, list[str]] = {}
    for one in json.loads(said)["items"]:
        about = one["involvedObject"]["kind"] + "/" + one["involvedObject"]["name"]
        found.setdefault(about, []).append(one["message"])
    return found


def is_told(job: KubeJob, pod: str) -> bool:
    """Whether the Deployment's Events say that ``pod`` drains."""
    return any(why.startswith(pod) for why in told(job, "Draining").get("Deployment/trainer", ()))


def is_formed(job: KubeJob, nodes: int) -> bool:
    """Whether the Deployment's Events say that a world of so many trains."""
    return any(f" {nodes} nodes" in why for why in told(job, "Reformed")["Deployment/trainer"])


def cordon_and_drain(job: KubeJob, world: World) -> World:
    """A node is cordoned, and its pods are evicted once the save is over."""
    placed = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in job.pods()}
    node = placed[world.workers[max(world.workers)].node]
    leaving = {f"Pod/{name}" for name, where in placed.items() if where == node}
    job.tell(f"{node} is cordoned: {sorted(leaving)}")
    job.lab.kubectl("cordon", node)
    try:
        job.until(
            lambda: leaving & {*told(job, "Committed")}, TOLD_S, "one of its pods is saved for"
        )
        saved = leaving & {*told(job, "Committed")}
        gone = [
            pod["metadata"]["name"] for pod in job.pods() if "deletionTimestamp" in pod["metadata"]
        ]
        assert gone == [], "the save is over before the eviction comes"
        assert all(f"{node} is cordoned" in str(told(job, "Draining")[pod]) for pod in saved)
        job.tell(f"kubectl drain {node}; saved for: {sorted(saved)}")
        job.lab.kubectl(
            *("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force"),
            f"--pod-selector={LABEL}",
            timeout_s=GRACE_S + 60,
        )
        return job.world_of(len(world.nodes), job.patience_s, not_=world)
    finally:
        job.lab.kubectl("uncordon", node)


@dataclass(frozen=True)
class Sign:
    """Something that says that every pod of a job has to go: how it is put there, and taken away.

    ``words`` are in the reason of the drains.
    """

    words: str
    put: Callable[[KubeJob], None]
    take_back: Callable[[KubeJob], None]


def taint(key: str) -> Sign:
    """A taint of both nodes, with an effect that evicts nobody."""

    def each(job: KubeJob, change: str) -> None:
        for node in NODES:
            job.lab.kubectl("taint", "node", node, f"{key}{change}")

    return Sign(key, lambda job: each(job, "=:NoSchedule"), lambda job: each(job, "-"))


def disruption() -> Sign:
    """The condition that the scheduler gives to pods before it preempts them."""

    def each(job: KubeJob, status: str) -> None:
        condition = {
            **{"type": "DisruptionTarget", "status": status, "reason": "PreemptionByScheduler"},
            "message": "preempting to accommodate a higher priority pod",
            # Of an old one nobody knows that it still holds: Kubernetes takes it back.
            "lastTransitionTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        patch = json.dumps({"status": {"conditions": [condition]}})
        for name in job.names():
            job.kubectl("patch", "pod", name, "--subresource=status", f"--patch={patch}")

    return Sign(
        "PreemptionByScheduler", lambda job: each(job, "True"), lambda job: each(job, "False")
    )


def asked_and_taken_back(sign: Sign, job: LabelledJob) -> Act:
    """All pods are to go, and then are not: held below min, they train on."""

    def act(_: KubeJob, world: World) -> World:
        pods = {f"Pod/{name}" for name in job.names()}
        sign.put(job)
        try:
            job.until(
                lambda: (
                    pods
                    <= {pod for pod, why in told(job, "Draining").items() if sign.words in str(why)}
                ),
                TOLD_S,
                f"all of them drain, with {sign.words} as the reason",
            )
        finally:
            sign.take_back(job)
        job.tell("it is taken back")
        job.goes_on(job.steps.worlds()[-1], STEPS_BETWEEN)
        job.until(job.all_listed, TOLD_S, "no drain is in force any more")
        assert {f"Pod/{name}" for name in job.names()} == pods
        return job.world_of(len(world.nodes))

    return act


@pytest.mark.long
@pytest.mark.parametrize(
    "sign", [taint(SPOT), taint(OUT_OF_SERVICE), disruption()], ids=lambda sign: sign.words
)
def test_a_sign_that_goes_before_the_pods_have_gone_takes_nobody(
    chart: ChartRelease, tmp_path: Path, sign: Sign
) -> None:
    with LabelledJob(chart.lab, tmp_path, AT_MIN) as job:
        job.goes_on(job.world_of(AT_MIN.replicas), STEPS_BETWEEN)
        spared = befall(job, job.steps.worlds()[-1], asked_and_taken_back(sign, job))
        assert (spared.lost, spared.twice, spared.went_on) == (0, 0, True), job.timeline()
        assert len(job.steps.worlds()[-1].nodes) == AT_MIN.replicas


def test_a_node_that_is_drained_is_saved_for_before_the_evictions(
    chart: ChartRelease, tmp_path: Path
) -> None:
    with LabelledJob(chart.lab, tmp_path, DEPLOYMENT) as job:
        job.goes_on(job.world_of(DEPLOYMENT.replicas), STEPS_BETWEEN)
        drained = befall(job, job.steps.worlds()[-1], cordon_and_drain)
        assert (drained.lost, drained.twice, drained.went_on) == (0, 0, True)


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
