# SPDX-License-Identifier: Apache-2.0
"""Placement of a plan in a text or in plain data, each with the record of it there.

A pod that is about to be created has no text to preserve, so it is not written out and parsed
again: the start of each pod waits for the plan alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    added = [LETS_GO] if plan.lets_go_below_min else []
    added += [pull_secret_word(one["name"]) for one in plan.pull_secrets]
    added += [container_word(plan.container), *map(variable_word, plan.env)]
    added += [beside_word(key, value) for key, value in plan.beside.items()]
    added += ["command"] if plan.command_prefix else [WHOLE_COMMAND] if plan.command else []
    added += ["preStop"] if plan.pre_stop is not None else []
    added += [key for key in _in_pod(plan) if key not in pod or key in plan.pod]
    added += [key for key in _in_container(plan) if key not in container and key != "command"]
    added += [] if "metadata" in template else ["metadata"]
    added += [key for key in _metadata(plan, "") if key not in (template.get("metadata") or {})]
    return Record(added, list(plan.users))


# What a plan puts into a mapping: entries of a mapping or items of a list, and values that it lacks


def _in_pod(plan: InjectionPlan) -> dict[str, Any]:
    lists = {
        "initContainers": [plan.sidecar],
        "volumes": plan.volumes,
        "imagePullSecrets": plan.pull_secrets,
    }
    return {key: list(ours) for key, ours in lists.items() if ours} | plan.pod


def _in_container(plan: InjectionPlan) -> dict[str, Any]:
    lists = {
        "env": plan.env,
        "volumeMounts": plan.mounts,
        "command": plan.command_prefix or plan.command,
    }
    hook = {} if plan.pre_stop is None else {"lifecycle": {"preStop": plan.pre_stop}}
    return {key: list(ours) for key, ours in lists.items() if ours} | hook


def _metadata(plan: InjectionPlan, record: str) -> dict[str, Any]:
    labels = {"labels": plan.labels} if plan.labels else {}
    return {**labels, "annotations": {**plan.annotations, ANNOTATION: record}}


def place(splices: Splices, roots: Sequence[Node], template: Template, plan: InjectionPlan) -> None:
    """Put ``plan`` into ``template``, which is below ``roots``; raises ``ConfigError``."""
    node, path = template.node, template.path
    spec = _written(node, "spec", path)
    assert spec is not None
    pod = f"{path}.spec" if path else "spec"
    if is_alias(spec):
        raise taken_from_elsewhere(pod, spec[0])
    to = _Home(splices, style_of(spec), plan.sidecar_index)
    metadata = _metadata(plan, str(record_of(value_of(node), plan)))
    to.add(spec, _in_pod(plan), pod)

    containers = _written(spec[1], "containers", pod)
    assert containers is not None
    container = items(containers[1])[plan.container_index]
    where = f"{pod}.containers[{plan.container}]"
    if is_alias(containers) or container.start_mark.index < containers[1].start_mark.index:
        raise taken_from_elsewhere(where, containers[0])
    lacking = to.fill(container, _in_container(plan), where)
    splices.add_to_item(container, lacking, to.style, where)

    if plan.beside:
        # The object decides there what follows a pod's end.
        outer = path.rpartition(".")[0]
        opening = _entry(roots, lambda value: any(one is node for _, one in entries(value)))
        if opening is None:
            raise ConfigError(f"{outer} comes from elsewhere: write it out there")
        splices.add_entries(opening, plan.beside, to.style, outer)

    where = f"{path}.metadata" if path else "metadata"
    written = _written(node, "metadata", path)
    if written is not None:
        to.add(written, metadata, where)
        return
    opening = _entry(roots, lambda value: value is node)
    if opening is None:
        raise ConfigError(f"{where} is missing: give the object a name")
    splices.add_entries(opening, {"metadata": metadata}, to.style, where)


@dataclass(frozen=True, slots=True)
class _Home:
    """The text that a template's values go into; the sidecar is behind the first ``behind``."""

    splices: Splices
    style: Style
    behind: int

    def add(self, home: Entry, new: Mapping[str, Any], path: str) -> None:
        """Put values into the mapping that is the value of ``home``."""
        self.splices.add_entries(home, self.fill(home[1], new, path), self.style, path)

    def fill(self, mapping: Node, new: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Put values into those that a mapping has; return those that it lacks."""
        lacking: dict[str, Any] = {}
        for key, value in new.items():
            written = _written(mapping, key, path)
            where = f"{path}.{key}"
            if written is None:
                lacking[key] = value
            elif isinstance(value, list):
                behind = self.behind if key == "initContainers" else 0
                self.splices.add_items(written, value, self.style, where, behind)
            elif isinstance(value, Mapping):
                self.splices.add_entries(written, value, self.style, where)
            else:
                lacking[key] = value
        return lacking


def _written(node: Node, key: str, path: str) -> Entry | None:
    """Return the entry ``key`` of a mapping, or None; raises ``ConfigError`` if it is merged in."""
    written = entry(node, key)
    if written is None and child(node, key) is not None:
        raise ConfigError(
            f"{path}.{key} (line {line_of(node)}) comes through a merge key (<<):"
            " write it out there"
        )
    return written


def _entry(roots: Sequence[Node], is_value: Callable[[Node], bool]) -> Entry | None:
    """Find the entry that has such a value, in the place where it is written, or None."""
    left = list(roots)
    while left:
        at = left.pop()
        for pair in entries(at):
            if is_alias(pair):
                continue
            if is_value(pair[1]):
                return pair
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

    Only a mesh's native proxy stays before the sidecar. There is no text to preserve here, so the
    pod is not written out and parsed again: the start of each pod waits for the plan alone.
    """
    spec, index = template["spec"], plan.container_index
    containers = list(spec["containers"])
    containers[index] = _filled(containers[index], _in_container(plan))
    inits = list(spec.get("initContainers") or [])
    inits.insert(plan.sidecar_index, plan.sidecar)
    lists = {"containers": containers, "initContainers": inits}
    metadata = _metadata(plan, str(record_of(template, plan)))
    return {
        **template,
        "metadata": _filled(template.get("metadata") or {}, metadata),
        "spec": {**_filled(spec, _in_pod(plan)), **lists},
    }


def _filled(mapping: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with values put into those that it has, and those that it lacks."""
    filled = dict(mapping)
    for key, value in new.items():
        if isinstance(value, list):
            filled[key] = [*value, *(mapping.get(key) or [])]
        elif isinstance(value, Mapping):
            filled[key] = {**(mapping.get(key) or {}), **value}
        else:
            filled[key] = value
    return filled


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
