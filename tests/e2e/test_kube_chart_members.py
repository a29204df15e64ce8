# SPDX-License-Identifier: Apache-2.0
"""The chart's etcd of three members, with TLS between them, under a job that trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.chart import HelmFailed, rendered
from tests.support.cluster.chart_release import (
    IN_THE_LAB,
    NAMESPACE,
    SNAPSHOTS,
    ChartRelease,
    LabelledJob,
    command,
)
from tests.support.cluster.drills import STEPS_BETWEEN, delete_pod, loses_nothing
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import KubectlFailed, Kubelab
from tests.support.cluster.members import PATIENCE_S, Members
from tests.support.cluster.workload import Workload
from tests.support.training.step_log import World

pytestmark = [pytest.mark.kubelab, pytest.mark.long, pytest.mark.timeout(1800)]

DEPLOYMENT = Workload(kind="Deployment", grace_s=180)
THREE = 3
UPGRADE = "helm upgrade muster charts/muster --namespace muster-system --reuse-values --wait"


@pytest.fixture(scope="module")
def chart(
    kubelab: Kubelab, sidecar_in_lab: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChartRelease]:
    folder = tmp_path_factory.mktemp("members")
    claims = {f"data-muster-etcd-{number}": folder / str(number) for number in range(THREE)}
    claims[SNAPSHOTS] = folder / SNAPSHOTS
    backup = ("etcd.backup.enabled=true", f"etcd.backup.claim={SNAPSHOTS}")
    with ChartRelease(kubelab, f"etcd.replicas={THREE}", *backup, claims=claims) as chart:
        chart.claim_snapshots()
        chart.test()
        yield chart


@pytest.fixture
def members(chart: ChartRelease) -> Members:
    return Members(chart.lab, THREE)


Disturbs = Callable[[LabelledJob, World], World]
"""Does it, and returns the world that is to go on."""


def goes_through(chart: ChartRelease, directory: Path, act: Disturbs) -> None:
    """A job of three pods does not notice what befalls the store, and then drains one of them."""
    with LabelledJob(chart.lab, directory, DEPLOYMENT) as job:

        def unnoticed(_: KubeJob, world: World) -> World:
            after = act(job, world)
            assert job.steps.worlds()[-1] is after, "another world has formed"
            return delete_pod(job, after)

        loses_nothing(job, unnoticed)


def test_another_number_of_members_is_refused(chart: ChartRelease, members: Members) -> None:
    before = members.until_ready()
    with pytest.raises(HelmFailed, match="but muster-etcd runs 3"):
        chart.upgrade("etcd.replicas=1")
    (one,) = [
        each for each in rendered("etcd.replicas=1", *IN_THE_LAB) if each["kind"] == "StatefulSet"
    ]
    with pytest.raises(KubectlFailed, match="Forbidden"):
        chart.lab.apply(NAMESPACE, one)
    assert members.until_ready() == before


def test_one_member_after_the_other_is_killed_and_one_pod_replaced(
    chart: ChartRelease, members: Members, tmp_path: Path
) -> None:
    def act(job: LabelledJob, world: World) -> World:
        for name in members.names:
            before = members.until_ready()
            job.tell(f"{name} is killed")
            members.kill(name)
            job.goes_on(world, STEPS_BETWEEN)
            members.until_in_another_life(before, name)
        before = members.until_ready()
        job.tell("the pod of one is deleted, without any grace")
        members.delete(members.names[1])
        job.goes_on(world, STEPS_BETWEEN)
        members.until_in_another_life(before, members.names[1])
        job.tell("one is killed just before a pod of the job is deleted")
        members.kill(members.names[0])
        return world

    goes_through(chart, tmp_path, act)


def test_an_upgrade_rolls_all_members(
    chart: ChartRelease, members: Members, tmp_path: Path
) -> None:
    def act(job: LabelledJob, world: World) -> World:
        before = members.until_ready()
        job.tell("helm upgrade with another quota")
        chart.upgrade("etcd.quotaBytes=1073741824")
        members.until_in_another_life(before, *members.names)
        job.tell("all members are others")
        job.goes_on(world, STEPS_BETWEEN)
        return world

    goes_through(chart, tmp_path, act)


def test_the_members_certificate_is_renewed_when_it_is_due(
    chart: ChartRelease, members: Members, tmp_path: Path
) -> None:
    def act(job: LabelledJob, world: World) -> World:
        first = members.certificate()
        members.age_certificate()
        aged = members.certificate()
        job.tell("the certificate is 600 days old")
        job.until(
            lambda: members.certificate() not in (first, aged),
            PATIENCE_S,
            "another is in its place",
        )
        job.until(
            lambda: members.shown() == {members.certificate()}, PATIENCE_S, "each member shows it"
        )
        job.tell("each member shows the new one; one is killed, so that all connect anew to it")
        before = members.until_ready()
        members.kill(members.names[2])
        members.until_in_another_life(before, members.names[2])
        job.goes_on(world, STEPS_BETWEEN)
        return world

    goes_through(chart, tmp_path, act)


def test_a_snapshot_of_before_the_present_world_is_restored(
    chart: ChartRelease, members: Members, tmp_path: Path
) -> None:
    def act(job: LabelledJob, world: World) -> World:
        chart.take_snapshot()
        job.tell("a snapshot was taken; it does not know of the next world")
        world = delete_pod(job, world)
        job.goes_on(world, STEPS_BETWEEN)
        before = members.until_ready()
        with pytest.raises(HelmFailed):
            chart.helm(command(f"{UPGRADE} --wait-for-jobs"), "etcd.restore=not-there.db")
        left = ("-l", "app.kubernetes.io/component=restore", "-o", "name")
        assert not chart.kubectl("get", "jobs", *left).strip(), "its Jobs outlive the command"
        job.tell("that file is not there; no member runs, and each has what it had")
        chart.helm(command(f"{UPGRADE} --set"))
        members.until_in_another_life(before, *members.names)
        job.until(job.all_listed, PATIENCE_S, "all pods are listed again, and no other")
        job.goes_on(world, STEPS_BETWEEN)
        before = members.until_ready()
        chart.helm(command(f"{UPGRADE} --wait-for-jobs"))
        job.tell("no member runs, and each has the snapshot")
        job.goes_on(world, STEPS_BETWEEN)
        chart.helm(command(f"{UPGRADE} --set"))
        members.until_in_another_life(before, *members.names)
        job.tell("the members are there again")
        # The page asks for that: a pod that goes before is let go before all have saved.
        job.until(job.all_listed, PATIENCE_S, "all pods are listed again, and no other")
        job.goes_on(world, STEPS_BETWEEN)
        return world

    goes_through(chart, tmp_path, act)
