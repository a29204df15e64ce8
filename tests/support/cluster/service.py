# SPDX-License-Identifier: Apache-2.0
"""An online service beside a training job, which takes the room that its priority gives it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Self

from tests.support.cluster.chart_release import LabelledJob
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import TRAINER_IMAGE, Kubelab, Object
from tests.support.cluster.workload import LABEL, Workload
from tests.support.training.step_log import World

SERVICE = "service"
ALL, HALF = 4, 2
"""Pods of the service that leave room for no pod of the job, and for two."""
READY_S = 90
"""Less than half of the grace of the pods that make room."""
RATE_S = 1.0
HELD_S = 20.0
"""The service stays as it is for so long, as services do."""


class SqueezedJob(LabelledJob):
    """A job that trains with what there is, of which a service preempts the pods."""

    def __init__(self, lab: Kubelab, directory: Path, workload: Workload) -> None:
        super().__init__(lab, directory, workload)
        self.use = Use(self)

    def _apply_before(self) -> None:
        for name, value in (("preserved-pc", 1000), ("preemptible-pc", 10)):
            priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
            self.lab.apply("default", {**priority, "metadata": {"name": name}, "value": value})
        self.apply(_service())

    def injected(self, manifest: str, *arguments: str) -> str:
        made: Object = json.loads(super().injected(manifest, *arguments))
        template = made["spec"]["template"]
        template["metadata"]["annotations"] |= {"muster.dev/min": "1", "muster.dev/max": "4"}
        template["spec"]["priorityClassName"] = "preemptible-pc"
        return json.dumps(made)

    def serve(self, replicas: int) -> None:
        """Scale the service, and wait until it is ready."""
        began_s = time.monotonic()
        self.kubectl("scale", f"deployment/{SERVICE}", f"--replicas={replicas}")
        ready = ("rollout", "status", f"deployment/{SERVICE}", f"--timeout={READY_S}s")
        self.kubectl(*ready, timeout_s=READY_S + 30)
        self.tell(f"the service has {replicas} pods after {time.monotonic() - began_s:.1f} s")


def takes_half_then_all(job: KubeJob, world: World) -> World:
    """The service takes half of the room, then all, and gives it back in two steps."""
    assert isinstance(job, SqueezedJob)
    time.sleep(HELD_S)
    job.serve(HALF)
    world = job.world_of(HALF, not_=world)
    time.sleep(HELD_S)
    job.serve(ALL)
    assert not [pod for pod in job.pods() if pod["status"]["phase"] == "Running"]
    job.serve(HALF)
    world = job.world_of(HALF, not_=world)
    time.sleep(HELD_S)
    job.serve(0)
    world = job.world_of(job.workload.replicas, not_=world)
    time.sleep(HELD_S)
    return world


class Use:
    """Pod-seconds that the job held, sampled beside the test, and those in which it trained."""

    def __init__(self, job: LabelledJob) -> None:
        self._held = 0.0
        self._job = job
        self._since_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._since_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)
        trained = sum(
            one.size * max(0.0, one.ended_s - max(one.began_s, self._since_s))
            for one in self._job.steps.worlds()
        )
        share = trained / max(1.0, self._held)
        self._job.tell(
            f"pod-seconds trained / held: {trained:.0f} / {self._held:.0f} = {share:.2f}"
        )

    def _sample(self) -> None:
        last_s = self._since_s
        while not self._over.wait(RATE_S):
            pods = self._job.lab.pods(self._job.namespace, LABEL)
            running = sum(pod["status"].get("phase") == "Running" for pod in pods)
            now_s = time.monotonic()
            self._held += running * (now_s - last_s)
            last_s = now_s


def _service() -> Object:
    labels = {"app": SERVICE}
    spread: Object = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": labels},
    }
    container: Object = {
        "name": SERVICE,
        "image": TRAINER_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sleep", "3600"],
        "resources": {"requests": {"cpu": "800m"}},
    }
    spec: Object = {
        "priorityClassName": "preserved-pc",
        "terminationGracePeriodSeconds": 1,
        "topologySpreadConstraints": [spread],
        "containers": [container],
    }
    template = {"metadata": {"labels": labels}, "spec": spec}
    made = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
    metadata = {"name": SERVICE}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": made}
