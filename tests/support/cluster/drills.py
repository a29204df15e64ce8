# SPDX-License-Identifier: Apache-2.0
"""What can befall a pod in a real cluster: one list, for the tests and for the table in docs/."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.cluster.account import Account, account
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import NODES, TRAINER_IMAGE, KubectlFailed, Kubelab, Object
from tests.support.cluster.workload import LABEL, NAME, Workload
from tests.support.training.step_log import World

STEPS_BETWEEN = 20

Act = Callable[[KubeJob, World], World]
"""Does it, waits until the job trains as it should then, and returns that world."""


PLAIN = Workload()
LOSING = Workload(replicas=4, unreachable_s=5)

_FILL_MEMORY = """
import os, time
open("/proc/1/oom_score_adj", "w").write("1000")
held = [open("/dev/shm/full", "wb", 0)]
for _ in range(60):
    held[0].write(b"x" * (1 << 20))
os.fork(), os.fork()
for _ in range(20):
    held.append(b"x" * (1 << 20))
    time.sleep(0.02)
time.sleep(10)
"""
"""Fills the sidecar's memory from within, never being the largest of its processes itself."""


@dataclass(frozen=True)
class Drill:
    """Something that befalls a running job."""

    name: str
    act: Act
    workload: Workload = PLAIN
    told: bool = True
    """Whether the pod is told in time, so that nothing may be lost."""
    native: bool = True
    """Whether a job without Muster has the like."""

    @property
    def lossless(self) -> bool:
        """Whether Muster promises that no step is lost, and none trained twice."""
        return self.told and self.workload.grace_s >= self.workload.enough_s


@dataclass(frozen=True)
class Row:
    """One drill, once."""

    drill: Drill
    workload: Workload
    muster: bool
    account: Account


# -- acts


def delete_pod(job: KubeJob, world: World) -> World:
    """``kubectl delete pod`` of one that has not rank 0; another comes."""
    return _delete(job, world, _another(world))


def delete_rank_0(job: KubeJob, world: World) -> World:
    """``kubectl delete pod`` of the one with rank 0."""
    return _delete(job, world, world.workers[0].node)


def delete_by_force(job: KubeJob, world: World) -> World:
    """No grace at all."""
    return _delete(job, world, _another(world), "--force", "--grace-period=0")


def evict(job: KubeJob, world: World) -> World:
    """The eviction API under a PodDisruptionBudget, which refuses a second one meanwhile."""
    job.apply(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": NAME},
            "spec": {
                "minAvailable": job.workload.replicas - 1,
                "selector": {"matchLabels": {"app": NAME}},
            },
        }
    )
    job.until(
        lambda: (
            job.lab.get(job.namespace, "poddisruptionbudget", NAME)
            .get("status", {})
            .get("disruptionsAllowed")
            == 1
        ),
        30,
        "the budget allows one disruption",
    )
    pod, other = _another(world), world.workers[0].node
    job.tell(f"{pod} is evicted")
    _evict(job, pod)
    try:
        _evict(job, other)
    except KubectlFailed as error:
        assert "disruption budget" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("the budget let two pods go")
    again = job.world_of(len(world.nodes), job.patience_s, not_=world)
    job.kubectl("delete", "poddisruptionbudget", NAME)
    return again


def drain_node(job: KubeJob, world: World) -> World:
    """``kubectl drain`` of a node; its pods come back on the other one."""
    node = "node-b"
    leaving = {p["metadata"]["name"] for p in job.pods() if p["spec"].get("nodeName") == node}
    if not leaving:
        raise RuntimeError(f"no pod runs on {node}")
    job.tell(f"kubectl drain {node}: {', '.join(sorted(leaving))}")
    try:
        job.lab.kubectl(
            *("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force"),
            f"--pod-selector={LABEL}",
            timeout_s=120,
        )
        return job.world_of(len(world.nodes), job.patience_s, not_=world)
    finally:
        job.lab.kubectl("uncordon", node)


def roll_out(job: KubeJob, world: World) -> World:
    """``kubectl rollout restart``: every pod is replaced, one after another."""
    job.tell("kubectl rollout restart")
    uids = {pod["metadata"]["uid"] for pod in job.pods()}
    job.kubectl("rollout", "restart", f"{job.workload.kind.lower()}/{NAME}")
    job.until(
        lambda: not uids & {pod["metadata"]["uid"] for pod in job.lab.pods(job.namespace, LABEL)},
        job.patience_s + len(uids) * job.workload.min_ready_s,
        "every pod is another one",
    )
    return job.world_of(len(world.nodes), job.patience_s, not_=world)


def scale_up(job: KubeJob, world: World) -> World:
    """``kubectl scale`` by one."""
    job.scale(len(world.nodes) + 1)
    return job.world_of(len(world.nodes) + 1, job.patience_s, not_=world)


