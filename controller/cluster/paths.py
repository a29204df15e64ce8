# SPDX-License-Identifier: Apache-2.0
"""Where the API keeps the objects that the controller reads or writes."""

from __future__ import annotations

import re
from urllib.parse import quote

from injection.settings import LABEL

SECRETS = "secrets"

_PLURALS = {
    ("apps", "Deployment"): "deployments",
    ("apps", "StatefulSet"): "statefulsets",
    ("jobset.x-k8s.io", "JobSet"): "jobsets",
    ("leaderworkerset.x-k8s.io", "LeaderWorkerSet"): "leaderworkersets",
    ("batch", "Job"): "jobs",
    ("kubeflow.org", "PyTorchJob"): "pytorchjobs",
    ("kubeflow.org", "MPIJob"): "mpijobs",
    ("kai.alibabacloud.com", "TrainingJob"): "trainingjobs",
}
"""Owners that are read: those that say more of a job than their pods do."""

PODS_OF_JOBS = f"/api/v1/pods?labelSelector={LABEL}"
"""The pods that have a sidecar."""

NODES = "/api/v1/nodes"


_WORD = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", re.ASCII)


def core(namespace: str, plural: str, name: str = "") -> str:
    """An object, or all of a kind, of the core API.

    Who asks the webhook may name any text: none leads elsewhere, with our rights.
    """
    of_kind = f"/api/v1/namespaces/{quote(namespace, safe='')}/{plural}"
    return f"{of_kind}/{quote(name, safe='')}" if name else of_kind


def owner(api_version: str, kind: str, namespace: str, name: str) -> str | None:
    """An object with a pod template; None where its kind is not one that is read.

    A pod may name any text as its owner: one that is no name would lead elsewhere, with our rights.
    """
    group, _, version = api_version.rpartition("/")
    plural = _PLURALS.get((group, kind))
    if plural is None or not all(map(_WORD.fullmatch, (version, namespace, name))):
        return None
    return f"/apis/{group}/{version}/namespaces/{namespace}/{plural}/{name}"


def webhook_configuration(name: str) -> str:
    """What tells the API server of a webhook."""
    return f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{name}"


def lease(namespace: str, name: str) -> str:
    """A Lease, by which replicas choose who leads."""
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
