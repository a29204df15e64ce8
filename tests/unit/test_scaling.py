# SPDX-License-Identifier: Apache-2.0
"""Who goes and who comes when a job is scaled: decisions on snapshots of owners and pods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from console.remote.pods import JobPod
from console.remote.scaled_owner import (
    OperationClaim,
    ScaledOwner,
    ScaledPod,
    claim_of,
    claim_patch,
    claim_refusal,
    joined,
    scaled_owner,
    scaled_pod,
)
from console.remote.scaling_plan import (
    COST,
    ScaleOutPlan,
    WhoLeaves,
    ahead_of,
    arrival,
    came,
    departure,
    hosts,
    waiting,
    withdrawn,
)
from controller.owner_kinds import Owner
from injection.kinds import KINDS
from rdzv.errors import ConfigError
from rdzv.records.policy import JobPolicy

SIZES = JobPolicy(1, 4)
WORKER = "spec.pytorchReplicaSpecs.Worker.template"


def owner(group: str, kind: str, name: str, count: int) -> ScaledOwner:
    way = KINDS[group, kind].scaled
    assert way is not None
    return ScaledOwner(kind, name, f"/p/{name}", count, way)


SET = owner("apps", "StatefulSet", "sts", 3)
DEPLOYMENT = owner("apps", "Deployment", "dep", 3)


def pod(name: str, **fields: Any) -> ScaledPod:
    """A pod that trains."""
    index = int(name.rpartition("-")[2]) if name.rpartition("-")[2].isdecimal() else -1
    made = {"index": index, "node": "a", "state": "listed", "doing": "training", "maker": "rs"}
    return ScaledPod(name, **{**made, **fields})


STS = [pod(f"sts-{index}") for index in range(3)]
DEP = [pod(f"dep-{letter}", created_s=at) for at, letter in enumerate("abc")]
PENDING: dict[str, Any] = {
    "node": "", "pending": True, "ready": False, "state": "", "doing": "", "why": "no room"
}  # fmt: skip


def who(owner: ScaledOwner, pods: list[ScaledPod], selection: WhoLeaves, **more: Any) -> Any:
    found, why = departure(owner, pods, more.pop("sizes", SIZES), selection, **more)
    return ([one.name for one in found.pods], found.count) if found else why


def test_the_highest_indexes_go_and_another_pod_is_refused_with_who_would() -> None:
    assert who(SET, STS, WhoLeaves(count=2)) == (["sts-2", "sts-1"], 1)
    why = who(SET, STS, WhoLeaves(names=("sts-0",)))
    assert "sts-2 would go, and not sts-0" in why
    assert "--count 1 takes sts-2; --idle drains sts-0" in why
    assert who(SET, STS, WhoLeaves(names=("sts-2",))) == (["sts-2"], 2)


def test_idle_leaves_the_count() -> None:
    assert who(SET, STS, WhoLeaves(names=("sts-0",)), idle=True) == (["sts-0"], None)


def test_a_middle_pod_of_a_deployment_goes() -> None:
    assert who(DEPLOYMENT, DEP, WhoLeaves(names=("dep-b",))) == (["dep-b"], 2)


def test_a_deployment_without_names_loses_what_trains_last() -> None:
    assert who(DEPLOYMENT, DEP, WhoLeaves(count=1)) == (["dep-c"], 2)
    standby = [*DEP[:2], pod("dep-c", created_s=-1, state="standby", doing="standby")]
    assert who(DEPLOYMENT, standby, WhoLeaves(count=1)) == (["dep-c"], 2)
    late = [*DEP[:2], pod("dep-p", **PENDING)]
    assert who(DEPLOYMENT, late, WhoLeaves(count=1)) == (["dep-p"], 2)
    assert "takes dep-p first" in who(DEPLOYMENT, late, WhoLeaves(names=("dep-b",)))


def test_a_roll_out_is_waited_for() -> None:
    rolled = [*DEP[:2], pod("dep-x", maker="new")]
    assert "being rolled out" in who(DEPLOYMENT, rolled, WhoLeaves(count=1))


def test_spot_and_node_choose() -> None:
    spot = [*DEP[1:], pod("dep-s", created_s=-5, spot=True)]
    assert who(DEPLOYMENT, spot, WhoLeaves(count=1, spot_first=True)) == (["dep-s"], 2)
    there = [*DEP[:2], pod("dep-n", node="b")]
    assert who(DEPLOYMENT, there, WhoLeaves(node="b")) == (["dep-n"], 2)
    assert "they are on a, b" in who(DEPLOYMENT, there, WhoLeaves(node="c"))
    mixed = [pod("sts-0", spot=True), *STS[1:]]
    assert "sts-2 would go" in who(SET, mixed, WhoLeaves(count=1, spot_first=True))


def test_the_slowest_is_the_one_that_waits_least() -> None:
    told = [replace(one, waits=share) for one, share in zip(DEP, (0.62, 0.04, 0.7), strict=True)]
    slowest = WhoLeaves(slowest=True)
    assert who(DEPLOYMENT, told, slowest) == (["dep-b"], 2)
    assert who(DEPLOYMENT, told, replace(slowest, count=2)) == (["dep-b", "dep-a"], 1)
    found, why = departure(DEPLOYMENT, told, SIZES, slowest)
    assert found is not None
    assert why == "dep-b waits 4% of its time, the others 62% or more"
    late = [*told, pod("dep-p", **PENDING)]
    assert "takes dep-p first" in who(DEPLOYMENT, late, slowest)
    assert "dep-b reports no share of waiting" in who(
        DEPLOYMENT, [told[0], DEP[1], told[2]], slowest
    )
    assert "no pod trains" in who(DEPLOYMENT, [replace(DEP[0], doing="ready")], slowest)
    assert "sts-2 would go, and not sts-0" in who(
        SET, [replace(STS[0], waits=0.0), *(replace(one, waits=0.5) for one in STS[1:])], slowest
    )


def test_min_is_named() -> None:
    why = who(SET, STS, WhoLeaves(count=1), sizes=JobPolicy(3, 4))
    assert (
        why == "2 pods would be left to train, and min is 3: lower it first by muster set --min 2"
    )
    late = [*DEP[:2], pod("dep-p", **PENDING)]
    why = who(DEPLOYMENT, late, WhoLeaves(names=("dep-a",)), sizes=JobPolicy(2, 4))
    assert "1 pod would be left to train, and min is 2" in why
    assert who(DEPLOYMENT, late, WhoLeaves(count=1), sizes=JobPolicy(2, 4)) == (["dep-p"], 2)
    assert "min is 3" in who(
        SET, STS, WhoLeaves(names=("sts-0",)), sizes=JobPolicy(3, 4), idle=True
    )


def test_a_name_that_is_wrong_is_answered_with_the_right_ones() -> None:
    assert "did you mean dep-a?" in who(DEPLOYMENT, DEP, WhoLeaves(names=("dep-aa",)))


def test_pods_that_go_already_are_not_chosen_again() -> None:
    going = [*STS, pod("sts-3", deleting=True)]
    assert who(SET, going, WhoLeaves(count=1)) == (["sts-2"], 2)


def test_a_replica_set_takes_the_lowest_cost_of_those_that_are_alike() -> None:
    chosen = pod("dep-b", cost=COST)
    assert ahead_of([DEP[0], chosen, DEP[2]], ["dep-b"]) == []
    starting = pod("dep-d", ready=False)
    assert ahead_of([DEP[0], chosen, starting], ["dep-b"]) == [starting]
    drained = pod("dep-b", cost=COST, ready=False)
    assert ahead_of([DEP[0], drained, starting], ["dep-b"]) == []


def asked_for(count: int, sizes: JobPolicy = SIZES, *, raises_max: bool = False) -> ScaleOutPlan:
    found, _ = arrival(SET, sizes, count, raises_max=raises_max)
    assert found is not None
    return found


def test_scale_out_keeps_to_the_bounds() -> None:
    found = asked_for(4)
    assert (found.before, found.count, found.most) == (3, 4, None)
    assert asked_for(6, raises_max=True).most == 6
    _, why = arrival(SET, JobPolicy(2, 8, unit=2), 5, raises_max=False)
    assert "1 of them will stand by" in why


@pytest.mark.parametrize(
    ("sizes", "count", "said"),
    [
        (SIZES, 6, "max is 4, and pods beyond it only stand by: add --max"),
        (JobPolicy(5, 8), 4, "min is 5"),
        (SIZES, 2, "muster scalein"),
    ],
)
def test_a_scale_out_that_cannot_be_is_refused(sizes: JobPolicy, count: int, said: str) -> None:
    none, why = arrival(SET, sizes, count, raises_max=False)
    assert none is None
    assert said in why


def test_what_came_stays() -> None:
    asked = asked_for(8, JobPolicy(1, 8))
    pods = [pod(f"sts-{index}") for index in range(6)]
    pods += [pod(f"sts-{index}", **PENDING) for index in (6, 7)]
    judged = came(asked, pods)
    assert (judged.count, judged.complete, judged.trains) == (6, False, False)
    gone, told = withdrawn(SET, pods, judged.count)
    assert [one.name for one in gone] == ["sts-6", "sts-7"]
    assert told == "2 pods withdrawn: sts-6, sts-7"
    assert waiting(pods).startswith("sts-6 not started (no room)")
    assert came(asked, pods[:2]).count == 3, "never below what there was"
    hole = [*pods[:4], pod("sts-4", **PENDING), pod("sts-5")]
    _, told = withdrawn(SET, hole, came(asked, hole).count)
    assert "sts-5 had come" in told


def test_all_that_came_train_before_it_is_done() -> None:
    asked = asked_for(4)
    waits = [*STS, pod("sts-3", doing="waiting")]
    assert came(asked, waits).complete
    assert not came(asked, waits).trains
    assert came(asked, waits, paused=True).trains
    assert came(asked, [*STS, pod("sts-3")]).trains
    held = [*STS, pod("sts-3", state="standby", doing="standby")]
    assert not came(asked, held).trains
    assert came(asked_for(4, JobPolicy(2, 8, unit=3)), held).trains


def test_hosts_of_a_horovodrun_differ_by_what_their_ranks_report() -> None:
    asked = asked_for(4)
    assert hosts([*STS, pod("sts-3")], "digits") == ""
    told = [*STS, pod("sts-3", doing="ready")]
    assert came(asked, told).listed
    assert hosts(told, "digits") == (
        "4 pods are ready and listed hosts of horovodrun; no rank on sts-3 has reported a step, so"
        " whether it trains there is not known: muster logs digits shows its lines"
    )
    held = [*STS, pod("sts-3", state="standby", doing="standby")]
    assert came(asked, held).complete
    assert not came(asked, held).listed


def test_one_operation_at_a_time() -> None:
    claim = OperationClaim("scaleout to 8", "me@desk", 100.0, "t")
    held = claim_of(claim_patch(claim))
    assert held == claim
    assert "me@desk runs scaleout to 8 on it, until 1970-01-01T00:01:40Z" in claim_refusal(
        held, 99.0
    )
    assert claim_refusal(held, 100.0) == ""
    assert claim_of({"metadata": {"annotations": {"muster.dev/scaling": "?"}}}) is None


def of(version: str, kind: str, spec: dict[str, Any], path: str | None = "/p") -> ScaledOwner:
    return scaled_owner(Owner(version, kind, "d", "spec.template"), path, {"spec": spec})


def test_each_owner_is_changed_by_its_own_means() -> None:
    assert of("apps/v1", "Deployment", {"replicas": 3}).change(4) == (
        "/p/scale",
        {"spec": {"replicas": 4}},
    )
    job = {"completionMode": "Indexed", "completions": 3, "parallelism": 3}
    assert of("batch/v1", "Job", job).change(2) == (
        "/p",
        {"spec": {"completions": 2, "parallelism": 2}},
    )
    torch = {"pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": 2}}}
    made = of("kubeflow.org/v1", "PyTorchJob", torch)
    assert made.count == 3
    patch = made.change(5)[1]
    assert patch == {"spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 4}}}}
    assert made.count_in(patch) == 5
    mpi = {"mpiReplicaSpecs": {"Launcher": {"replicas": 1}, "Worker": {"replicas": 2}}}
    assert of("kubeflow.org/v1", "MPIJob", mpi).change(1) == (
        "/p",
        {"spec": {"mpiReplicaSpecs": {"Worker": {"replicas": 1}}}},
    )


@pytest.mark.parametrize(
    ("version", "kind", "spec", "told"),
    [
        ("jobset.x-k8s.io/v1alpha2", "JobSet", {}, "kubectl edit jobset/d"),
        ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", {}, "kubectl scale leaderworkersets/d"),
        ("batch.volcano.sh/v1alpha1", "Job", {}, "kubectl edit jobs.batch.volcano.sh/d"),
        ("batch/v1", "Job", {"parallelism": 3}, "is not Indexed"),
        (
            "batch/v1",
            "Job",
            {"completionMode": "Indexed", "completions": 9, "parallelism": 3},
            "only if they are equal",
        ),
        ("example.org/v1", "Thing", {}, "kubectl edit thing/d"),
    ],
)
def test_other_owners_are_refused_with_a_command(
    version: str, kind: str, spec: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        of(version, kind, spec)


def test_a_pod_is_read_with_its_member() -> None:
    of_job = Owner("batch/v1", "Job", "d", "spec.template")
    of_torch = Owner("kubeflow.org/v1", "PyTorchJob", "w", WORKER)
    seen = JobPod(
        "n",
        "d-2-x7k4q",
        "u",
        node="a",
        phase="Running",
        ready=True,
        owner=of_job,
        maker=("Job", "d"),
    )
    member = {"name": "d-2-x7k4q", "state": "listed", "doing": "training", "step": 7}
    launcher = ScaledPod("d-launcher", launcher=True)
    job = owner("batch", "Job", "d", 1)
    (found,) = joined([scaled_pod(seen), launcher, ScaledPod("old", over=True)], job, [member])
    assert (found.index, found.node, found.maker) == (2, "a", "d")
    assert found.takes_part
    assert found.described == "training at step 7"
    named = scaled_pod(JobPod("n", "w-worker-3", "u", owner=of_torch))
    assert named.index == 3
    assert not named.takes_part
    labelled = {"batch.kubernetes.io/job-completion-index": "4"}
    assert scaled_pod(JobPod("n", "x", "u", labels=labelled)).index == 4


def test_a_master_and_a_launcher_are_not_scaled() -> None:
    torch = owner("kubeflow.org", "PyTorchJob", "w", 3)
    mpi = owner("kubeflow.org", "MPIJob", "m", 1)
    worker = Owner("kubeflow.org/v1", "PyTorchJob", "w", WORKER)
    master = replace(worker, path=WORKER.replace("Worker", "Master"))
    paths = {"w-master-0": master, "w-worker-0": worker}
    pods = [scaled_pod(JobPod("n", name, "u", owner=of)) for name, of in paths.items()]
    assert {one.name: one.fixed for one in joined(pods, torch, [])} == {
        "w-master-0": True,
        "w-worker-0": False,
    }
    launcher = Owner("kubeflow.org/v1", "MPIJob", "m", "spec.mpiReplicaSpecs.Launcher.template")
    assert joined([scaled_pod(JobPod("n", "m-launcher", "u", owner=launcher))], mpi, []) == ()