def scale_down(job: KubeJob, world: World) -> World:
    """``kubectl scale`` back by one: where pods have an index, the one with the highest goes."""
    job.scale(len(world.nodes) - 1)
    highest = [] if job.workload.kind == "Deployment" else [max(world.nodes)]
    return job.world_of(len(world.nodes) - 1, job.patience_s, not_=world, without=highest)


def preempt(job: KubeJob, world: World) -> World:
    """A pod of a higher priority takes the place of one; the job grows back when it has ended."""
    name = f"urgent-{job.namespace}"
    job.apply(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": name},
            "value": 1000,
        }
    )
    urgent: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "urgent"},
        "spec": {
            "priorityClassName": name,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "sleep",
                    "image": TRAINER_IMAGE,
                    "imagePullPolicy": "Never",
                    "command": ["sleep", "1000"],
                    "resources": {"requests": {"cpu": "1500m"}},
                }
            ],
        },
    }
    try:
        job.tell("a pod of a higher priority comes")
        job.apply(urgent)
        job.kubectl("wait", "--for=condition=Ready", "pod/urgent", "--timeout=180s", timeout_s=190)
        smaller = job.world_of(len(world.nodes) - 1, job.patience_s, not_=world)
        job.goes_on(smaller, STEPS_BETWEEN)
        job.tell("it has ended")
        job.kubectl("delete", "pod", "urgent")
        return job.world_of(len(world.nodes), job.patience_s, not_=smaller)
    finally:
        job.lab.kubectl("delete", "priorityclass", name, "--ignore-not-found")


def kill_sidecar(job: KubeJob, world: World) -> World:
    """The sidecar is killed for its memory; training does not notice, and it comes back."""
    pod = _another(world)
    before = _sidecar_status(job, pod)["restartCount"]
    job.tell(f"the sidecar of {pod} runs out of memory")
    # As the API writes it, to whole seconds.
    filled_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    # It is killed with all that runs in its container.
    with suppress(KubectlFailed):
        job.kubectl("exec", pod, "-c", "muster", "--", "python3", "-c", _FILL_MEMORY)
    job.until(
        lambda: _sidecar_status(job, pod)["restartCount"] > before,
        60,
        "the sidecar has been started again",
    )
    job.until(
        lambda: _ran_out_of_memory(
            _sidecar_status(job, pod)["lastState"].get("terminated", {}), filled_at
        ),
        30,
        "it was killed for its memory",
    )
    job.until(lambda: _sidecar_status(job, pod)["ready"], 60, "the sidecar is ready again")
    assert job.steps.worlds()[-1] is world, "another world has formed"
    job.goes_on(world, STEPS_BETWEEN)
    return world


def delete_etcd(job: KubeJob, world: World) -> World:
    """etcd's pod is deleted; another comes, with the same data and another address."""
    job.tell("etcd's pod is deleted")
    job.kubectl("delete", "pod", "etcd-0")
    job.until_etcd_is_ready()
    job.tell("etcd is back")
    job.goes_on(world, 2 * STEPS_BETWEEN)
    return _delete(job, world, _another(world))


def lose_node(job: KubeJob, world: World) -> World:
    """A machine is gone: its cables, its kubelet, its containers; and comes back.

    A StatefulSet replaces no pod of it until then: nobody knows that it does not run. It is not the
    machine that etcd, or rank 0's pod of a job without Muster, runs on.
    """
    hosts = job.lab.get(job.namespace, "pod", "etcd-0" if job.muster else f"{NAME}-0")
    (node,) = {*NODES} - {hosts["spec"]["nodeName"]}
    lost = {p["metadata"]["name"] for p in job.pods() if p["spec"].get("nodeName") == node}
    if not 0 < len(lost) <= len(world.nodes) - job.workload.least:
        raise RuntimeError(f"a drill needs other pods on {node} than {sorted(lost)}")
    job.tell(f"{node} is lost: {', '.join(sorted(lost))}")
    job.lab.command("lose", node)
    try:
        smaller = job.world_of(
            len(world.nodes) - len(lost), job.patience_s, not_=world, without=lost
        )
        job.goes_on(smaller, STEPS_BETWEEN)
    finally:
        job.lab.command("restore", node)
        job.lab.kubectl(
            *("wait", "--for=condition=Ready", f"node/{node}", "--timeout=180s"), timeout_s=190
        )
    return job.world_of(len(world.nodes), job.patience_s, not_=smaller)


# -- what acts are made of


def _another(world: World) -> str:
    """A pod that has not rank 0, and, of a StatefulSet, not torch's own store."""
    others = world.nodes - {world.workers[0].node}
    return max(others)


def _delete(job: KubeJob, world: World, pod: str, *how: str) -> World:
    job.tell(f"kubectl delete pod {pod} {' '.join(how)}")
    job.kubectl("delete", "pod", pod, "--wait=false", *how)
    return job.world_of(len(world.nodes), job.patience_s, not_=world)


