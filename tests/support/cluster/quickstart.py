# SPDX-License-Identifier: Apache-2.0
"""The quick start of docs/quickstart-cluster.md in the lab: its very manifests and command lines.

What the lab needs otherwise is said in ``for_the_lab`` and ``volume``, and nowhere else: it pulls
no image and builds none with torch in it, and it has no storage class.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from sidecar_image.image import IMAGE as SIDECAR_IMAGE
from tests.support.cluster.lab import (
    ETCD_IMAGE,
    REMOVAL_TIMEOUT_S,
    ROOT,
    TRAINER_IMAGE,
    KubectlFailed,
    Kubelab,
    Object,
    host_paths,
    python_paths,
)
from tests.support.programs import ran
from tests.support.waiting import Timeline

PAGE = ROOT / "docs" / "quickstart-cluster.md"
SCRIPT = ROOT / "examples" / "torch_digits.py"
IMAGES = {
    "etcd:v3.6.16": ETCD_IMAGE,
    "muster-sidecar:quickstart": SIDECAR_IMAGE,
    "muster-digits:quickstart": TRAINER_IMAGE,
}
"""What the page has, and what it is in the lab."""
IN_A_SIDECAR = "kubectl exec job/digits -c muster --"
_START = re.compile(r"rank \d+ of (\d+) starts at step (\d+)")


def command(words: str) -> list[str]:
    """The command line of the page that begins so, up to a pipe; each is there once."""
    text = PAGE.read_text().replace("\\\n", " ")
    lines = (line.strip().removeprefix("$ ") for line in text.splitlines())
    (found,) = {line for line in lines if line.startswith(words)}
    return shlex.split(found.partition("|")[0])


def for_the_lab(manifest: str) -> Iterator[Object]:
    """The same objects with the lab's images, and with torch, which is not in one of them."""
    for one in YAML(typ="safe").load_all(manifest):
        if one["kind"] in ("Job", "StatefulSet"):
            pod = one["spec"]["template"]["spec"]
            for container in [*pod.get("initContainers", ()), *pod["containers"]]:
                container["image"] = IMAGES[container["image"]]
                if container["name"] == "trainer":
                    _with_torch(pod, container)
        yield one


def _with_torch(pod: Object, container: Object) -> None:
    """This machine's Python, torch and copy of the script, where the image would have them."""
    volumes, mounts = host_paths(*python_paths([sys.prefix, sys.base_prefix]))
    script = {"path": str(SCRIPT), "type": "File"}
    # That Python may lie below root's home, which is closed to the user of the manifest.
    pod["volumes"] += [{"name": "home", "emptyDir": {}}, *volumes]
    pod["volumes"] += [{"name": "script", "hostPath": script}]
    container["volumeMounts"] += [{"name": "home", "mountPath": "/root"}, *mounts]
    container["volumeMounts"] += [{"name": "script", "mountPath": f"/app/{SCRIPT.name}"}]
    container["env"].append({"name": "PATH", "value": f"{sys.prefix}/bin:/usr/bin:/bin"})


def volume(name: str, namespace: str, claim: str, folder: Path) -> Object:
    """What a storage class would make for a claim: a folder that both nodes see."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": "1Gi"},
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": namespace, "name": claim},
            "hostPath": {"path": str(folder), "type": "Directory"},
        },
    }


class Quickstart(Timeline):
    """A namespace in which the commands of the page are run; nothing of it outlives the block."""

    def __init__(self, lab: Kubelab, directory: Path) -> None:
        super().__init__()
        self.namespace = f"quickstart-{secrets.token_hex(4)}"
        self.checkpoints = directory / "digits"
        self._lab = lab
        self._claims = {"digits": self.checkpoints, "data-etcd-0": directory / "etcd"}

    def __enter__(self) -> Quickstart:
        with ExitStack() as begun:
            self._lab.make_namespace(self.namespace)
            begun.callback(self.__exit__)
            for claim, folder in self._claims.items():
                folder.mkdir()
                folder.chmod(0o777)
                name = f"{self.namespace}-{claim}"
                self._lab.apply(self.namespace, volume(name, self.namespace, claim, folder))
            begun.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        volumes = [f"{self.namespace}-{claim}" for claim in self._claims]
        with ExitStack() as then:
            gone = ("delete", "persistentvolumes", *volumes, "--ignore-not-found", "--wait=false")
            then.callback(self._lab.kubectl, *gone, timeout_s=REMOVAL_TIMEOUT_S)
            self._lab.remove_namespace(self.namespace)

    def kubectl(self, words: str, *more: str) -> str:
        """Run the command line of the page that begins so, with ``more`` behind it."""
        _, *arguments = command(words)
        if arguments[0] != "logs":
            self.tell(words)
        manifest = None
        if arguments[0] == "apply":
            path = ROOT / arguments.pop()
            manifest = "\n---\n".join(map(json.dumps, for_the_lab(path.read_text())))
            arguments.append("-")
        return self._kubectl(*arguments, *more, stdin=manifest)

    def _kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self._lab.kubectl("-n", self.namespace, *arguments, stdin=stdin, timeout_s=300)

    def inject_and_apply(self) -> None:
        """Run the page's ``muster inject … | kubectl apply -f -``."""
        self.tell("muster inject")
        _, *arguments = command("muster inject")
        done = ran(sys.executable, "-m", "console.main", *arguments, timeout_s=60)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr, done.stderr
        self._lab.apply(self.namespace, *for_the_lab(done.stdout))

    def history(self) -> list[dict[str, Any]]:
        """The page's ``muster history``, for a program."""
        shown = self.kubectl(f"{IN_A_SIDECAR} muster history", "--json")
        return [json.loads(line) for line in shown.splitlines()]

    def starts(self) -> list[tuple[int, int]]:
        """Size and first step of each world that pod 0 has been in, by what its rank prints."""
        try:
            log = self.kubectl("kubectl logs")
        except KubectlFailed:
            return []  # its container has not started yet
        return [(int(size), int(step)) for size, step in _START.findall(log)]

    def all_train(self) -> bool:
        """Whether the newest world of pod 0 is of three ranks."""
        starts = self.starts()
        return bool(starts) and starts[-1][0] == 3

    def timeline(self) -> str:
        told = [super().timeline()]
        for pod in self._lab.get(self.namespace, "pods")["items"]:
            name = pod["metadata"]["name"]
            told += ["", f"-- {name}: {json.dumps(pod['status'])[:1500]}"]
            try:
                told.append(self._kubectl("logs", name, "--all-containers", "--tail=30"))
            except KubectlFailed as error:
                told.append(str(error))  # it has not started yet
        return "\n".join(told)
