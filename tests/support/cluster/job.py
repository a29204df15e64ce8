# SPDX-License-Identifier: Apache-2.0
"""A training job in the cluster, with Muster or without, and the account of its steps."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.support.cluster.lab import ROOT, KubectlFailed, Kubelab, Object
from tests.support.cluster.sidecar_image import IMAGE as SIDECAR_IMAGE
from tests.support.cluster.workload import (
    ETCD_ENDPOINT,
    LABEL,
    NAME,
    Workload,
    etcd,
    headless_service,
)
from tests.support.training.step_log import StepLog, World

PATIENCE_S = 90.0
"""With a job without Muster: it waits for torch's own time-outs, and for the kubelet's back-off."""
FORM_TIMEOUT_S = 240.0
"""For pods to start and a world to form: each process imports torch, on cores that are shared."""


def is_going(pod: Object) -> bool:
    """Whether the pod has been told to end."""
    return "deletionTimestamp" in pod["metadata"]


class KubeJob:
    """A namespace, an etcd if Muster needs one, and a workload that trains ``drain_loop.py``."""

    def __init__(self, lab: Kubelab, directory: Path, workload: Workload, *, muster: bool) -> None:
        self.lab = lab
        self.workload = workload
        self.muster = muster
        self.namespace = f"drill-{secrets.token_hex(4)}"
        self.directory = directory / self.namespace
        for name in ("steps", "checkpoints", "saves", "etcd"):
            (self.directory / name).mkdir(parents=True)
        self.steps = StepLog(self.directory / "steps")
        self.patience_s = FORM_TIMEOUT_S if muster else PATIENCE_S
        """For a world to form again."""
        self.told: list[tuple[float, str]] = []

    def __enter__(self) -> KubeJob:
        self.lab.make_namespace(self.namespace)
        try:
            if self.muster:
                self.apply(headless_service("etcd", 2379), etcd(self.directory / "etcd"))
                self.until_etcd_is_ready()
            self.apply(headless_service(NAME, 29400), self.manifest())
        except BaseException:
            self.lab.remove_namespace(self.namespace)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            (self.directory / "timeline.txt").write_text(self.timeline())
        finally:
            self.lab.remove_namespace(self.namespace)

    def manifest(self) -> str:
        """What is applied: as a user wrote it, or as ``muster inject`` made it."""
        text = json.dumps(self.workload.manifest(self.directory), indent=2)
        if not self.muster:
            return text
        text = self.injected(text)
        # Again, so that the sidecar has the time to start that fits its lease.
        return self.injected(self._with_lease(text)) if self.workload.lease_ttl else text

    def _with_lease(self, manifest: str) -> str:
        made: Object = json.loads(manifest)
        sidecar, *_ = made["spec"]["template"]["spec"]["initContainers"]
        sidecar["env"].append({"name": "MUSTER_LEASE_TTL", "value": self.workload.lease_ttl})
        return json.dumps(made, indent=2)

    def injected(self, manifest: str, *arguments: str) -> str:
        """``muster inject``."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "console.main", "inject", "-"),
                *(f"--min={self.workload.least}", f"--max={self.workload.most}"),
                *(f"--etcd-endpoints={ETCD_ENDPOINT}", f"--image={SIDECAR_IMAGE}", *arguments),
            ],
            cwd=ROOT,
            input=manifest,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    # -- the cluster

    def apply(self, *objects: Object | str) -> None:
        """Apply objects in the job's namespace."""
        self.lab.apply(self.namespace, *objects)

    def kubectl(self, *arguments: str, timeout_s: float = 90.0) -> str:
        """Run kubectl in the job's namespace."""
        return self.lab.kubectl("-n", self.namespace, *arguments, timeout_s=timeout_s)

    def until_etcd_is_ready(self) -> None:
        """Wait until the pod of etcd is there and ready."""
        ready = ("rollout", "status", "statefulset/etcd", "--timeout=180s")
        self.kubectl(*ready, timeout_s=190)

    def start_kubectl(self, *arguments: str) -> subprocess.Popen[str]:
        """Run kubectl in the job's namespace, beside the test."""
        return self.lab.start_kubectl("-n", self.namespace, *arguments)

    def pods(self) -> list[Object]:
        """Pods of the workload that nobody has told to end."""
        found = self.lab.pods(self.namespace, LABEL)
        return [
            pod
            for pod in found
            if not is_going(pod) and pod["status"].get("phase") in ("Pending", "Running")
        ]

    def names(self) -> set[str]:
        """Their names."""
        return {pod["metadata"]["name"] for pod in self.pods()}

    def scale(self, replicas: int) -> None:
        """``kubectl scale``, or, for a Job, what does the same."""
        self.tell(f"scaled to {replicas}")
        if self.workload.kind == "Job":
            sizes = {"spec": {"completions": replicas, "parallelism": replicas}}
            self.kubectl("patch", f"job/{NAME}", "--type=merge", f"--patch={json.dumps(sizes)}")
            return
        self.kubectl("scale", f"{self.workload.kind.lower()}/{NAME}", f"--replicas={replicas}")

    # -- the training

    def tell(self, what: str) -> None:
        """Put a line into the timeline."""
        self.told.append((time.monotonic(), what))

    def until(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Wait for a condition."""
        self.lab.until(condition, timeout_s, what)

    def world(self) -> World | None:
        """The newest world, if it has made a step within the last second."""
        worlds = self.steps.worlds()
        if worlds and time.monotonic() - worlds[-1].ended_s < 1.0:
            return worlds[-1]
        return None

    def world_of(
        self,
        pods: int,
        timeout_s: float = FORM_TIMEOUT_S,
        *,
        not_: World | None = None,
        without: Iterable[str] = (),
    ) -> World:
        """Wait until a whole world of so many pods steps, other than ``not_``."""
        gone = set(without)

        world: World | None = None

        def formed() -> bool:
            nonlocal world
            world = self.world()
            return (
                world is not None
                and (not_ is None or world.number != not_.number)
                and len(world.nodes) == pods
                and world.size == len(world.workers) == pods * self.workload.slots
                and not world.nodes & gone
            )

        self.until(formed, timeout_s, f"{pods} pods step in one world")
        assert world is not None
        self.tell(f"a world of {world.size} steps: {', '.join(sorted(world.nodes))}")
        return world

    def goes_on(self, world: World, steps: int = 20, timeout_s: float = 60.0) -> None:
        """Wait until ``world`` has made so many more steps."""
        goal = len(world.steps_s) + steps
        self.until(
            lambda: self.steps.worlds() and len(world.steps_s) >= goal,
            timeout_s,
            f"the world makes {steps} more steps",
        )

    # -- for whoever has to find out why a test failed

    def timeline(self, lines: int = 30) -> str:
        """What happened, in order, and the last lines of every container."""
        moments = [*self.told]
        for world in self.steps.worlds():
            nodes = ", ".join(sorted(world.nodes))
            moments.append((world.began_s, f"first step of a world of {world.size}: {nodes}"))
            moments.append((world.ended_s, f"last step of it, its {len(world.steps_s)}th"))
        moments.sort()
        first_s = moments[0][0] if moments else 0.0
        told = [f"{at_s - first_s:7.1f} s  {what}" for at_s, what in moments]
        for arguments in (
            ["get", "pods", "-o", "wide"],
            ["get", "events", "--sort-by=.lastTimestamp"],
            *(
                ["logs", f"pod/{pod['metadata']['name']}", "--all-containers", f"--tail={lines}"]
                for pod in self.lab.pods(self.namespace, LABEL)
            ),
        ):
            told += ["", f"-- kubectl {' '.join(arguments[:3])}", self._said(arguments)]
        return "\n".join(told)

    def _said(self, arguments: Sequence[str]) -> str:
        try:
            return self.kubectl(*arguments)
        except (KubectlFailed, subprocess.TimeoutExpired) as error:
            return str(error)
