# SPDX-License-Identifier: Apache-2.0
"""Injection into the text of a manifest, with remarks on what is left as it is, and why.

The chosen templates are first put back to what they were before any sidecar; so nothing is ever put
in twice, and Muster's own parts are always written anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ruamel.yaml.nodes import Node

from injection import unintended_changes
from injection.annotations import ANNOTATION, own_annotations
from injection.placement import place
from injection.plan import plan
from injection.previous import Former
from injection.remarks import Remark
from injection.removal import removed
from injection.settings import told
from injection.targets import sidecars, targets
from injection.text_edits import Splices
from injection.workloads import Place, Template, Workload, at, workloads
from injection.yaml_tree import documents
from rdzv.errors import ConfigError

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
    given = list(workloads(documents(text)))
    chosen, left = targets(given, request.objects, request.template_path)
    remarks = [*map(Remark, left)]
    formers = [Former.of(target.template.node) for target in chosen]
    if ANNOTATION in text:
        text = removed(text, [target.place for target in chosen])
    roots = documents(text)
    objects = list(workloads(roots))
    splices, homes, touched = Splices(text), dict[int, Place](), dict[Place, int]()
    for target, former in zip(chosen, formers, strict=True):
        workload = objects[target.number]
        template = _again(workload, target.template)
        home = homes.setdefault(id(template.node), target.place)
        if home != target.place:  # an alias of a template that is done
            if home[0] != target.number:
                raise unintended_changes.shared(
                    unintended_changes.place_name(workload, template.path),
                    unintended_changes.place_name(objects[home[0]], home[1]),
                )
            touched[target.place] = touched[home]
            continue
        label = f"{workload.label}: "
        try:
            settings = told(request.flags, former.annotations, request.environ)
            made = plan(workload, template, settings, own_annotations(template.node), former)
            place(splices, roots, template, made)
            touched[target.place] = made.container_index
        except ConfigError as error:
            raise ConfigError(label + str(error).replace("\n", "\n" + label)) from error
        remarks += [remark.about(workload.label) for remark in made.notes]
    result = splices.result()
    _check(result, text, touched)
    after = list(workloads(documents(result)))
    meant = {target.number for target in chosen}
    unintended_changes.check(objects, after, sorted(meant), touched)
    unintended_changes.check(given, after, [n for n in range(len(given)) if n not in meant], {})
    remarks = list({str(remark): remark for remark in remarks}.values())
    if errors := [remark for remark in remarks if remark.level == "error"]:
        if not request.allow_bypass:
            raise ConfigError("\n".join([*errors, ALLOW]))
        remarks = [remark.lowered() for remark in remarks]
    return Injected(result, tuple(remarks), len(meant), len(left))


def take_out(text: str, patterns: Sequence[str] = (), template_path: str | None = None) -> Injected:
    """Take out every sidecar, or only those of some objects; raises ``ConfigError``."""
    given = list(workloads(documents(text)))
    places, notes = sidecars(given, patterns, template_path)
    result = removed(text, places)
    meant = {number for number, _ in places}
    others = [n for n in range(len(given)) if n not in meant]
    unintended_changes.check(given, list(workloads(documents(result))), others, {})
    return Injected(result, tuple(map(Remark, notes)), len(meant), len(notes))


def _check(result: str, text: str, places: Collection[Place]) -> None:
    """Raise ``ConfigError`` if the removal of the sidecar from ``result`` would not give ``text``.

    No manifest is changed in a way that cannot be undone.
    """
    try:
        undone = removed(result, places)
    except ConfigError:
        undone = ""
    if undone != text:
        raise ConfigError(unintended_changes.UNSAFE)


def _again(workload: Workload, template: Template) -> Template:
    """Return the same template in the tree of ``workload``."""
    node: Node = next(node for node, path in at(workload.node, template.path))
    return Template(node, template.path, template.role)
