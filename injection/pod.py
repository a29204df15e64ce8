# SPDX-License-Identifier: Apache-2.0
"""Injection into a pod that is about to be created: a manifest's plan, applied to plain data.

There is no text to preserve here, so the pod is not written out and parsed again: the start of each
pod waits for the plan alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from injection.annotations import ANNOTATION, own_annotations
from injection.plan import InjectionPlan, plan
from injection.previous import Former
from injection.recording import record_of
from injection.remarks import Remark
from injection.settings import told
from injection.workloads import Role, Template, Workload, at
from injection.yaml_tree import node_of
from rdzv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class InjectedPod:
    """The template of one pod with the sidecar, and the remarks on it."""

    template: Mapping[str, Any]
    notes: tuple[Remark, ...]


def inject_pod(
    manifest: Mapping[str, Any], path: str, role: Role, environ: Mapping[str, str]
) -> InjectedPod:
    """Inject into the one template at ``path`` of an object that has no sidecar there yet.

    ``environ`` has the variables that stand in for settings. Raises ``ConfigError`` with all
    obstacles; a launch line that bypasses Muster is one.
    """
    workload = Workload(node_of(manifest))
    node = next(node for node, _ in at(workload.node, path))
    template = Template(node, path, role)
    former = Former.of(node)
    settings = told({}, former.annotations, environ)
    made = plan(workload, template, settings, own_annotations(node), former, owner_is_made=True)
    if errors := [remark for remark in made.notes if remark.level == "error"]:
        raise ConfigError("\n".join(errors))
    return InjectedPod(placed(_at(manifest, path), made), tuple(made.notes))


def placed(template: Mapping[str, Any], plan: InjectionPlan) -> dict[str, Any]:
    """Return ``template`` with the plan in it; Muster's items come before those that are there.

    Only a mesh's native proxy stays before the sidecar.
    """
    metadata: Mapping[str, Any] = template.get("metadata") or {}
    spec = dict(template["spec"])
    containers = list(spec["containers"])
    container = dict(containers[plan.container_index])
    lists = {
        "env": plan.env,
        "volumeMounts": plan.mounts,
        "command": plan.command_prefix or plan.command,
    }
    for key, ours in lists.items():
        if ours:
            container[key] = [*ours, *(container.get(key) or [])]
    if plan.pre_stop is not None:
        container["lifecycle"] = {**(container.get("lifecycle") or {}), "preStop": plan.pre_stop}
    containers[plan.container_index] = container
    spec["containers"] = containers
    for key, ours in (("volumes", plan.volumes), ("imagePullSecrets", plan.pull_secrets)):
        if ours:
            spec[key] = [*ours, *(spec.get(key) or [])]
    inits, index = spec.get("initContainers") or [], plan.sidecar_index
    spec["initContainers"] = [*inits[:index], plan.sidecar, *inits[index:]]
    annotations = {**plan.annotations, ANNOTATION: str(record_of(template, plan))}
    changed = {
        **metadata,
        "annotations": {**(metadata.get("annotations") or {}), **annotations},
    }
    if plan.labels:
        changed["labels"] = {**(metadata.get("labels") or {}), **plan.labels}
    return {**template, "metadata": changed, "spec": {**spec, **plan.pod}}


def _at(manifest: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the template at ``path`` as plain data; a list's item is found by its name."""
    found: Any = manifest
    for word in filter(None, path.split(".")):
        if isinstance(found, list):
            found = next(item for item in found if item.get("name") == word)
        else:
            found = found[word]
    template: Mapping[str, Any] = found
    return template
