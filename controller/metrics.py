# SPDX-License-Identifier: Apache-2.0
"""Metrics of what the controller sees: jobs, uninjected pods, certificates, the backup of etcd."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from cryptography import x509
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from controller.admission.uninjected import UninjectedPods
from controller.cluster import paths
from controller.cluster.api import ClusterApi, Object
from controller.cluster.collection import Collection
from controller.jobs import Jobs, JobState
from controller.owners import PodSeen, time_to_save_s
from controller.page import rounds
from rdzv.errors import ClusterError
from rdzv.reconcile import Loop, Outlook
from rdzv.sentences import Diary

log = logging.getLogger(__name__)

OF_JOB = ("job_namespace", "job_name")
"""Labels of a job's metrics; Prometheus overwrites ``namespace`` and ``job`` with the target's."""

LOOK_S = 300.0
"""Time between two looks, in seconds: a backup is due each day."""


class SeenMetrics(Collector):
    """The metrics of one replica; every replica that follows jobs has the same.

    ``jobs`` and ``pods`` are None while jobs are not followed, ``uninjected`` if pods without a
    sidecar are not; what needs them is missing then. ``certificates`` are the sources of PEM
    certificates, by what they are for. ``of_jobs``: whether jobs are named, as anybody who reaches
    the webhook's port may read the page.
    """

    def __init__(self, now: Callable[[], datetime], *, of_jobs: bool) -> None:
        self._of_jobs = of_jobs
        self.jobs: Jobs | None = None
        self.pods: Collection[PodSeen] | None = None
        self.uninjected: UninjectedPods | None = None
        self.certificates: dict[str, Callable[[], bytes | None]] = {}
        self._now = now

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return nothing, so that no value is read at the registration."""
        return ()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics of what is there now."""
        yield self._certificates()
        pods: Mapping[str, PodSeen] = {} if self.pods is None else self.pods.items
        if self.uninjected is not None:
            yield GaugeMetricFamily(
                "muster_controller_pods_without_sidecar",
                "Pods that ask for a sidecar, or whose namespace does, and have none.",
                value=len(self.uninjected.pods()),
            )
        if self._of_jobs and self.jobs is not None and self.jobs.revision:
            states = self.jobs.states().values()
            yield from _of_jobs([one for one in states if one.snapshot.members], pods)

    def _certificates(self) -> GaugeMetricFamily:
        left = GaugeMetricFamily(
            "muster_controller_certificate_seconds_left",
            "Seconds until a certificate that the controller renews ends, by what it is for.",
            labels=["certificate"],
        )
        for name, read in self.certificates.items():
            if (pem := read()) is not None:
                ends = x509.load_pem_x509_certificate(pem).not_valid_after_utc
                left.add_metric([name], (ends - self._now()).total_seconds())
        return left


def _of_jobs(states: list[JobState], pods: Mapping[str, PodSeen]) -> Iterator[GaugeMetricFamily]:
    training = GaugeMetricFamily(
        "muster_controller_job_training",
        "1 while a world of the job trains, 0 if members wait for one; not of paused jobs.",
        labels=OF_JOB,
    )
    save = GaugeMetricFamily(
        "muster_controller_job_save_seconds",
        "How long the newest save that all ranks were asked for took.",
        labels=OF_JOB,
    )
    grace = GaugeMetricFamily(
        "muster_controller_job_grace_seconds",
        "What the job's pod with the shortest grace has for a save, without the reserve.",
        labels=OF_JOB,
    )
    for state in states:
        labels = (state.keys.namespace, state.keys.job_name)
        job, commit = state.snapshot.job, state.snapshot.commit
        if job is not None and not job.paused:
            trains = any(
                one.complete and not one.closed for _, one in rounds(state, job.generation)
            )
            training.add_metric(labels, float(trains))
        if commit is not None and commit.took_s > 0:
            save.add_metric(labels, commit.took_s)
        if (left_s := time_to_save_s(pods, state)) is not None:
            grace.add_metric(labels, left_s)
    yield from (training, save, grace)


def newest_success(jobs: Iterable[Object]) -> float:
    """Return the time of the newest success of CronJobs, in Unix seconds; 0 without any."""
    times = ((one.get("status") or {}).get("lastSuccessfulTime") for one in jobs)
    return max((datetime.fromisoformat(one).timestamp() for one in times if one), default=0.0)


class Backups(Loop):
    """Looks at CronJobs of the controller's namespace; each replica does, for its own metric."""

    def __init__(
        self, api: ClusterApi, namespace: str, names: Sequence[str], registry: CollectorRegistry
    ) -> None:
        super().__init__()
        self._api = api
        self._paths = [paths.cron_job(namespace, name) for name in names]
        self._diary = Diary(log)
        self._newest = Gauge(
            "muster_controller_backup_timestamp_seconds",
            "Time of the newest backup of etcd that could be restored, in Unix seconds; 0: none.",
            registry=registry,
        )

    async def step(self) -> Outlook:
        """Read the CronJobs; what was seen last stays while the API server is away."""
        try:
            found = [await self._api.get(path) for path in self._paths]
        except ClusterError as error:
            sentence = f"the age of the backups of etcd is not known: {error}"
            self._diary.say(sentence, level=logging.WARNING, topic="unread")
        else:
            self._diary.forget()
            self._newest.set(newest_success(found))
        return Outlook(look_at_s=self.clock() + LOOK_S)
