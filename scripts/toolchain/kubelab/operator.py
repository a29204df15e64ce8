# SPDX-License-Identifier: Apache-2.0
"""Kubeflow's training-operator in the lab, unmodified: its binary, its manifests.

Its Deployment is changed only as every user of the lab has to: the image, as none is pulled, and
the address of the API server, as nothing serves cluster IPs here.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from kubelab import images, lab, needs
from kubelab.control_plane import kubectl, wait_until
from kubelab.errors import LabError
from kubelab.layout import HOST_ADDRESS, OPERATOR_IMAGE, TRAINER_IMAGE

NAMESPACE = "kubeflow"


def up() -> None:
    """Build, load and install the operator, and wait until it accepts jobs."""
    if not lab.status().up:
        raise LabError("the lab is not up: scripts/kubelab up")
    programs = needs.programs("operator")
    images.load([_image(programs)])
    with tempfile.TemporaryDirectory() as folder:
        # kustomize reads a base only from the folder that it is given, or below it.
        shutil.copytree(programs / "manifests", Path(folder) / "manifests")
        (Path(folder) / "kustomization.yaml").write_text(json.dumps(_kustomization()))
        kubectl("apply", "--server-side", "-k", folder, timeout_s=120)
    kubectl(
        *("-n", NAMESPACE, "rollout", "status", "deployment/training-operator"),
        # It becomes ready once the certificate that it creates is mounted into it as a Secret.
        "--timeout=600s",
        timeout_s=610,
    )
    for kind, replicas, role, container in (
        ("PyTorchJob", "pytorchReplicaSpecs", "Worker", "pytorch"),
        ("MPIJob", "mpiReplicaSpecs", "Launcher", "mpi"),
    ):
        # The webhooks' endpoints may lag behind the pod's readiness.
        wait_until(
            f"the operator takes a {kind}",
            *("create", "--dry-run=server", "-o", "name", "-f", "-"),
            stdin=json.dumps(_smallest(kind, replicas, role, container)),
        )


def _smallest(kind: str, replicas: str, role: str, container: str) -> dict[str, object]:
    """Build the smallest job that the operator accepts."""
    spec = {"containers": [{"name": container, "image": TRAINER_IMAGE}]}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": kind,
        "metadata": {"name": "is-taken", "namespace": "default"},
        "spec": {replicas: {role: {"replicas": 1, "template": {"spec": spec}}}},
    }


def _image(programs: Path) -> Path:
    archive = images.directory() / f"training-operator-{OPERATOR_IMAGE.partition(':')[2]}.tar"
    if not archive.exists():
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            (root / "tmp").mkdir()
            (root / "tmp").chmod(0o1777)
            shutil.copy(programs / "training-operator.v1", root / "manager")
            images.pack_root(root, OPERATOR_IMAGE, archive, {"Entrypoint": ["/manager"]})
    return archive


def _kustomization() -> dict[str, object]:
    name, _, tag = OPERATOR_IMAGE.partition(":")
    container = "/spec/template/spec/containers/0"
    changes = [
        {"op": "add", "path": f"{container}/imagePullPolicy", "value": "Never"},
        {
            "op": "add",
            "path": f"{container}/args",
            "value": [f"--pytorch-init-container-image={TRAINER_IMAGE}"],
        },
        *(
            {"op": "add", "path": f"{container}/env/-", "value": {"name": name, "value": value}}
            for name, value in (
                ("KUBERNETES_SERVICE_HOST", HOST_ADDRESS),
                ("KUBERNETES_SERVICE_PORT", "6443"),
            )
        ),
    ]
    return {
        "resources": ["manifests/overlays/standalone"],
        "images": [{"name": "kubeflow/training-operator", "newName": name, "newTag": tag}],
        "patches": [{"target": {"kind": "Deployment"}, "patch": json.dumps(changes)}],
    }
