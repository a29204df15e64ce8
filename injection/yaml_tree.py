# SPDX-License-Identifier: Apache-2.0
"""YAML as a tree of nodes that know their place in the text.

Nothing is ever written back from the tree: what changes is spliced into the text, so that
comments, order, quotes, anchors and line breaks stay as they are, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
        _refuse_doubled_keys(root, set())
        if _size(root, {}) > LARGEST:
            raise ConfigError(
                f"with its aliases written out this has more than {LARGEST} parts: no manifest has"
            )
    return roots


def entries(node: Node) -> list[Entry]:
    """Return the entries of a mapping as they are written; none for anything else."""
    return list(node.value) if isinstance(node, MappingNode) else []


def items(node: Node | None) -> list[Node]:
    """Return the items of a sequence; none for anything else."""
    return list(node.value) if isinstance(node, SequenceNode) else []


def entry(node: Node, key: str) -> Entry | None:
    """Return the entry ``key`` that is written in a mapping itself, not merged into it, or None."""
    return next((pair for pair in entries(node) if pair[0].value == key), None)


def keys(node: Node | None) -> list[str]:
    """Return the keys of a mapping, including those merged into it; none for anything else."""
    if not isinstance(node, MappingNode):
        return []
    merged = [name for base in _bases(node) for name in keys(base)]
    own = [str(key.value) for key, _ in entries(node) if key.value != MERGE]
    return list(dict.fromkeys([*own, *merged]))


def child(node: Node | None, *keys: str) -> Node | None:
    """Return the node under ``keys``, even if it comes through a merge key, or None."""
    for key in keys:
        if node is None:
            return None
        written = entry(node, key)
        node = written[1] if written else _merged(node, key)
    return node


def text_of(node: Node | None) -> str:
    """Return the text of a scalar; empty for anything else."""
    return str(node.value) if isinstance(node, ScalarNode) else ""


def value_of(node: Node | None) -> Any:
    """Convert a node to plain Python: dict, list, str, int, bool, None."""
    if isinstance(node, MappingNode):
        merged: dict[str, Any] = {}
        for base in _bases(node):
            merged = {**value_of(base), **merged}
        own = {str(k.value): value_of(v) for k, v in entries(node) if k.value != MERGE}
        return {**merged, **own}
    if isinstance(node, SequenceNode):
        return [value_of(item) for item in items(node)]
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


def _bases(node: MappingNode) -> Iterator[Node]:
    for key, value in entries(node):
        if key.value == MERGE:
            yield from items(value) if isinstance(value, SequenceNode) else (value,)


def _merged(node: Node, key: str) -> Node | None:
    if not isinstance(node, MappingNode):
        return None
    found = (child(base, key) for base in _bases(node))
    return next((value for value in found if value is not None), None)


def _refuse_doubled_keys(node: Node, seen: set[int]) -> None:
    if id(node) in seen:
        return
    seen.add(id(node))
    names: set[str] = set()
    for key, value in entries(node):
        if not isinstance(key, ScalarNode):
            raise ConfigError(f"line {line_of(key)}: a key must be text")
        if key.value in names and key.value != MERGE:
            raise ConfigError(
                f"line {line_of(key)}: {key.value} is given twice in one mapping: remove one"
            )
        names.add(key.value)
        _refuse_doubled_keys(value, seen)
    for item in items(node):
        _refuse_doubled_keys(item, seen)


def _size(node: Node, sizes: dict[int, int]) -> int:
    """Count a node and those below it, each alias as everything that it stands for."""
    if id(node) not in sizes:
        sizes[id(node)] = LARGEST  # in case it contains itself
        below = [*(value for _, value in entries(node)), *items(node)]
        sizes[id(node)] = 1 + sum(_size(inner, sizes) for inner in below)
    return sizes[id(node)]
