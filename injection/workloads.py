# SPDX-License-Identifier: Apache-2.0
"""The objects of a text: the places of their pod templates, and what they state of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ruamel.yaml.nodes import MappingNode, Node

from injection.kinds import Kind, kind_of
from injection.yaml_tree import child, documents, fields, items, text_of, value_of

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

    def stated(self, path: str | None) -> str:
        """Return the object's value at ``path`` as text; empty if it has no scalar there."""
        value: Any = value_of(child(self.node, *path.split("."))) if path else None
        return "" if value is None or isinstance(value, dict | list) else str(value)


class Manifest:
    """A text and the objects in it, read once; raises ``ConfigError`` if it is no YAML."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.roots = documents(text)
        self.objects = [Workload(node) for root in self.roots for node in _objects(root)]


def _objects(root: Node) -> list[Node]:
    """Return the object of a document, or those of a list."""
    if text_of(child(root, "kind")).endswith("List") and child(root, "items") is not None:
        return [node for item in items(child(root, "items")) for node in _objects(item)]
    return [root] if isinstance(root, MappingNode) else []


def at(node: Node, path: str) -> list[tuple[Node, str]]:
    """Return every node that a path leads to, and the path without wildcards to it."""
    found = [(node, "")]
    for part in path.split("."):
        if not part:
            break
        found = [
            (below, f"{walked}.{name}" if walked else name)
            for over, walked in found
            for name, below in steps(over)
            if part in ("*", name)
        ]
    return found


def steps(node: Node) -> list[tuple[str, Node]]:
    """Return the nodes directly below a node, each with the word that leads to it in a path."""
    listed = [(text_of(child(one, "name")) or str(n), one) for n, one in enumerate(items(node))]
    return [*listed, *fields(node).items()]


Words = tuple[str, ...]
"""The words of a path."""


def further(_: Words, node: Node) -> Iterable[tuple[Words, Node]]:
    """Return all nodes directly below a node."""
    return [((name,), below) for name, below in steps(node)]


def walk(
    node: Node, below: Callable[[Words, Node], Iterable[tuple[Words, Node]]] = further
) -> Iterator[tuple[Words, Node]]:
    """Yield a node and those below it, in order, with the words that lead to each.

    ``below`` returns the next ones of a node, with the words that lead on to them.
    """
    left: list[tuple[Words, Node]] = [((), node)]
    while left:
        words, one = left.pop()
        yield words, one
        left += [((*words, *more), inner) for more, inner in reversed([*below(words, one)])]
