# SPDX-License-Identifier: Apache-2.0
"""Injection into a manifest's text: the choice of templates, and remarks on what is left alone.

The chosen templates are first put back to what they were before any sidecar; so nothing is ever put
in twice, and Muster's own parts are always written anew.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ruamel.yaml.nodes import Node

from injection import removal
from injection.annotations import ANNOTATION, Former, Record, injected, own_annotations
from injection.placement import place
from injection.plan import plan
from injection.remarks import Remark
from injection.removal import removed
from injection.settings import told
from injection.text_edits import Splices
from injection.workloads import Manifest, Place, Template, Workload, at, walk
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
        held = injected(workload.node)
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
    nodes = walk(workload.node)
    path = next((".".join(words) for words, node in nodes if words and _is_like_one(node)), None)
    if path is None:
        return f"{given}there is no pod template in it"
    if workload.known is None:
        given = given or "its kind is not known; "
    return f"{given}if {path} is a pod template, say --template-path {path}"


def _is_like_one(node: Node) -> bool:
    return child(node, "spec", "containers") is not None


def _matches(workload: Workload, pattern: str) -> bool:
    return fnmatch.fnmatchcase(workload.label.lower(), pattern.lower())


def _labels(objects: Sequence[Workload]) -> str:
    return ", ".join(workload.label for workload in objects)


ALLOW = "refused; --allow-bypass injects all the same; see docs/kubernetes.md#what-it-refuses"


@dataclass(frozen=True, slots=True)
class Request:
    """The caller's parameters, apart from the text.

    ``flags`` are settings by attribute name, None if not given; ``environ`` has the variables that
    stand in for them. ``objects`` are patterns of KIND/NAME. ``allow_bypass`` turns errors into
    warnings.
    """

    flags: Mapping[str, str | None]
    environ: Mapping[str, str]
    objects: Sequence[str] = ()
    template_path: str | None = None
    allow_bypass: bool = False


@dataclass(frozen=True, slots=True)
class Injected:
    """The new text, the remarks on it, and the numbers of objects chosen and left as they are."""

    text: str
    notes: tuple[Remark, ...]
    chosen: int = 0
    left: int = 0


def inject(text: str, request: Request) -> Injected:
    """Put the sidecar into the pod templates of ``text``; raises ``ConfigError``."""
    given = Manifest(text)
    chosen, left = targets(given.objects, request.objects, request.template_path)
    remarks = [*map(Remark, left)]
    formers = [Former.of(target.template.node) for target in chosen]
    before = given
    if ANNOTATION in text:
        before = Manifest(removed(given, [target.place for target in chosen]))
    splices, homes, touched = Splices(before.text), dict[int, Place](), dict[Place, int]()
    for target, former in zip(chosen, formers, strict=True):
        workload = before.objects[target.number]
        template = replace(target.template, node=at(workload.node, target.template.path)[0][0])
        home = homes.setdefault(id(template.node), target.place)
        if home != target.place:  # an alias of a template that is done
            if home[0] != target.number:
                raise removal.shared(
                    removal.place_name(workload, template.path),
                    removal.place_name(before.objects[home[0]], home[1]),
                )
            touched[target.place] = touched[home]
            continue
        label = f"{workload.label}: "
        try:
            settings = told(request.flags, former.annotations, request.environ)
            made = plan(workload, template, settings, own_annotations(template.node), former)
            place(splices, before.roots, template, made)
            touched[target.place] = made.container_index
        except ConfigError as error:
            raise ConfigError(label + str(error).replace("\n", "\n" + label)) from error
        remarks += [remark.about(workload.label) for remark in made.notes]
    after = _checked(splices.result(), before, touched)
    meant = {target.number for target in chosen}
    others = [n for n in range(len(given.objects)) if n not in meant]
    removal.check_unintended(before.objects, after.objects, sorted(meant), touched)
    removal.check_unintended(given.objects, after.objects, others, {})
    remarks = list({str(remark): remark for remark in remarks}.values())
    if errors := [remark for remark in remarks if remark.level == "error"]:
        if not request.allow_bypass:
            raise ConfigError("\n".join([*errors, ALLOW]))
        remarks = [remark.lowered() for remark in remarks]
    return Injected(after.text, tuple(remarks), len(meant), len(left))


def take_out(text: str, patterns: Sequence[str] = (), template_path: str | None = None) -> Injected:
    """Take out every sidecar, or only those of some objects; raises ``ConfigError``."""
    given = Manifest(text)
    places, notes = sidecars(given.objects, patterns, template_path)
    after = Manifest(removed(given, places))
    meant = {number for number, _ in places}
    others = [n for n in range(len(given.objects)) if n not in meant]
    removal.check_unintended(given.objects, after.objects, others, {})
    return Injected(after.text, tuple(map(Remark, notes)), len(meant), len(notes))


def _checked(result: str, before: Manifest, places: Collection[Place]) -> Manifest:
    """Read ``result``; raise ``ConfigError`` if the removal of the sidecar does not undo it.

    No manifest is changed in a way that cannot be undone.
    """
    try:
        after = Manifest(result)
        undone = removed(after, places)
    except ConfigError:
        undone = ""
    if undone != before.text:
        raise ConfigError(removal.UNSAFE_EDIT)
    return after
