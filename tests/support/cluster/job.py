# SPDX-License-Identifier: Apache-2.0
"""A training job in the cluster, with Muster or without, and the account of its steps."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from sidecar_image.image import IMAGE as SIDECAR_IMAGE
from tests.support.cluster.lab import KUBECONFIG, KubectlFailed, Kubelab, Object
from tests.support.cluster.workload import (
    ETCD_ENDPOINT,
    LABEL,
    NAME,
    Workload,
    etcd,
    headless_service,
)
from tests.support.programs import ran
from tests.support.training.step_log import StepLog, Training, World

PATIENCE_S = 90.0
"""With a job without Muster: it waits for torch's own time-outs, and for the kubelet's back-off."""
VERB_TIMEOUT_S = 400.0
FORM_TIMEOUT_S = 240.0
"""For pods to start and a world to form: each process imports torch, on cores that are shared."""


def is_going(pod: Object) -> bool:
    """Whether the pod has been told to end."""
    return "deletionTimestamp" in pod["metadata"]


class KubeJob(Training):
    """A namespace, an etcd if Muster needs one, and a workload that trains ``drain_loop.py``."""

    name = NAME
    """Of the job."""

    def __init__(self, lab: Kubelab, directory: Path, workload: Workload, *, muster: bool) -> None:
        super().__init__()
        self.lab = lab
        self.workload = workload
        self.muster = muster
        self.namespace = f"drill-{secrets.token_hex(4)}"
        self.directory = directory / self.namespace
        for name in ("steps", "checkpoints", "saves", "etcd"):
            (self.directory / name).mkdir(parents=True)
            (self.directory / name).chmod(0o777)  # a volume that any user may write to
        self.steps = StepLog(self.directory / "steps")
        self.patience_s = FORM_TIMEOUT_S if muster else PATIENCE_S
        """For a world to form again."""

    def __enter__(self) -> Self:
        self.lab.make_namespace(self.namespace)
        try:
            self._apply_before()
            self.apply(headless_service(NAME, 29400), self.manifest())
        except BaseException:
            self.lab.remove_namespace(self.namespace)
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            timeline = self.timeline()
            (self.directory / "timeline.txt").write_text(timeline)
            for error in raised:
                if isinstance(error, BaseException):
                    error.add_note(timeline)
        finally:
            self.lab.remove_namespace(self.namespace)

    def _apply_before(self) -> None:
        """Apply what is to be there before the job."""
        if self.muster:
            self.apply(*etcd(self.directory / "etcd"))
            self.until_etcd_is_ready()

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
        done = ran(
            *(sys.executable, "-m", "console.main", "inject", "-"),
            *(f"--min={self.workload.least}", f"--max={self.workload.most}"),
            *(f"--etcd-endpoints={ETCD_ENDPOINT}", f"--image={SIDECAR_IMAGE}", *arguments),
            stdin=manifest,
            timeout_s=60,
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

    def typed(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Type a verb about the job, on a machine that knows no store."""
        verb, *rest = words
        line = (sys.executable, "-m", "console.main", verb, self.name, "-n", self.namespace)
        began_s = time.monotonic()
        done = ran(*line, *rest, timeout_s=VERB_TIMEOUT_S, KUBECONFIG=str(KUBECONFIG))
        took_s = time.monotonic() - began_s
        shown = f"{done.stdout}{done.stderr}-> {done.returncode} after {took_s:.1f} s"
        self.tell(f"muster {verb} {' '.join(rest)}\n{shown}")
        return done

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
        return self.until_world(
            lambda world: (
                len(world.nodes) == pods
                and world.size == pods * self.workload.slots
                and not world.nodes & gone
            ),
            timeout_s,
            f"{pods} pods step in one world",
            not_,
        )

    # -- for whoever has to find out why a test failed

    def timeline(self) -> str:
        """What happened, in order, and the last lines of every container."""
        told = [super().timeline()]
        for arguments in (
            ["get", "pods", "-o", "wide"],
            ["get", "events", "--sort-by=.lastTimestamp"],
            *(
                ["logs", f"pod/{pod['metadata']['name']}", "--all-containers", "--tail=30"]
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
