# SPDX-License-Identifier: Apache-2.0
"""A namespace with its user, who types commands of Muster on a machine that knows no store."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from ruamel.yaml import YAML

from tests.support.cluster.lab import (
    KUBECONFIG,
    ROOT,
    TRAINER_IMAGE,
    Kubelab,
    Object,
    host_paths,
    python_paths,
)

TIMEOUT_S = 400.0


class Team:
    """``with Team(...) as team``: the namespace, and pods that have this machine's Python.

    ``folders``: more of this machine that the pods mount, to read.
    """

    def __init__(self, lab: Kubelab, directory: Path, *folders: Path) -> None:
        self.lab = lab
        self.namespace = f"team-{secrets.token_hex(4)}"
        self._pod = directory / "pod.json"
        self.checkpoints = directory / "checkpoints"
        self.checkpoints.mkdir()
        self.checkpoints.chmod(0o777)  # a volume that any user may write to
        prefixes = [sys.prefix, sys.base_prefix, *map(str, folders)]
        volumes, mounts = host_paths(*python_paths(prefixes), (ROOT, False))
        container = {
            "name": "trainer",
            "image": TRAINER_IMAGE,
            "imagePullPolicy": "Never",
            "workingDir": str(ROOT),
            "volumeMounts": mounts,
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
            "resources": {"requests": {"cpu": "50m", "memory": "300Mi"}},
        }
        spec = {"enableServiceLinks": False, "containers": [container], "volumes": volumes}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "digits"}, "spec": spec}
        self._pod.write_text(json.dumps(pod))

    def __enter__(self) -> Self:
        self.lab.make_namespace(self.namespace)
        return self

    def __exit__(self, *_: object) -> None:
        self.lab.remove_namespace(self.namespace)

    def muster(self, *words: str, kubeconfig: Path = KUBECONFIG) -> subprocess.Popen[str]:
        """Begin a command, as a user at a terminal does: Ctrl-C reaches it."""
        return subprocess.Popen(
            [sys.executable, "-m", "console.main", *words, "-n", self.namespace],
            cwd=ROOT,
            env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_hears_ctrl_c,
        )

    def other_user(self, name: str, *rules: Object) -> Path:
        """The kubeconfig of somebody else who has these rights in the namespace, and no others."""
        group, of = "rbac.authorization.k8s.io", {"metadata": {"name": name}}
        subject = {"kind": "ServiceAccount", "name": name, "namespace": self.namespace}
        role = {"apiGroup": group, "kind": "Role", "name": name}
        bound = {"subjects": [subject], "roleRef": role}
        self.lab.apply(
            self.namespace,
            {"apiVersion": "v1", "kind": "ServiceAccount", **of},
            {"apiVersion": f"{group}/v1", "kind": "Role", **of, "rules": list(rules)},
            {"apiVersion": f"{group}/v1", "kind": "RoleBinding", **of, **bound},
        )
        token = self.lab.kubectl("-n", self.namespace, "create", "token", name).strip()
        known = YAML(typ="safe").load(KUBECONFIG)
        known["users"] = [{"name": one["name"], "user": {"token": token}} for one in known["users"]]
        path = self._pod.with_name(f"{name}.json")
        path.write_text(json.dumps(known))
        return path

    def submit(self, *options: str, line: str) -> subprocess.Popen[str]:
        """``muster submit`` of a launch line in one word, as users of Arena write it."""
        given = (f"--from={self._pod}", f"--volume={self.checkpoints}:/ck")
        variables = ("-eCHECKPOINT_DIR=/ck", f"-ePYTHONPATH={ROOT}")
        return self.muster("submit", *given, *variables, *options, line)


def torchrun(*script: str) -> str:
    """The launch line of a script of this project."""
    return " ".join((f"{sys.prefix}/bin/torchrun", "--nproc-per-node=1", *script))


def _hears_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit status of a command, and all that it printed."""
    said, _ = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, said
