# SPDX-License-Identifier: Apache-2.0
"""Placement of a plan in a text or in plain data, each with the record of it there.

A pod that is about to be created has no text to preserve, so it is not written out and parsed
again: the start of each pod waits for the plan alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ruamel.yaml.nodes import Node

from injection.annotations import (
    ANNOTATION,
    LETS_GO,
    WHOLE_COMMAND,
    Former,
    Record,
    beside_word,
    container_word,
    own_annotations,
    pull_secret_word,
    variable_word,
)
from injection.plan import InjectionPlan, plan
from injection.remarks import Remark
from injection.settings import told
from injection.text_edits import Splices, Style, style_of, taken_from_elsewhere
from injection.workloads import Role, Template, Workload, at
from injection.yaml_tree import (
    Entry,
    child,
    entries,
    entry,
    is_alias,
    items,
    line_of,
    node_of,
    value_of,
)
from rdzv.errors import ConfigError


def record_of(template: Mapping[str, Any], plan: InjectionPlan) -> Record:
    """Record what ``template`` does not have yet; an entry that exists, if empty, is the user's."""
    pod: Mapping[str, Any] = template["spec"]
    container: Mapping[str, Any] = pod["containers"][plan.container_index]
    metadata = template.get("metadata", {})
    added = [LETS_GO] if plan.lets_go_below_min else []
    added += [key for key in ("initContainers", "volumes") if key not in pod]
    added += [pull_secret_word(one["name"]) for one in plan.pull_secrets]
    if plan.pull_secrets and "imagePullSecrets" not in pod:
        added.append("imagePullSecrets")
    added += plan.pod
    added += [container_word(plan.container), *map(variable_word, plan.env)]
    ours = {"env": plan.env, "volumeMounts": plan.mounts}
    added += [key for key, new in ours.items() if new and key not in container]
    if plan.command_prefix:
        added.append("command")
    if plan.command:
        added.append(WHOLE_COMMAND)
    added += [beside_word(key, value) for key, value in plan.beside.items()]
    if plan.pre_stop is not None:
        added += ["preStop", *(["lifecycle"] if "lifecycle" not in container else [])]
    if "metadata" not in template:
        added.append("metadata")
    # The record itself is an annotation, so annotations are added in any case.
    parts = ["labels", "annotations"] if plan.labels else ["annotations"]
    added += [part for part in parts if part not in (metadata or {})]
    return Record(added, list(plan.users))


def place(splices: Splices, roots: Sequence[Node], template: Template, plan: InjectionPlan) -> None:
    """Put ``plan`` into ``template``, which is below ``roots``; raises ``ConfigError``."""
    spec = _written(template.node, "spec", template.path)
    assert spec is not None
    pod = f"{template.path}.spec" if template.path else "spec"
    if is_alias(spec):
        raise taken_from_elsewhere(pod, spec[0])
    style = style_of(spec)
    record = record_of(value_of(template.node), plan)
    new_in_pod: dict[str, Any] = {}
    for key, items_of_ours, behind in (
        ("initContainers", [plan.sidecar], plan.sidecar_index),
        ("volumes", plan.volumes, 0),
        ("imagePullSecrets", plan.pull_secrets, 0),
    ):
        if not items_of_ours:
            continue
        written = _written(spec[1], key, pod)
        if written is None:
            new_in_pod[key] = list(items_of_ours)
        else:
            splices.add_items(written, items_of_ours, style, f"{pod}.{key}", behind)
    new_in_pod |= plan.pod
    splices.add_entries(spec, new_in_pod, style, pod)

    _place_container(splices, spec[1], pod, style, plan)
    if plan.beside:
        _place_beside(splices, roots, template, style, plan.beside)
    _place_metadata(splices, roots, template, style, plan, record)


