# SPDX-License-Identifier: Apache-2.0
"""The two-node cluster of ``scripts/kubelab``, as tests see it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kubelab import layout

import console
from sidecar_image.engine import CACHE
from tests.support.programs import ran
from tests.support.waiting import wait_until

ROOT = Path(console.__file__).parent.parent
PROGRAM = ROOT / "scripts" / "kubelab"
KUBECONFIG = layout.KUBECONFIG
KUBECTL = layout.PROGRAMS / "kubectl"
TRAINER_IMAGE, ETCD_IMAGE = layout.TRAINER_IMAGE, layout.ETCD_IMAGE
NODES = tuple(node.name for node in layout.NODES)
UNFIT = 69
"""Its exit status where a machine cannot carry it."""

REMOVAL_TIMEOUT_S = 180.0
"""For each call that takes away what a test has made."""

Object = dict[str, Any]


class KubectlFailed(Exception):
    """kubectl ended with a status other than 0; the message is what it said."""


class Kubelab:
    """Commands of the lab, and kubectl."""

    def left_behind(self) -> list[str]:
        """What is there that should have gone with it."""
        bridge = Path("/sys/class/net") / layout.BRIDGE
        traces = (layout.STATE, layout.MADE_BY_TESTS, bridge)
        found = [str(path) for path in traces if path.exists()]
        found += map(str, layout.CGROUP_ROOT.glob(f"*/{layout.CGROUP}"))
        mounts = Path("/proc/mounts").read_text().splitlines()
        return found + [line for line in mounts if "kubelab" in line]

    def run(self, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run ``scripts/kubelab``, whatever comes of it."""
        # Tests see none of the caller's settings, and the cache is one of them.
        environ = {"MUSTER_CACHE": str(CACHE), layout.FOR_TESTS: "1"}
        return ran(PROGRAM, *arguments, timeout_s=timeout_s, **environ)

    def command(self, *arguments: str, timeout_s: float = 120.0) -> str:
        """Run ``scripts/kubelab``."""
        done = self.run(*arguments, timeout_s=timeout_s)
        assert done.returncode == 0, f"scripts/kubelab {arguments[0]}: {done.stderr[-2000:]}"
        return done.stdout.strip()

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60.0) -> str:
        """Run kubectl; raises KubectlFailed."""
        cluster = f"--kubeconfig={KUBECONFIG}"
        done = ran(KUBECTL, cluster, *arguments, stdin=stdin, timeout_s=timeout_s)
        if done.returncode != 0:
            raise KubectlFailed(done.stderr.strip())
        return done.stdout

    def apply(self, namespace: str, *objects: Mapping[str, Any] | str) -> None:
        """Apply objects, or YAML as it is."""
        for one in objects:
            text = one if isinstance(one, str) else json.dumps(one)
            self.kubectl("-n", namespace, "apply", "-f", "-", stdin=text)

    def get(self, namespace: str, *arguments: str) -> Object:
        """``kubectl get`` as the API has it."""
        answer = self.kubectl("-n", namespace, "get", *arguments, "-o", "json")
        found: Object = json.loads(answer)
        return found

    def pods(self, namespace: str, selector: str) -> list[Object]:
        """Pods by label, the oldest first."""
        items: list[Object] = self.get(namespace, "pods", "-l", selector)["items"]
        return sorted(
            items, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"])
        )

    def make_namespace(self, name: str) -> None:
        """Make a namespace and wait until pods can be made in it."""
        self.kubectl("create", "namespace", name)
        try:
            wait_until(
                lambda: self.kubectl(
                    "-n", name, "get", "serviceaccount", "--field-selector=metadata.name=default"
                ),
                120,
                f"the service account of {name}",
            )
        except BaseException:
            self.remove_namespace(name)
            raise

    def remove_namespace(self, name: str) -> None:
        """Remove a namespace; its pods at once."""
        of_it = ("-n", name, "delete")
        pods = ("pods", "--all", "--force", "--grace-period=0")
        # The last first, and each whatever became of the one before: else its pods would train on.
        with ExitStack() as then:
            for rest in (("delete", "namespace", name, "--wait=false"), (*of_it, *pods)):
                then.callback(self.kubectl, *rest, timeout_s=REMOVAL_TIMEOUT_S)
            self.kubectl(
                *(*of_it, "deployments,statefulsets,jobs,poddisruptionbudgets", "--all"),
                *("--cascade=foreground", "--wait=false"),
                timeout_s=REMOVAL_TIMEOUT_S,
            )


def host_paths(*paths: tuple[Path, bool]) -> tuple[list[Object], list[Object]]:
    """Volumes and mounts of folders of this machine, at the same path; True: to be written to."""
    volumes: list[Object] = []
    mounts: list[Object] = []
    for number, (path, written) in enumerate(paths):
        name = f"host-{number}"
        volumes.append({"name": name, "hostPath": {"path": str(path), "type": "Directory"}})
        mounts.append({"name": name, "mountPath": str(path), "readOnly": not written})
    return volumes, mounts


def python_paths(prefixes: Sequence[str]) -> list[tuple[Path, bool]]:
    """What a pod mounts to have the Python, and the torch, that run the tests."""
    # Below /usr it is the image's own, which is of the same Debian.
    return [(Path(prefix), False) for prefix in dict.fromkeys(prefixes) if prefix != "/usr"]
