# SPDX-License-Identifier: Apache-2.0
"""Signs of an end to come, of a pod or its node: what they lead to, and what takes them back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.cluster.chart_release import LabelledJob
from tests.support.cluster.drills import STEPS_BETWEEN, Act
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import NODES
from tests.support.cluster.workload import LABEL
from tests.support.training.step_log import World

TOLD_S = 120.0


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
            timeout_s=job.workload.grace_s + 60,
        )
        return job.world_of(len(world.nodes), job.patience_s, not_=world)
    finally:
        job.lab.kubectl("uncordon", node)


def cordoned_for_a_moment(job: KubeJob, world: World) -> World:
    """A node is cordoned, and put back once a pod of it has been let go: the pod trains again."""
    placed = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in job.pods()}
    node = placed[world.workers[max(world.workers)].node]
    there = {f"Pod/{name}" for name, where in placed.items() if where == node}
    before = {pod: len(said) for pod, said in told(job, "Committed").items()}

    def saved() -> bool:
        now = told(job, "Committed")
        return any(len(now.get(pod, ())) > before.get(pod, 0) for pod in there)

    job.tell(f"{node} is cordoned: {sorted(there)}")
    job.lab.kubectl("cordon", node)
    try:
        job.until(saved, TOLD_S, "one of its pods is saved for, and let go")
    finally:
        job.lab.kubectl("uncordon", node)
    job.tell(f"{node} is put back")
    again = job.world_of(len(world.nodes), job.patience_s, not_=world)
    assert again.nodes == world.nodes, "no pod was replaced"
    job.until(lambda: all_listed(job), TOLD_S, "no drain is in force any more")
    return again


def all_listed(job: KubeJob) -> bool:
    """Whether ``muster status`` of one of the job's pods lists them all."""
    assert isinstance(job, LabelledJob)
    return job.all_listed()


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
