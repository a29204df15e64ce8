# SPDX-License-Identifier: Apache-2.0
"""A drain in real pods whose sidecar and training container are two users that share no group."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sidecar_image.image import sidecar_archive
from tests.support.cluster.drills import STEPS_BETWEEN, befall, delete_pod
from tests.support.cluster.fixtures import kubelab
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import Kubelab, Object
from tests.support.cluster.workload import Workload

__all__ = ["kubelab"]

pytestmark = [
    pytest.mark.kubelab,
    pytest.mark.timeout(1200),
]

TRAINER = 1000


@dataclass(frozen=True)
class OfAnotherUser(Workload):
    """Its training container is user 1000, with a umask that gives nobody else anything."""

    pod: Object = field(default_factory=dict)
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
        return spec | {"securityContext": self.pod}


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param({}, id="no common group"),
        pytest.param({"fsGroup": 2000}, id="fsGroup", marks=pytest.mark.long),
    ],
)
def test_nothing_is_lost_between_two_users(kubelab: Kubelab, tmp_path: Path, pod: Object) -> None:
    kubelab.command("load", str(sidecar_archive()), timeout_s=300)
    workload = OfAnotherUser(replicas=2, least=1, most=2, shell=True, pod=pod)
    job = KubeJob(kubelab, tmp_path, workload, muster=True)
    for folder in ("steps", "checkpoints", "saves"):
        (job.directory / folder).chmod(0o777)
    with job:
        world = job.world_of(2)
        job.goes_on(world, STEPS_BETWEEN)
        row = befall(job, world, delete_pod)
        users = {
            container: job.kubectl("exec", "trainer-0", "-c", container, "--", "id", "-u").strip()
            for container in ("trainer", "muster")
        }
    assert users == {"trainer": f"{TRAINER}", "muster": "65532"}
    assert (row.lost, row.twice, row.went_on) == (0, 0, True)
