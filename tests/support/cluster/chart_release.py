# SPDX-License-Identifier: Apache-2.0
"""The chart in the lab, installed by the command of its page, and jobs that only have a label."""

from __future__ import annotations

import json
import re
import secrets
import shlex
from pathlib import Path

from ruamel.yaml import YAML

from sidecar_image.image import CONTROLLER_IMAGE, controller_archive
from sidecar_image.image import IMAGE as SIDECAR_IMAGE
from tests.support.chart import CHART, helm
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import ETCD_IMAGE, KUBECONFIG, ROOT, Kubelab, Object
from tests.support.cluster.workload import NAME, Workload, headless_service

PAGE = ROOT / "docs" / "controller.md"
NAMESPACE = "muster-system"
RELEASE = "muster"
_REPOSITORY, _, _TAG = ETCD_IMAGE.partition(":")
IMAGES = {"SIDECAR": SIDECAR_IMAGE, "CONTROLLER": CONTROLLER_IMAGE, "ETCD": _REPOSITORY}
"""What the page's variables stand for in the lab."""
IN_THE_LAB = (
    *("etcd.persistence.enabled=false", f"etcd.image.tag={_TAG}"),
    "controller.apiServer.host=10.213.0.1",
)
"""It has no storage class, an etcd of its own making, and no kube-proxy."""
HELM_TIMEOUT_S = 400.0


def command(words: str) -> list[str]:
    """The command line of the page that begins so; it is there once."""
    text = PAGE.read_text().replace("\\\n", " ")
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
    """The chart, from its installation to its removal; ``values`` are more of its values."""

    def __init__(self, lab: Kubelab, *values: str) -> None:
        self.lab = lab
        self._values = values

    def __enter__(self) -> ChartRelease:
        self.lab.command("load", str(controller_archive()), timeout_s=300)
        try:
            self.helm(command("helm install"), *IN_THE_LAB, *self._values)
        except BaseException as error:
            error.add_note(self.story())
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.helm(
                ["helm", "uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found"]
            )
        finally:
            self.lab.remove_namespace(NAMESPACE)

    def helm(self, words: list[str], *values: str) -> str:
        """Run a command line of helm, with more values."""
        _, *arguments = words
        given = [word for value in values for word in ("--set", value)]
        arguments = [str(CHART) if word == "charts/muster" else word for word in arguments]
        return helm(*arguments, *given, kubeconfig=KUBECONFIG, timeout_s=HELM_TIMEOUT_S)

    def scale_controller(self, replicas: int) -> None:
        """Take all replicas away, or bring them back, and wait until it is so."""
        deployment = f"deployment/{RELEASE}-controller"
        self._kubectl("scale", deployment, f"--replicas={replicas}")
        self._kubectl("rollout", "status", deployment, "--timeout=180s")
        if not replicas:
            selector = "app.kubernetes.io/component=controller"
            self._kubectl("wait", "pods", "-l", selector, "--for=delete", "--timeout=120s")

    def _kubectl(self, *arguments: str) -> str:
        return self.lab.kubectl("-n", NAMESPACE, *arguments, timeout_s=200)

    def story(self) -> str:
        """What its pods say, for who looks for what went wrong."""
        told = [self._kubectl("get", "pods,events", "-o", "wide")]
        for part in ("controller", "etcd"):
            selector = f"app.kubernetes.io/component={part}"
            told.append(self._kubectl("logs", "-l", selector, "--tail=30", "--prefix"))
        return "\n".join(told)


class LabelledJob(KubeJob):
    """A job as its user writes it, with the label: nothing else of Muster is in its manifest."""

    def __init__(self, lab: Kubelab, directory: Path, workload: Workload) -> None:
        super().__init__(lab, directory, workload, muster=True)
        self.namespace = f"labelled-{secrets.token_hex(4)}"

    def __enter__(self) -> LabelledJob:
        self.lab.make_namespace(self.namespace)
        try:
            self.apply(headless_service(NAME, 29400), self.manifest())
        except BaseException:
            self.lab.remove_namespace(self.namespace)
            raise
        return self

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
