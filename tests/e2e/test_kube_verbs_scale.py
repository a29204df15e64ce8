# SPDX-License-Identifier: Apache-2.0
"""``muster scaleout`` and ``scalein`` in the cluster, typed on a machine that knows no store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from tests.support.cluster.chart_release import ChartRelease, LabelledJob
from tests.support.cluster.drills import Act, loses_nothing
from tests.support.cluster.job import FORM_TIMEOUT_S
from tests.support.cluster.lab import NODES, Kubelab, Object
from tests.support.cluster.operator_job import ElasticPyTorchJob
from tests.support.cluster.workload import Kind, Workload
from tests.support.training.step_log import World

pytestmark = [pytest.mark.kubelab, pytest.mark.timeout(1200)]

ROOM = "muster.test/room"
"""A resource of the nodes: each pod takes one."""
MOST = 8


class RoomyJob(LabelledJob):
    """A labelled job whose pods need room, and may be as many as ``MOST``."""

    def injected(self, manifest: str, *arguments: str) -> str:
        made: Object = json.loads(super().injected(manifest, *arguments))
        if made["kind"] == "PyTorchJob":
            template = made["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
        else:
            template = made["spec"]["template"]
            template["metadata"]["annotations"] = {
                "muster.dev/min": str(self.workload.least),
                "muster.dev/max": str(self.workload.most),
            }
        (container,) = template["spec"]["containers"]
        container["resources"]["limits"] = {ROOM: "1"}
        return json.dumps(made)

    def until_listed(self, count: int) -> None:
        """Wait until so many members are listed."""

        def listed() -> bool:
            told = json.loads(self._muster("status", "--json"))["members"]
            return [one["state"] for one in told].count("listed") == count

        self.until(listed, FORM_TIMEOUT_S, f"{count} members")

    def set_gather(self, time: str) -> None:
        """Set the gather window."""
        self._muster("set", "--gather", time)

    def _muster(self, *words: str) -> str:
        eldest = self.pods()[0]["metadata"]["name"]
        return self.kubectl("exec", eldest, "-c", "muster", "--", "muster", *words)

    def autoscale(self, replicas: int) -> None:
        """Make the autoscaler of the job want so many, or tell it so."""
        made = self.workload.manifest(self.directory)
        target = {"apiVersion": made["apiVersion"], "kind": made["kind"], "name": "trainer"}
        metric = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}
        spec: Object = {"scaleTargetRef": target, "minReplicas": replicas, "maxReplicas": replicas}
        spec["metrics"] = [{"type": "Resource", "resource": metric}]
        kind = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler"}
        self.apply({**kind, "metadata": {"name": "trainer"}, "spec": spec})

    def scaled(self, status: int, size: int, *words: str) -> World:
        """Type a verb that ends with ``status``; return the world of ``size`` after it."""
        before = self.steps.worlds()[-1]
        done = self.typed(*words)
        assert done.returncode == status, f"{done.stdout}{done.stderr}"
        if size == before.size:
            return before
        return self.until_world(
            lambda world: world.size == size, FORM_TIMEOUT_S, f"a world of {size}", before
        )


@pytest.fixture(scope="module")
def lab(kubelab: Kubelab, sidecar_in_lab: str) -> Iterator[Kubelab]:
    """The lab with the chart, and room for six pods."""
    with ChartRelease(kubelab):
        for node in NODES:
            _room(kubelab, node, "3")
        try:
            yield kubelab
        finally:
            for node in NODES:
                _room(kubelab, node, None)


def _room(lab: Kubelab, node: str, places: str | None) -> None:
    change = json.dumps({"status": {"capacity": {ROOM: places}, "allocatable": {ROOM: places}}})
    lab.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", change)


def of(kind: Kind, replicas: int) -> Workload:
    return Workload(kind, replicas, least=1, most=MOST, grace_s=60, step_s=0.2, cpu="10m")


FEW = of("Deployment", 2)
OF_OPERATOR = ElasticPyTorchJob(replicas=2, least=1, most=MOST, grace_s=60, step_s=0.2, cpu="10m")


def test_what_has_room_stays_and_a_middle_pod_goes(lab: Kubelab, tmp_path: Path) -> None:
    def all_or_nothing(job: RoomyJob, world: World) -> World:
        names = job.names()
        after = job.scaled(4, 4, "scaleout", "--to", "8", "--all-or-nothing", "--timeout", "20s")
        assert job.steps.worlds()[-1].number == world.number, "the world never stopped"
        assert job.names() == names
        return after

    def with_room_for_six(job: RoomyJob, world: World) -> World:
        after = job.scaled(3, 6, "scaleout", "--to", "8", "--timeout", "45s")
        assert len(job.names()) == 6
        return after

    def middle_goes(job: RoomyJob, world: World) -> World:
        middle, names = sorted(job.names())[2], job.names()
        after = job.scaled(0, 5, "scalein", middle)
        assert job.names() == names - {middle}
        return after

    with RoomyJob(lab, tmp_path, of("Deployment", 4)) as job:
        loses_nothing(job, *acts(all_or_nothing, with_room_for_six, middle_goes))


def test_a_middle_pod_of_a_stateful_set_is_refused(lab: Kubelab, tmp_path: Path) -> None:
    def refused(job: RoomyJob, world: World) -> World:
        told = job.typed("scalein", "trainer-1")
        assert told.returncode == 2
        assert "trainer-2 would go, and not trainer-1" in told.stderr
        return world

    def highest_goes(job: RoomyJob, world: World) -> World:
        after = job.scaled(0, 2, "scalein", "--count", "1")
        assert job.names() == {"trainer-0", "trainer-1"}
        return after

    def one_comes(job: RoomyJob, world: World) -> World:
        return job.scaled(0, 3, "scaleout", "--count", "1")

    with RoomyJob(lab, tmp_path, of("StatefulSet", 3)) as job:
        loses_nothing(job, *acts(refused, highest_goes, one_comes))


@pytest.mark.parametrize(
    "workload",
    [FEW, pytest.param(OF_OPERATOR, marks=pytest.mark.long)],
    ids=["Deployment", "PyTorchJob"],
)
def test_an_autoscaler_that_flaps_costs_one_world(
    lab: Kubelab, tmp_path: Path, workload: Workload, request: pytest.FixtureRequest
) -> None:
    """Its bounds are moved: an autoscaler keeps to those, whatever its metrics say."""

    def flaps(job: RoomyJob, world: World) -> World:
        job.autoscale(2)
        job.set_gather("10m")
        for replicas in (4, 2, 4, 2, 4):
            job.autoscale(replicas)
            job.until_listed(replicas)
            assert job.steps.worlds()[-1].number == world.number
        job.set_gather("5s")
        return job.until_world(lambda one: one.size == 4, FORM_TIMEOUT_S, "a world of 4", world)

    if workload is OF_OPERATOR:
        request.getfixturevalue("operator")
    with RoomyJob(lab, tmp_path, workload) as job:
        loses_nothing(job, *acts(flaps))


def acts(*made: Callable[[RoomyJob, World], World]) -> list[Act]:
    """These, as acts on any job."""
    return cast("list[Act]", list(made))
