# SPDX-License-Identifier: Apache-2.0
"""The chart's monitoring in a drill: each query has data, an alert comes, a backup has an age."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.chart import expressions, rendered
from tests.support.cluster.chart_release import (
    IN_THE_LAB,
    NAMESPACE,
    SNAPSHOT_TIMEOUT_S,
    SNAPSHOTS,
    ChartRelease,
    LabelledJob,
    command,
)
from tests.support.cluster.drills import delete_pod, loses_nothing
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import Kubelab
from tests.support.cluster.members import Members
from tests.support.cluster.prometheus import Prometheus, judged
from tests.support.cluster.workload import GRACE_S, Workload
from tests.support.training.step_log import World

pytestmark = [pytest.mark.kubelab, pytest.mark.long, pytest.mark.timeout(1800)]

DEPLOYMENT = Workload(kind="Deployment", grace_s=GRACE_S)
ALONE = Workload(kind="Deployment", replicas=1)
"""One pod of a job that needs two: no world of it ever trains."""
PATIENCE_S = 180.0
MINUTES_S = 420.0
"""An alert comes after five, and each evaluation after a scrape."""
ALERT = "MusterPodWithoutSidecar"
AGE = "time() - max(muster_controller_backup_timestamp_seconds > 0)"
NO_WATCH = "count(muster_watch_healthy_seconds == 0)"
KINDS = {"PodMonitor", "PrometheusRule"}


@pytest.fixture
def chart(monitoring: Kubelab, sidecar_in_lab: str, tmp_path: Path) -> Iterator[ChartRelease]:
    claims = {"data-muster-etcd-0": tmp_path / "records", SNAPSHOTS: tmp_path / SNAPSHOTS}
    values = [f"monitoring.{part}=true" for part in ("podMonitors", "rules", "dashboard")]
    values += ["etcd.backup.enabled=true", f"etcd.backup.claim={SNAPSHOTS}"]
    with ChartRelease(monitoring, *values, claims=claims) as chart:
        chart.claim_snapshots()
        _nothing_was_dropped(chart, *values)
        yield chart


def _nothing_was_dropped(chart: ChartRelease, *values: str) -> None:
    """The API server takes every field of what the Prometheus Operator would read."""
    made = [one for one in rendered(*IN_THE_LAB, *values) if one["kind"] in KINDS]
    assert {one["kind"] for one in made} == KINDS
    for one in made:
        found = chart.lab.get(NAMESPACE, one["kind"], one["metadata"]["name"])
        assert found["spec"] == one["spec"], one["metadata"]["name"]


def test_each_query_has_data_and_an_alert_comes(chart: ChartRelease, tmp_path: Path) -> None:
    lab = chart.lab
    (rules,) = lab.get(NAMESPACE, "prometheusrules")["items"]
    alerts = [rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]]
    panels = expressions(lab.get(NAMESPACE, "configmap", "muster-dashboard"))

    def is_monitored(job: KubeJob, world: World) -> World:
        chart.take_snapshot()
        job.tell("a snapshot was taken, restored, and kept")
        late = _without_sidecar(chart, job)
        job.tell(f"{late} has no sidecar, and the controller is another")
        job.until(lambda: _up(seen), PATIENCE_S, "every target is up")
        job.tell("every target is up")
        job.until(
            lambda: 0 < (seen.now(AGE) or [0.0])[0] < PATIENCE_S * 2, PATIENCE_S, "its age is told"
        )
        job.tell(f"the newest backup is {seen.now(AGE)[0]:.0f} s old")
        delete_pod(job, job.steps.worlds()[-1])
        members = Members(lab, 1)
        chart.kubectl("scale", "statefulset/muster-etcd", "--replicas=0")
        job.tell("no store is there")
        job.until(lambda: seen.now(NO_WATCH), PATIENCE_S, "sidecars whose watch does not work")
        chart.kubectl("scale", "statefulset/muster-etcd", "--replicas=1")
        members.until_ready()
        job.tell("the store is back")
        queries = [*map(judged, alerts), *panels]
        job.until(lambda: not seen.without_data(queries), PATIENCE_S, "each query has had data")
        job.tell(f"{len(alerts)} rules and {len(panels)} queries of the dashboard have had data")
        job.until(lambda: seen.firing(), MINUTES_S, "an alert comes")
        assert seen.firing() == {ALERT}
        job.tell(f"{ALERT} fires")
        lab.kubectl("-n", job.namespace, "delete", "pod", late, "--wait=false")
        job.until(lambda: not seen.firing(), PATIENCE_S, "it goes with the pod")
        job.tell("it has gone")
        return job.world_of(len(job.names()))

    with (
        Prometheus(lab, tmp_path / "prometheus") as seen,
        LabelledJob(lab, tmp_path / "alone", ALONE),
        LabelledJob(lab, tmp_path / "job", DEPLOYMENT) as job,
    ):
        loses_nothing(job, is_monitored)


def _up(seen: Prometheus) -> bool:
    """Whether each PodMonitor has targets, and all are up."""
    found = seen.targets()
    return len(found) == len(("controller", "etcd", "sidecars")) and {
        *map(frozenset, found.values())
    } == {frozenset({"up"})}


def _without_sidecar(chart: ChartRelease, job: KubeJob) -> str:
    before = job.names()
    chart.scale_controller(0)
    job.scale(len(before) + 1)
    job.until(lambda: len(job.names()) > len(before), PATIENCE_S, "a pod is made all the same")
    chart.scale_controller(2)
    (late,) = job.names() - before
    return late


def test_a_snapshot_that_cannot_be_restored_takes_no_place(
    chart: ChartRelease, tmp_path: Path
) -> None:
    chart.take_snapshot()
    (kept,) = (tmp_path / SNAPSHOTS).glob("*.db")
    before, succeeded = kept.read_bytes(), _succeeded(chart)
    assert succeeded
    words = (
        "wait",
        "--for=condition=failed",
        "job/backup-now",
        f"--timeout={SNAPSHOT_TIMEOUT_S:g}s",
    )
    with _damaged(kept.with_name(f"{kept.name}.new")):
        for step in ("delete job backup-now", "create job"):
            chart.lab.kubectl(*command(f"kubectl -n muster-system {step}")[1:])
        chart.lab.kubectl("-n", NAMESPACE, *words, timeout_s=SNAPSHOT_TIMEOUT_S + 30)
    pods = chart.lab.pods(NAMESPACE, "job-name=backup-now")
    assert pods
    for pod in pods:
        ended = {
            one["name"]: one["state"].get("terminated", {}).get("exitCode")
            for one in pod["status"]["initContainerStatuses"]
        }
        assert (ended["save"], ended["check"]) == (0, None)
        assert ended["restore"]
    assert kept.read_bytes() == before
    assert _succeeded(chart) == succeeded


def _succeeded(chart: ChartRelease) -> list[str]:
    """When each CronJob of backups has succeeded, as its age is read from."""
    selector = "app.kubernetes.io/component=backup"
    found = chart.lab.get(NAMESPACE, "cronjobs", "-l", selector)["items"]
    times = [one["status"].get("lastSuccessfulTime", "") for one in found]
    return [one for one in times if one]


@contextmanager
def _damaged(snapshot: Path) -> Iterator[None]:
    """Write over the middle of a file as soon as it is there, each time that it is another."""
    over, known = threading.Event(), set[int]()

    def watch() -> None:
        while not over.wait(0.001):
            if snapshot.exists() and (inode := snapshot.stat().st_ino) not in known:
                known.add(inode)
                with snapshot.open("r+b") as file:
                    file.seek(snapshot.stat().st_size // 2)
                    file.write(b"damaged")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)
    assert known, "no snapshot was written"
