# SPDX-License-Identifier: Apache-2.0
"""The choice of the pod templates of a text to inject into, or to remove the sidecar from."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ruamel.yaml.nodes import Node

from injection.annotations import Record, injected
from injection.workloads import Place, Template, Workload, steps
from injection.yaml_tree import child
from rdzv.errors import ConfigError

WITHOUT_TEMPLATE = {
    ("trainer.kubeflow.org", "TrainJob"): (
        "a TrainJob has no pod template: inject into the runtime that its spec.runtimeRef names"
    ),
}


@dataclass(frozen=True, slots=True)
class Target:
    """A template, and the number of its object in the text."""

    number: int
    template: Template

    @property
    def place(self) -> Place:
        """The template's place, which is the same in any tree of the text."""
        return self.number, self.template.path


def targets(
    objects: Sequence[Workload], patterns: Sequence[str], template_path: str | None
) -> tuple[list[Target], list[str]]:
    """Choose the templates, and state for every other object why it is left as it is.

    Raises ``ConfigError`` if there is none, or if the choice is ambiguous.
    """
    if not objects:
        raise ConfigError("there is no object in this text: give a manifest")
    found = {n: _templates(workload, template_path) for n, workload in enumerate(objects)}
    able = [n for n in found if found[n]]
    chosen, why = _chosen(objects, able, found, patterns)
    reasons = {n: why if n in able else _without(objects[n], template_path) for n in found}
    notes = [
        f"{workload.label}: left as it is: {reasons[n]}"
        for n, workload in enumerate(objects)
        if n not in chosen
    ]
    if not chosen:
        raise ConfigError("\n".join(notes))
    return [Target(n, template) for n in chosen for template in found[n]], notes


def sidecars(
    objects: Sequence[Workload], patterns: Sequence[str], template_path: str | None
) -> tuple[list[Place], list[str]]:
    """Choose the templates whose sidecar to remove, and state which objects are left, and why.

    Raises ``ConfigError`` if a pattern matches nothing.
    """
    _refuse_unknown(objects, patterns)
    chosen: list[Place] = []
    notes: list[str] = []
    for number, workload in enumerate(objects):
        held = list(injected(workload.node))
        if template_path is not None:
            there = {id(template.node) for template in workload.templates_at(template_path)}
            meant = [(node, path) for node, path in held if id(node) in there]
        else:
            meant = held
        named = any(_matches(workload, pattern) for pattern in patterns)
        if named or not patterns:
            chosen += [(number, path) for _, path in meant]
        if held and patterns and not named:
            notes.append(f"{workload.label}: left as it is: no --object names it")
        elif held and not meant:
            notes.append(f"{workload.label}: left as it is: no sidecar is at its {template_path}")
        elif named and not held:
            notes.append(f"{workload.label}: left as it is: there is no sidecar in it")
    return chosen, notes


def _refuse_unknown(objects: Sequence[Workload], patterns: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(_matches(workload, pattern) for workload in objects):
            raise ConfigError(
                f"--object: nothing is called {pattern} here; there are {_labels(objects)}"
            )


def _chosen(
    objects: Sequence[Workload],
    able: Sequence[int],
    found: dict[int, list[Template]],
    patterns: Sequence[str],
) -> tuple[list[int], str]:
    if patterns:
        _refuse_unknown(objects, patterns)
        chosen = [n for n in able if any(_matches(objects[n], pattern) for pattern in patterns)]
        return chosen, "no --object names it"
    before = [n for n in able if any(Record.of(template.node) for template in found[n])]
    if before:
        return before, "it has no sidecar so far, and no --object names it"
    if len(able) > 1:
        raise ConfigError(
            f"{len(able)} objects have pod templates: name those that train with --object, as in"
            f" --object {objects[able[0]].label}; there are {_labels([objects[n] for n in able])}"
        )
    return list(able), ""


def _templates(workload: Workload, template_path: str | None) -> list[Template]:
    if template_path is not None:
        return workload.templates_at(template_path)
    known = workload.templates()
    seen = {id(template.node) for template in known}
    others = [pair for pair in injected(workload.node) if id(pair[0]) not in seen]
    return [*known, *(Template(node, path, "worker") for node, path in others)]


def _without(workload: Workload, template_path: str | None) -> str:
    if (workload.group, workload.kind) in WITHOUT_TEMPLATE:
        return WITHOUT_TEMPLATE[(workload.group, workload.kind)]
    given = "" if template_path is None else f"nothing is at its {template_path}; "
    path = next(_like_templates(workload.node), None)
    if path is None:
        return f"{given}there is no pod template in it"
    if workload.known is None:
        given = given or "its kind is not known; "
    return f"{given}if {path} is a pod template, say --template-path {path}"


def _like_templates(node: Node, path: str = "") -> Iterator[str]:
    if child(node, "spec", "containers") is not None and path:
        yield path
    for name, below in steps(node):
        yield from _like_templates(below, f"{path}.{name}" if path else name)


def _matches(workload: Workload, pattern: str) -> bool:
    return fnmatch.fnmatchcase(workload.label.lower(), pattern.lower())


def _labels(objects: Sequence[Workload]) -> str:
    return ", ".join(workload.label for workload in objects)
