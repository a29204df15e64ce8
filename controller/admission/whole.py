# SPDX-License-Identifier: Apache-2.0
"""The other parts of a job, beside the pod that is asked about: a pure function of the owner.

A launcher whose workers have no sidecar waits for them for ever. Pods come one by one, so each
verdict looks at all templates of the owner: a job is injected whole, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.admission.owner import Owner
from injection.annotations import ANNOTATION
from injection.kinds import Kind, kind_of
from injection.pod import inject_pod
from injection.settings import ASKS, TABLE, annotation
from injection.workloads import Template, Workload
from injection.yaml_tree import child, node_of, text_of, value_of
from rdzv.errors import ConfigError

OTHERS = (
    "{part} of {kind} {name} cannot be injected, and a job is injected whole or not at all: {why}"
)
LABELS = (
    "{part} and {other} of {kind} {name} do not agree on the label {label}: give both the same, for"
    " a job is injected whole or not at all"
)
UNREAD = (
    "{kind} {name} cannot be read, so whether its workers can be injected is not known: allow the"
    " controller to read it, or give {least} and {most} to both of its templates"
)


def obstacle_of_others(
    owner: Owner, namespace: str, read: Mapping[str, Any], environ: Mapping[str, str]
) -> str | None:
    """Return why another part of the pod's job cannot be injected; None if all parts can."""
    about = {"apiVersion": owner.api_version, "kind": owner.kind}
    manifest = {**read, **about, "metadata": {"name": owner.name, "namespace": namespace}}
    parts = Workload(node_of(manifest)).templates()
    own = next((part for part in parts if part.path == owner.path), None)
    if read.get("kind") != owner.kind or own is None:
        return None
    named = {"kind": owner.kind, "name": owner.name}
    for other in parts:
        if other.path == owner.path or _is_injected(other):
            continue
        if _label(other) != _label(own):
            return LABELS.format(part=_name(other), other=_name(own), label=ASKS, **named)
        try:
            inject_pod(manifest, other.path, other.role, environ)
        except ConfigError as error:
            why, *_ = str(error).splitlines()
            return OTHERS.format(part=_name(other), why=why, **named)
    return None


def obstacle_of_unread(
    owner: Owner, pod: Mapping[str, Any], environ: Mapping[str, str]
) -> str | None:
    """Return why a launcher is not injected if its object cannot be read; None if it may be.

    Its own command has the size of the job, and its workers' pods do not.
    """
    kind = kind_of(owner.api_version, owner.kind) or Kind(())
    if kind.launcher is None or owner.path != kind.launcher:
        return None
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    bounds = ("min_nodes", "max_nodes")
    if all(annotation(one) in annotations or environ.get(TABLE[one].variable) for one in bounds):
        return None
    least, most = map(annotation, bounds)
    return UNREAD.format(kind=owner.kind, name=owner.name, least=least, most=most)


def _is_injected(part: Template) -> bool:
    return ANNOTATION in (value_of(child(part.node, "metadata", "annotations")) or {})


def _label(part: Template) -> str:
    return text_of(child(part.node, "metadata", "labels", ASKS))


def _name(part: Template) -> str:
    return part.path.split(".")[-2]
