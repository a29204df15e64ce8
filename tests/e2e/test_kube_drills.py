# SPDX-License-Identifier: Apache-2.0
"""Pods of a real cluster come and go under a real torchrun: nothing is lost that need not be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.account import account
from tests.support.cluster.drills import (
    DRILLS,
    Drill,
    befall,
    delete_pod,
    delete_rank_0,
    kill_sidecar,
    run,
    scale_down,
    series,
)
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import Kubelab, Object
from tests.support.cluster.workload import GRACE_S, NAME, Workload

pytestmark = [pytest.mark.kubelab, pytest.mark.timeout(1200)]

TRAINER = 1000


@dataclass(frozen=True)
class OfAnotherUser(Workload):
    """Its training container is user 1000, with a umask that gives nobody else anything.

    That of the sidecar is 65532, as its image says; they share no group without ``fsGroup``.
    """

    security: Object = field(default_factory=dict)
    """The pod's ``securityContext``."""

    def _pod(self, directory: Path) -> Object:
        spec = super()._pod(directory)
        (container,) = spec["containers"]
        assert container["command"][:2] == ["sh", "-c"]
        container["command"][2] = f"umask 077; exec {container['command'][2]}"
        container["securityContext"] = {"runAsUser": TRAINER, "runAsGroup": TRAINER}
        # The Python of the tests may lie below root's home, which is closed to others.
        spec["volumes"].append({"name": "home", "emptyDir": {}})
        container["volumeMounts"].insert(0, {"name": "home", "mountPath": "/root"})
        return spec | {"securityContext": self.security}


def goes_through(kubelab: Kubelab, directory: Path, drills: Sequence[Drill], slots: int) -> None:
    """Assert that a job with Muster goes through drills, and loses nothing that it need not."""
    for row in run(kubelab, directory, drills, slots=slots, muster=True):
        assert row.account.went_on, row.drill.name
        if row.drill.lossless:
            assert (row.account.lost, row.account.twice) == (0, 0), row.drill.name


@pytest.mark.parametrize(
    "security",
    [
        pytest.param({}, id="no common group"),
        pytest.param({"fsGroup": 2000}, id="fsGroup", marks=pytest.mark.long),
    ],
)
def test_rank_0_is_deleted_and_a_sidecar_of_another_user_killed_and_no_step_is_lost(
    kubelab: Kubelab, sidecar_in_lab: str, tmp_path: Path, security: Object
) -> None:
    # A lease that a killed sidecar is back in time for on a slow machine, too.
    sizes: dict[str, Any] = {"replicas": 2, "least": 1, "most": 3, "grace_s": GRACE_S}
    everyday = OfAnotherUser(**sizes, lease_ttl="60s", shell=True, security=security)
    drills = [
        Drill("sidecar killed for its memory", kill_sidecar, everyday),
        Drill("kubectl delete pod, rank 0's", delete_rank_0, everyday),
    ]
    goes_through(kubelab, tmp_path, drills, slots=1)
    assert {path.stat().st_uid for path in tmp_path.glob("*/steps/*")} == {TRAINER}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("drills", series(DRILLS), ids=lambda drills: drills[0].act.__name__)
def test_a_job_goes_through_every_drill(
    kubelab: Kubelab, sidecar_in_lab: str, tmp_path: Path, drills: list[Drill], slots: int
) -> None:
    goes_through(kubelab, tmp_path, drills, slots)


INDEX = "batch.kubernetes.io/job-completion-index"


@pytest.mark.long
def test_an_indexed_job_makes_a_pod_again_and_drops_the_highest_index(
    kubelab: Kubelab, sidecar_in_lab: str, tmp_path: Path
) -> None:
    """As in docs/kubernetes.md: what is drained is no failure of the Job."""
    with KubeJob(kubelab, tmp_path, Workload(kind="Job", grace_s=GRACE_S), muster=True) as job:
        world = job.world_of(3)
        job.goes_on(world)
        for act, left in ((delete_pod, {"0", "1", "2"}), (scale_down, {"0", "1"})):
            told = befall(job, world, act)
            assert told.went_on, act.__name__
            assert (told.lost, told.twice) == (0, 0), act.__name__
            assert {pod["metadata"]["labels"][INDEX] for pod in job.pods()} == left, act.__name__
            world = job.steps.worlds()[-1]
        status = job.lab.get(job.namespace, "job", NAME)["status"]
        assert status.get("failed", 0) == 0, status
        assert not status.get("failedIndexes"), status


@pytest.mark.long
def test_a_replica_set_drops_the_pod_that_is_drained(
    kubelab: Kubelab, sidecar_in_lab: str, tmp_path: Path
) -> None:
    workload = Workload(kind="Deployment", grace_s=GRACE_S)
    with KubeJob(kubelab, tmp_path, workload, muster=True) as job:
        world = job.world_of(3)
        began_s = time.monotonic()
        # The oldest, with the longest time ready, is what a ReplicaSet would drop last.
        pod = job.pods()[0]["metadata"]["name"]
        job.kubectl(
            *("exec", pod, "-c", "muster", "--", "muster", "drain", pod, f"--job={NAME}", "--wait"),
            *(f"--namespace={job.namespace}", "--etcd-endpoints=etcd:2379"),
        )
        smaller = job.world_of(2, not_=world, without=[pod])
        job.kubectl("wait", "--for=condition=Ready=false", f"pod/{pod}", "--timeout=30s")
        job.scale(2)
        job.until(lambda: len(job.names()) == 2, 30, "two pods are left")
        assert job.names() == smaller.nodes
        job.goes_on(smaller)
        told = account(job.steps.directory, began_s, time.monotonic(), 0, watched=True)
        assert (told.lost, told.twice) == (0, 0)