def _place_container(
    splices: Splices, pod: Node, path: str, style: Style, plan: InjectionPlan
) -> None:
    where = f"{path}.containers[{plan.container}]"
    containers = _written(pod, "containers", path)
    assert containers is not None
    container = items(containers[1])[plan.container_index]
    if is_alias(containers) or container.start_mark.index < containers[1].start_mark.index:
        raise taken_from_elsewhere(where, containers[0])
    new: dict[str, Any] = {}
    lists: dict[str, Sequence[Any]] = {"env": plan.env, "volumeMounts": plan.mounts}
    for key, ours in lists.items():
        if not ours:
            continue
        written = _written(container, key, where)
        if written is None:
            new[key] = list(ours)
        else:
            splices.add_items(written, ours, style, f"{where}.{key}")
    if plan.command_prefix:
        command = _written(container, "command", where)
        assert command is not None
        splices.add_items(command, plan.command_prefix, style, f"{where}.command")
    if plan.command:
        new["command"] = list(plan.command)
    if plan.pre_stop is not None:
        lifecycle = _written(container, "lifecycle", where)
        if lifecycle is None:
            new["lifecycle"] = {"preStop": plan.pre_stop}
        else:
            splices.add_entries(lifecycle, {"preStop": plan.pre_stop}, style, f"{where}.lifecycle")
    splices.add_to_item(container, new, style, where)


def _place_beside(
    splices: Splices,
    roots: Sequence[Node],
    template: Template,
    style: Style,
    beside: Mapping[str, Any],
) -> None:
    """Put entries beside the template, where the object decides what follows a pod's end."""
    opening = _entry_around(template.node, roots)
    path = template.path.rpartition(".")[0]
    if opening is None:
        raise ConfigError(f"{path} comes from elsewhere: write it out there")
    splices.add_entries(opening, beside, style, path)


def _place_metadata(
    splices: Splices,
    roots: Sequence[Node],
    template: Template,
    style: Style,
    plan: InjectionPlan,
    record: Record,
) -> None:
    path = f"{template.path}.metadata" if template.path else "metadata"
    ours: dict[str, Mapping[str, str]] = {"labels": plan.labels, "annotations": plan.annotations}
    metadata = _written(template.node, "metadata", template.path)
    new = [
        part
        for part in ours
        if ours[part] or part == "annotations"
        if metadata is None or _written(metadata[1], part, path) is None
    ]
    ours["annotations"] = {**plan.annotations, ANNOTATION: str(record)}
    if metadata is None:
        opening = _entry_of(template.node, roots)
        if opening is None:
            raise ConfigError(f"{path} is missing: give the object a name")
        splices.add_entries(opening, {"metadata": {k: ours[k] for k in new}}, style, path)
        return
    splices.add_entries(metadata, {part: ours[part] for part in new}, style, path)
    for part in ours:
        written = _written(metadata[1], part, path)
        if written is not None:
            splices.add_entries(written, ours[part], style, f"{path}.{part}")


def _written(node: Node, key: str, path: str) -> Entry | None:
    """Return the entry ``key`` of a mapping, or None; raises ``ConfigError`` if it is merged in."""
    written = entry(node, key)
    if written is None and child(node, key) is not None:
        raise ConfigError(
            f"{path}.{key} (line {line_of(node)}) comes through a merge key (<<):"
            " write it out there"
        )
    return written


def _entry_around(node: Node, roots: Sequence[Node]) -> Entry | None:
    """Find the entry whose value is the mapping that has ``node`` as a value, or None."""
    left = list(roots)
    while left:
        at = left.pop()
        for pair in entries(at):
            if is_alias(pair):
                continue
            if any(below is node for _, below in entries(pair[1])):
                return pair
            left.append(pair[1])
        left += items(at)
    return None


def _entry_of(node: Node, roots: Sequence[Node]) -> Entry | None:
    """Find the entry whose value a node is, in the place where it is written, or None."""
    left = list(roots)
    while left:
        at = left.pop()
        for pair in entries(at):
            if pair[1] is node and not is_alias(pair):
                return pair
            if not is_alias(pair):
                left.append(pair[1])
        left += items(at)
    return None


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
