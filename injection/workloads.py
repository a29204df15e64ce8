# SPDX-License-Identifier: Apache-2.0
"""The objects of a text: the places of their pod templates, and what they state of a job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ruamel.yaml.nodes import MappingNode, Node

from injection.kinds import Kind, kind_of
from injection.yaml_tree import child, items, keys, text_of, value_of

Role = Literal["worker", "launcher"]
Place = tuple[int, str]
"""The place of a pod template in a text: the number of its object there, and the path within it."""


@dataclass(frozen=True, slots=True)
class Template:
    """One pod template: its node, and the path that leads to it."""

    node: Node
    path: str
    role: Role


@dataclass(frozen=True, slots=True)
class Workload:
    """One object of the text."""

    node: Node

    @property
    def group(self) -> str:
        """The API group."""
        return text_of(child(self.node, "apiVersion")).rpartition("/")[0]

    @property
    def kind(self) -> str:
        """The kind, as it is written."""
        return text_of(child(self.node, "kind"))

    @property
    def name(self) -> str:
        """The object's name; empty if only a prefix of it is known."""
        return text_of(child(self.node, "metadata", "name"))

    @property
    def prefix(self) -> str:
        """The beginning of the object's name if the rest is generated; else empty."""
        return "" if self.name else text_of(child(self.node, "metadata", "generateName"))

    @property
    def namespace(self) -> str:
        """The object's namespace; empty if it has none."""
        return text_of(child(self.node, "metadata", "namespace"))

    @property
    def is_pod(self) -> bool:
        """Whether it is a pod itself."""
        return (self.group, self.kind) == ("", "Pod")

    @property
    def label(self) -> str:
        """The object's name in messages."""
        return f"{self.kind or 'object'}/{self.name or self.prefix or '?'}"

    @property
    def known(self) -> Kind | None:
        """The facts about objects of this kind; None if it is unknown."""
        return kind_of(text_of(child(self.node, "apiVersion")), self.kind)

    def templates(self) -> list[Template]:
        """Return the pod templates of an object of this kind; none if the kind is unknown."""
        kind = self.known
        if kind is None:
            return []
        launcher = [] if kind.launcher is None else self.templates_at(kind.launcher, "launcher")
        return [*launcher, *(t for path in kind.templates for t in self.templates_at(path))]

    def templates_at(self, path: str, role: Role = "worker") -> list[Template]:
        """Return the pod templates at a path."""
        return [Template(node, where, role) for node, where in at(self.node, path)]

    def replaces_late(self, template: Template) -> bool:
        """Return whether the replacement of a pod is created only once that pod is gone."""
        kind = self.known or Kind(())
        if kind.replaced_once_gone or not kind.of_jobs:
            return kind.replaced_once_gone
        job = next(node for node, _ in at(self.node, template.path.rpartition(".")[0]))
        # With a podFailurePolicy, Failed is the default and the only replacement policy allowed.
        has_policy = value_of(child(job, "podFailurePolicy")) is not None
        return has_policy or text_of(child(job, "podReplacementPolicy")) == "Failed"

    def told(self, path: str | None) -> str:
        """Return the object's value at ``path`` as text; empty if it has no scalar there."""
        value: Any = value_of(child(self.node, *path.split("."))) if path else None
        return "" if value is None or isinstance(value, dict | list) else str(value)


def workloads(roots: list[Node]) -> Iterator[Workload]:
    """Yield every object of a text, including those inside lists."""
    for root in roots:
        if text_of(child(root, "kind")).endswith("List") and child(root, "items") is not None:
            yield from workloads(items(child(root, "items")))
        elif isinstance(root, MappingNode):
            yield Workload(root)


def at(node: Node, path: str, walked: str = "") -> Iterator[tuple[Node, str]]:
    """Yield every node that a path leads to, and the path without wildcards to it."""
    part, _, rest = path.partition(".")
    if not part:
        yield node, walked
        return
    for name, below in steps(node):
        if part in ("*", name):
            yield from at(below, rest, f"{walked}.{name}" if walked else name)


def steps(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield the nodes directly below a node, each with the word that leads to it in a path."""
    for index, item in enumerate(items(node)):
        yield text_of(child(item, "name")) or str(index), item
    for name in keys(node):
        below = child(node, name)
        assert below is not None
        yield name, below
