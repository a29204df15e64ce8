# SPDX-License-Identifier: Apache-2.0
"""YAML as a tree of nodes that know their place in the text.

Nothing is ever written back from the tree: what changes is spliced into the text, so that
comments, order, quotes, anchors and line breaks stay as they are, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.tag import Tag

from rdzv.errors import ConfigError

MERGE = "<<"
LARGEST = 100_000
"""Limit of the parts of one document: a few aliases of aliases can expand beyond any memory."""

Entry = tuple[Node, Node]
_TAGS = {
    kind: Tag(suffix=f"tag:yaml.org,2002:{kind}")
    for kind in ("str", "map", "seq", "null", "bool", "int", "float")
}
"""One tag for all nodes of a kind: a tag decodes its text once."""


def documents(text: str) -> list[Node]:
    """Parse every document of ``text``; raises ``ConfigError`` with the line of the fault."""
    try:
        return _parsed(text)
    except ConfigError as error:
        if "{{" not in text:
            raise
        hint = "; if it is a Helm template, render it: helm template … | muster inject -"
        raise ConfigError(str(error) + hint) from error


def _parsed(text: str) -> list[Node]:
    try:
        roots = [root for root in YAML(typ="safe", pure=True).compose_all(text) if root is not None]
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        raise ConfigError(f"{where}: this is no YAML: {error.problem or error.context}") from error
    except YAMLError as error:
        raise ConfigError(f"this is no YAML: {str(error).splitlines()[0]}") from error
    except RecursionError:
        raise ConfigError("this is nested too deeply for a manifest") from None
    for root in roots:
        _check(root)
    return roots


def _check(root: Node) -> None:
    """Raise ``ConfigError`` for a key that is no text, or doubled, and for too many parts."""
    sizes: dict[int, int] = {}
    left = [root]
    while left:
        node = left[-1]
        below = [*(value for _, value in entries(node)), *items(node)]
        if id(node) in sizes:
            left.pop()
            # Each alias counts as everything that it stands for.
            sizes[id(node)] = 1 + sum(sizes[id(inner)] for inner in below)
            continue
        sizes[id(node)] = LARGEST  # in case it contains itself
        _refuse_doubled_keys(node)
        left += [inner for inner in reversed(below) if id(inner) not in sizes]
    if sizes[id(root)] > LARGEST:
        raise ConfigError(
            f"with its aliases written out this has more than {LARGEST} parts: no manifest has"
        )


def _refuse_doubled_keys(node: Node) -> None:
    names: set[str] = set()
    for key, _ in entries(node):
        if not isinstance(key, ScalarNode):
            raise ConfigError(f"line {line_of(key)}: a key must be text")
        if key.value in names and key.value != MERGE:
            raise ConfigError(
                f"line {line_of(key)}: {key.value} is given twice in one mapping: remove one"
            )
        names.add(key.value)


def entries(node: Node) -> list[Entry]:
    """Return the entries of a mapping as they are written; none for anything else."""
    return list(node.value) if isinstance(node, MappingNode) else []


def items(node: Node | None) -> list[Node]:
    """Return the items of a sequence; none for anything else."""
    return list(node.value) if isinstance(node, SequenceNode) else []


def entry(node: Node, key: str) -> Entry | None:
    """Return the entry ``key`` that is written in a mapping itself, not merged into it, or None."""
    return next((pair for pair in entries(node) if pair[0].value == key), None)


def fields(node: Node | None) -> dict[str, Node]:
    """Return the values of a mapping by key, those merged into it last; none for anything else."""
    if not isinstance(node, MappingNode):
        return {}
    found = {str(key.value): value for key, value in entries(node) if key.value != MERGE}
    for key, value in entries(node):
        if key.value == MERGE:
            for base in items(value) or [value]:
                found = {**found, **{k: v for k, v in fields(base).items() if k not in found}}
    return found


def child(node: Node | None, *keys: str) -> Node | None:
    """Return the node under ``keys``, even if it comes through a merge key, or None."""
    for key in keys:
        node = fields(node).get(key)
    return node


def text_of(node: Node | None) -> str:
    """Return the text of a scalar; empty for anything else."""
    return str(node.value) if isinstance(node, ScalarNode) else ""


def value_of(node: Node | None) -> Any:
    """Convert a node to plain Python: dict, list, str, int, bool, None."""
    if isinstance(node, MappingNode):
        found = fields(node)
        return dict(zip(found, map(value_of, found.values()), strict=True))
    if isinstance(node, SequenceNode):
        return list(map(value_of, node.value))
    if node is None:
        return None
    match str(node.tag).rpartition(":")[2]:
        case "null":
            return None
        case "bool":
            return node.value.lower() in ("true", "yes", "on")
        case "int":
            return _whole_number(node.value)
    return node.value


def node_of(value: Any) -> Node:
    """Convert plain Python to a node that ``value_of`` reads back; it has no place in any text."""
    if isinstance(value, Mapping):
        pairs = [(ScalarNode(_TAGS["str"], key), node_of(below)) for key, below in value.items()]
        return MappingNode(_TAGS["map"], pairs)
    if isinstance(value, list | tuple):
        return SequenceNode(_TAGS["seq"], [node_of(item) for item in value])
    if value is None:
        return ScalarNode(_TAGS["null"], "")
    if isinstance(value, bool):
        return ScalarNode(_TAGS["bool"], "true" if value else "false")
    kind = "int" if isinstance(value, int) else "float" if isinstance(value, float) else "str"
    return ScalarNode(_TAGS[kind], str(value))


def is_alias(pair: Entry) -> bool:
    """Return whether the value is written elsewhere, and only referenced here."""
    key, value = pair
    return bool(value.start_mark.index < key.start_mark.index)


def is_flow(node: Node) -> bool:
    """Return whether a node is a collection written in brackets."""
    return isinstance(node, MappingNode | SequenceNode) and bool(node.flow_style)


def line_of(node: Node) -> int:
    """Return the line at which a node begins, counted from 1."""
    return int(node.start_mark.line) + 1


def _whole_number(text: str) -> int | str:
    try:
        return int(text.replace("_", ""), 0)
    except ValueError:
        return text
