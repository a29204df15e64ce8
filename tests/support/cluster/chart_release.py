# SPDX-License-Identifier: Apache-2.0
"""The chart in the lab, installed by the command of its page, and jobs that only have a label."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from sidecar_image.image import CONTROLLER_IMAGE, controller_archive
from sidecar_image.image import IMAGE as SIDECAR_IMAGE
from tests.support.chart import CHART, HelmFailed, helm
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import (
    ETCD_IMAGE,
    KUBECONFIG,
    REMOVAL_TIMEOUT_S,
    ROOT,
    KubectlFailed,
    Kubelab,
    Object,
)
from tests.support.cluster.quickstart import volume
from tests.support.cluster.workload import Workload
from tests.support.programs import ran

PAGE = ROOT / "docs" / "controller.md"
MEMBERS_PAGE = ROOT / "docs" / "etcd-members.md"
NAMESPACE = "muster-system"
RELEASE = "muster"
_REPOSITORY, _, _TAG = ETCD_IMAGE.partition(":")
IMAGES = {"SIDECAR": SIDECAR_IMAGE, "CONTROLLER": CONTROLLER_IMAGE, "ETCD": _REPOSITORY}
"""What the page's variables stand for in the lab."""
IN_THE_LAB = (
    *("etcd.replicas=1", "etcd.spread=preferred"),
    *("etcd.persistence.enabled=false", f"etcd.image.tag={_TAG}"),
    *("controller.apiServer.host=10.213.0.1", "injection.timeoutSeconds=30"),
)
"""It has two nodes, no storage class, an etcd of its own making, no kube-proxy, and busy cores."""
KEPT = ("etcd.persistence.enabled=true", "etcd.persistence.size=1Gi")
"""Where a test makes the members' volumes."""
SNAPSHOTS = "snapshots"
"""The claim that backups are written to."""
SNAPSHOT_TIMEOUT_S = 320.0
"""Longer than the page has its reader wait."""
HELM_TIMEOUT_S = 400.0
DOCTOR_TIMEOUT_S = 120.0


def command(words: str, page: Path = PAGE) -> list[str]:
    """The command line of the page that begins so; it is there once."""
    text = page.read_text().replace("\\\n", " ")
    for name, image in IMAGES.items():
        text = text.replace(f'"${name}_IMAGE"', image)
    (found,) = {line.strip() for line in text.splitlines() if line.strip().startswith(words)}
    return shlex.split(found)


def label() -> Object:
    """The metadata that the page has its reader write on a pod template."""
    (block,) = re.findall(r"^    metadata:\n(?:     .*\n)+", PAGE.read_text(), re.MULTILINE)
    found: Object = YAML(typ="safe").load(block)["metadata"]
    return found


