# SPDX-License-Identifier: Apache-2.0
"""API paths of the objects that the controller reads or writes."""

from __future__ import annotations

import re
from urllib.parse import quote

from injection.kinds import kind_of
from injection.settings import ASKS, LABEL

SECRETS = "secrets"

PODS_OF_JOBS = f"/api/v1/pods?labelSelector={LABEL}"
"""The pods that have a sidecar."""

PODS_WITHOUT = f"/api/v1/pods?labelSelector={quote(f'{ASKS}=true,!{LABEL}')}"
"""The pods that ask for a sidecar by their own label and have none."""

NAMESPACES_THAT_ASK = f"/api/v1/namespaces?labelSelector={quote(f'{ASKS}=true')}"
"""The namespaces that ask for a sidecar for all their pods."""

NODES = "/api/v1/nodes"


_WORD = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", re.ASCII)


def core(namespace: str, plural: str, name: str = "") -> str:
    """Return the path of an object, or of all of a kind, of the core API.

    A client of the webhook may name any text: it is quoted, so that no other path can result.
    """
    of_kind = f"/api/v1/namespaces/{_quoted(namespace)}/{plural}"
    return f"{of_kind}/{_quoted(name)}" if name else of_kind


def pods_without(namespace: str) -> str:
    """Return the path of the pods for which their namespace asks, and which have no sidecar."""
    selector = quote(f"{ASKS} notin (true,false),!{LABEL}")
    return f"{core(namespace, 'pods')}?labelSelector={selector}"


def namespace(name: str) -> str:
    """Return the path of a namespace."""
    return f"/api/v1/namespaces/{_quoted(name)}"


def _quoted(text: str) -> str:
    """Quote a text; half of a surrogate pair, which UTF-8 cannot encode, becomes a ``?``."""
    return quote(text, safe="", errors="replace")


def owner(api_version: str, kind: str, namespace: str, name: str) -> str | None:
    """Return the path of an object with a pod template; None if its kind is not one to read.

    A pod may name any text as its owner: None if it is no name, as another path could result.
    """
    group, _, version = api_version.rpartition("/")
    known = kind_of(api_version, kind)
    plural = known.plural if known is not None else ""
    if not plural or not all(map(_WORD.fullmatch, (version, namespace, name))):
        return None
    return f"/apis/{group}/{version}/namespaces/{namespace}/{plural}/{name}"


def webhook_configuration(name: str) -> str:
    """Return the path of a mutating webhook configuration."""
    return f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{name}"


def cron_job(namespace: str, name: str) -> str:
    """Return the path of a CronJob."""
    return f"/apis/batch/v1/namespaces/{namespace}/cronjobs/{name}"


def lease(namespace: str, name: str) -> str:
    """Return the path of a Lease, by which the replicas elect a leader."""
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