def _evict(job: KubeJob, pod: str) -> None:
    path = f"/api/v1/namespaces/{job.namespace}/pods/{pod}/eviction"
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": job.namespace},
    }
    job.lab.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


def _sidecar_status(job: KubeJob, pod: str) -> Object:
    found = job.lab.get(job.namespace, "pod", pod)
    statuses: list[Object] = found["status"]["initContainerStatuses"]
    (status,) = (status for status in statuses if status["name"] == "muster")
    return status


def _ran_out_of_memory(end: Object, filled_at: str) -> bool:
    # A life that a probe ended has the same signal, but is one that began after the memory's.
    if not (end.get("startedAt") or "") <= filled_at <= (end.get("finishedAt") or ""):
        return False
    # A busy runtime may miss what the kernel tells it of the memory, and has only the signal then.
    return end.get("reason") == "OOMKilled" or (end.get("reason"), end.get("exitCode")) == (
        "Error",
        128 + signal.SIGKILL,
    )


# -- the list

_SHORT = (2, 10)
DRILLS = (
    Drill("`kubectl delete pod`", delete_pod),
    Drill("`kubectl delete pod`, rank 0's", delete_rank_0),
    Drill("eviction under a PodDisruptionBudget", evict),
    Drill("`kubectl drain` of a node", drain_node),
    Drill("`kubectl scale` up", scale_up),
    Drill("`kubectl scale` down", scale_down),
    Drill("sidecar killed for its memory", kill_sidecar, native=False),
    Drill("etcd's pod deleted, then one of the job's", delete_etcd, native=False),
    Drill("`kubectl delete --force --grace-period=0`", delete_by_force, told=False),
    # On both nodes as many, so that those left are enough to go on.
    Drill("node lost, half the pods on it", lose_node, LOSING, told=False),
    *(Drill(f"`kubectl delete pod`, {s} s", delete_pod, Workload(grace_s=s)) for s in _SHORT),
    Drill("`kubectl delete pod`, `sh -c`", delete_pod, Workload(shell=True)),
    # Else the next pod goes once the one in place is ready, before it has made a step.
    Drill("rolling update of a Deployment", roll_out, Workload(kind="Deployment", min_ready_s=20)),
    Drill("preempted by a higher priority, then back", preempt, Workload(cpu="900m")),
)


# -- running them


def series(drills: Sequence[Drill]) -> list[list[Drill]]:
    """Drills that one job can go through, one after another, together."""
    found: dict[Workload, list[Drill]] = {}
    for drill in drills:
        found.setdefault(drill.workload, []).append(drill)
    return list(found.values())


def run(
    lab: Kubelab, directory: Path, drills: Sequence[Drill], *, slots: int, muster: bool
) -> Iterator[Row]:
    """Let a job go through drills of one workload; one that does not go on is made anew.

    The timeline of one that does not go on lies in its directory.
    """
    left = [drill for drill in drills if muster or drill.native]
    while left:
        workload = replace(left[0].workload, slots=slots)
        if not muster and workload.kind == "Deployment":
            # torch's rendezvous needs a pod with a name that is known before.
            workload = replace(workload, kind="StatefulSet")
        with KubeJob(lab, directory, workload, muster=muster) as job:
            world = job.world_of(workload.replicas)
            job.goes_on(world, STEPS_BETWEEN)
            while left:
                drill = left.pop(0)
                told = befall(job, world, drill.act)
                yield Row(drill, workload, muster, told)
                if not told.went_on:
                    break
                world = job.steps.worlds()[-1]


def befall(job: KubeJob, world: World, act: Act, *, strictly: bool = False) -> Account:
    """Let something befall a job that trains, and account for what became of it.

    ``strictly``: what the act asserts is raised. Else the account tells of a job that stands.
    """
    since_s = time.monotonic()
    watched = False
    try:
        after = act(job, world)
        job.goes_on(after, STEPS_BETWEEN)
        watched = True
    except AssertionError as error:
        if strictly:
            raise
        # That is what the row is to tell.
        job.tell(f"the job does not go on: {error}")
    until_s = time.monotonic()
    return account(job.steps.directory, since_s, until_s, saved_step(job), watched=watched)


def loses_nothing(job: KubeJob, *acts: Act) -> None:
    """Assert that a job trains, goes on after each act, and loses no step nor makes one twice."""
    job.goes_on(job.world_of(job.workload.replicas), STEPS_BETWEEN)
    for act in acts:
        told = befall(job, job.steps.worlds()[-1], act, strictly=True)
        assert (told.lost, told.twice, told.went_on) == (0, 0, True), act.__name__


def saved_step(job: KubeJob) -> int:
    """The newest step on disk."""
    saves = (job.directory / "checkpoints").glob("*.json")
    return max((int(json.loads(path.read_text())["step"]) for path in saves), default=0)