class ChartRelease:
    """The chart, from its installation to its removal; ``values`` are more of its values.

    ``claims``: a folder of this machine for each claim of the release's namespace. Where there are
    any, the members of etcd keep their records when their pods are replaced.
    """

    def __init__(
        self, lab: Kubelab, *values: str, claims: Mapping[str, Path] | None = None
    ) -> None:
        self.lab = lab
        self._values = values
        self._claims = claims or {}

    def __enter__(self) -> ChartRelease:
        self.lab.command("load", str(controller_archive()), timeout_s=300)
        kept = KEPT if self._claims else ()
        try:
            for claim, folder in self._claims.items():
                folder.mkdir()
                folder.chmod(0o777)
                self.lab.apply(NAMESPACE, volume(_volume(claim), NAMESPACE, claim, folder))
            self.helm(command("helm install"), *IN_THE_LAB, *kept, *self._values)
        except BaseException as error:
            error.add_note(self.story())
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as then:
            volumes = [_volume(claim) for claim in self._claims]
            if volumes:
                gone = ("delete", "persistentvolumes", *volumes, "--ignore-not-found")
                then.callback(self.lab.kubectl, *gone, "--wait=false", timeout_s=REMOVAL_TIMEOUT_S)
            # Until it is gone, nothing can be installed there again.
            gone = ("wait", "--for=delete", f"namespace/{NAMESPACE}", "--timeout=170s")
            then.callback(self.lab.kubectl, *gone, timeout_s=REMOVAL_TIMEOUT_S)
            then.callback(self.lab.remove_namespace, NAMESPACE)
            self.helm(
                ["helm", "uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found"]
            )

    def helm(self, words: list[str], *values: str) -> str:
        """Run a command line of helm, with more values."""
        _, *arguments = words
        given = [word for value in values for word in ("--set", value)]
        arguments = [str(CHART) if word == "charts/muster" else word for word in arguments]
        return helm(*arguments, *given, kubeconfig=KUBECONFIG, timeout_s=HELM_TIMEOUT_S)

    def upgrade(self, *values: str) -> None:
        """``helm upgrade`` with other values, and wait until it has come to rest."""
        words = ["helm", "upgrade", RELEASE, "charts/muster", "--namespace", NAMESPACE]
        self.helm([*words, "--wait", "--reuse-values"], *values)

    def claim_snapshots(self) -> None:
        """Make the claim ``SNAPSHOTS``."""
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
        kind = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
        self.lab.apply(NAMESPACE, {**kind, "metadata": {"name": SNAPSHOTS}, "spec": spec})

    def take_snapshot(self) -> None:
        """The page's commands that write one now."""
        for step in ("delete job backup-now", "create job", "wait --for=condition=complete"):
            _, *words = command(f"kubectl -n muster-system {step}")
            self.lab.kubectl(*words, timeout_s=SNAPSHOT_TIMEOUT_S)

    def test(self) -> None:
        """The page's ``helm test``; where it fails, its log and all else are in the error."""
        try:
            said = self.helm(command("helm test"))
        except HelmFailed as error:
            error.add_note(self.story())
            raise
        assert "Phase:          Succeeded" in said

    def doctor(self) -> tuple[int, list[dict[str, Any]]]:
        """``muster doctor --cluster`` from outside of it: its exit status, and what it finds."""
        done = ran(
            *(sys.executable, "-m", "console.main", "doctor", "--cluster"),
            *(f"--kubeconfig={KUBECONFIG}", "--json"),
            timeout_s=DOCTOR_TIMEOUT_S,
        )
        assert done.returncode in (0, 1), done.stderr
        return done.returncode, json.loads(done.stdout)["findings"]

    def scale_controller(self, replicas: int) -> None:
        """Take all replicas away, or bring them back, and wait until it is so."""
        deployment = f"deployment/{RELEASE}-controller"
        self.kubectl("scale", deployment, f"--replicas={replicas}")
        self.kubectl("rollout", "status", deployment, "--timeout=180s")
        if not replicas:
            selector = "app.kubernetes.io/component=controller"
            self.kubectl("wait", "pods", "-l", selector, "--for=delete", "--timeout=120s")

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl in the release's namespace."""
        return self.lab.kubectl("-n", NAMESPACE, *arguments, timeout_s=200)

    def story(self) -> str:
        """What its pods say, for who looks for what went wrong."""
        asked: list[tuple[str, ...]] = [("get", "pods,events", "-o", "wide")]
        for part in ("controller", "etcd", "test", "restore"):
            selector = f"app.kubernetes.io/component={part}"
            asked.append(("logs", "-l", selector, "--all-containers", "--tail=30", "--prefix"))
        return "\n".join(map(self._said, asked))

    def _said(self, arguments: tuple[str, ...]) -> str:
        try:
            return self.kubectl(*arguments)
        except KubectlFailed as error:
            return str(error)  # a container that has not started yet


def _volume(claim: str) -> str:
    return f"{NAMESPACE}-{claim}"


class LabelledJob(KubeJob):
    """A job as its user writes it, with the label: nothing else of Muster is in its manifest."""

    def __init__(self, lab: Kubelab, directory: Path, workload: Workload) -> None:
        super().__init__(lab, directory, workload, muster=True)
        self.namespace = f"labelled-{secrets.token_hex(4)}"

    def _apply_before(self) -> None:
        """Nothing: the chart has a store."""

    def injected(self, manifest: str, *arguments: str) -> str:
        """Only the label: the annotations too where the object does not say min and max."""
        made: Object = YAML(typ="safe").load(manifest)
        said = label()
        spec = made["spec"]
        if made["kind"] == "PyTorchJob":
            spec = spec["pytorchReplicaSpecs"]["Worker"]
            del said["annotations"]
        metadata = spec["template"]["metadata"]
        for part, words in said.items():
            metadata[part] = {**metadata.get(part, {}), **words}
        return json.dumps(made)

    def sidecars(self) -> dict[str, bool]:
        """Whether each pod has a sidecar, by its name."""
        return {
            pod["metadata"]["name"]: any(
                one["name"] == "muster" for one in pod["spec"].get("initContainers", [])
            )
            for pod in self.pods()
        }

    def all_listed(self) -> bool:
        """Whether ``muster status`` of one of its pods lists them all, and nobody else."""
        told = ("-c", "muster", "--", "muster", "status", "--json")
        names = self.names()
        try:
            shown = self.kubectl("exec", min(names), *told)
        except KubectlFailed:
            return False  # the store is away
        states = {one["name"]: one["state"] for one in json.loads(shown)["members"]}
        return states == dict.fromkeys(names, "listed")
