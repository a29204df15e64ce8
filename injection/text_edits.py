# SPDX-License-Identifier: Apache-2.0
"""Insertion of entries and items into a YAML text, and their removal, at the places of its nodes.

An insertion begins right after the line that opens its mapping or list, or that ends the item
before it, above the comments there, which belong to what follows them. Its removal leaves the text
as it was. Plain values are written in the style of the text that they go into.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ruamel.yaml.nodes import Node, ScalarNode, SequenceNode

from injection.yaml_tree import (
    Entry,
    entries,
    entry,
    is_alias,
    is_flow,
    items,
    line_of,
    text_of,
)
from rdzv.errors import ConfigError

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
WIDTH = 92
"""The most columns of a value that stays on one line."""

_NOT_TEXT = re.compile(r"(?i)(y|n|yes|no|on|off|true|false|null|~|\.nan|[-+]?\.inf)")


@dataclass(frozen=True, slots=True)
class Style:
    """The indentation of a document: columns for a nested mapping, and for the dash of a list."""

    step: int = 2
    dash: int = 0


def block_mapping(values: Mapping[str, Any], indent: int, style: Style) -> list[str]:
    """Render a mapping as lines, with its keys at column ``indent``."""
    lines: list[str] = []
    for key, value in values.items():
        lines += _entry(key, value, indent, style)
    return lines


def block_items(values: Sequence[Any], indent: int, style: Style) -> list[str]:
    """Render a list as lines, with its dashes at column ``indent``."""
    lines: list[str] = []
    for value in values:
        dash = " " * indent + "- "
        if len(short := dash + _compact(value)) <= WIDTH or not isinstance(value, Mapping):
            lines.append(short)
        else:
            first, *rest = block_mapping(value, indent + 2, style)
            lines += [dash + first.lstrip(), *rest]
    return lines


def flow(value: Any, indent: int | None) -> str:
    """Render JSON, which is YAML, too: on one line, or on several from column ``indent``."""
    if indent is None:
        return json.dumps(value)
    return json.dumps(value, indent=2).replace("\n", "\n" + " " * indent)


def scalar(value: Any) -> str:
    """Render one value, with quotes if it needs them."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and not _NOT_TEXT.fullmatch(value):
        return value
    return json.dumps(value)


def _entry(key: str, value: Any, indent: int, style: Style) -> Iterator[str]:
    head = " " * indent + key + ":"
    if len(short := f"{head} {_compact(value)}") <= WIDTH:
        yield short
    elif isinstance(value, Mapping) and value:
        yield head
        yield from block_mapping(value, indent + style.step, style)
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        yield head
        yield from block_items(value, indent + style.dash, style)
    else:
        yield short


def _compact(value: Any) -> str:
    """Render a value on one line, with no more quotes than it needs."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{scalar(k)}: {_compact(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return json.dumps(value) if _words(value) else f"[{', '.join(map(_compact, value))}]"
    return scalar(value)


def _words(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


_FIRST_DASH = re.compile(r"\n( *)-(?=\s)")
_BLANK_AND_COMMENTS = re.compile(r"(?:\s|#[^\n]*\n)*")
_COMMA_AFTER = re.compile(r"\s*,\s*")


class Splices:
    """Changes of one text, collected by its nodes and applied at once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._newline = "\r\n" if "\r\n" in text else "\n"
        self._changes: list[tuple[int, int, str]] = []

    def result(self) -> str:
        """Return the text with all changes made."""
        pieces, at = [], 0
        for start, end, new in sorted(self._changes, key=lambda change: change[:2]):
            pieces += [self._text[at : max(at, start)], new]
            at = max(at, end)
        return "".join([*pieces, self._text[at:]])

    # -- putting in

    def add_entries(self, pair: Entry, new: Mapping[str, Any], style: Style, path: str) -> None:
        """Put entries into the mapping that is the value of ``pair``, before what it has.

        Raises ``ConfigError``, naming ``path``, if the mapping is written elsewhere or is none.
        """
        key, mapping = pair
        if not new:
            return
        if self._is_open(pair, path):
            indent = key.start_mark.column + style.step
        elif not isinstance(mapping.value, list) or isinstance(mapping, SequenceNode):
            raise ConfigError(f"{path} (line {line_of(key)}) is no mapping: make it one")
        elif is_flow(mapping):
            self._add_flow(mapping, new.values(), [*new])
            return
        else:
            indent = entries(mapping)[0][0].start_mark.column
        lines = block_mapping(new, indent, style)
        self._insert_lines(self._line_end(self._after_colon(key)), lines)

    def add_to_item(self, item: Node, new: Mapping[str, Any], style: Style, path: str) -> None:
        """Put entries into a mapping that is an item of a list, after its name.

        Raises ``ConfigError``, naming ``path``, if it has no name of its own.
        """
        if not new:
            return
        if is_flow(item):
            self._add_flow(item, new.values(), [*new])
            return
        name = entry(item, "name")
        if name is None or is_alias(name) or "\n" in text_of(name[1]):
            raise ConfigError(f"{path} (line {line_of(item)}) has no name of its own: give it one")
        lines = block_mapping(new, name[0].start_mark.column, style)
        self._insert_lines(self._line_end(self._end(name)), lines)

    def add_items(
        self, pair: Entry, new: Sequence[Any], style: Style, path: str, behind: int = 0
    ) -> None:
        """Put items into the list that is the value of ``pair``, behind its first ``behind``.

        Raises ``ConfigError``, naming ``path``, if the list is written elsewhere or is none.
        """
        key, sequence = pair
        before = items(sequence)[behind - 1] if behind else None
        if before is not None and before.start_mark.index < sequence.start_mark.index:
            raise taken_from_elsewhere(f"{path}[{behind - 1}]", key)
        if self._is_open(pair, path):
            indent = key.start_mark.column + style.dash
        elif not isinstance(sequence, SequenceNode):
            raise ConfigError(f"{path} (line {line_of(key)}) is no list: make it one")
        elif is_flow(sequence):
            self._add_flow(sequence, new, behind=behind)
            return
        else:
            dash = _FIRST_DASH.search(self._text, self._after_colon(key))
            assert dash is not None
            indent = len(dash[1])
        lines = block_items(new, indent, style)
        at = self._after_colon(key) if before is None else self._end_of(before)
        self._insert_lines(self._line_end(at), lines)

    def _is_open(self, pair: Entry, path: str) -> bool:
        """Return whether nothing is written after the key.

        Raises ``ConfigError`` for an alias or a scalar, into which nothing can be put.
        """
        key, value = pair
        if is_alias(pair):
            raise taken_from_elsewhere(path, key)
        if not isinstance(value, ScalarNode):
            return False
        if value.start_mark.index != value.end_mark.index:
            raise ConfigError(f"{path} (line {line_of(key)}) is {value.value!r}: remove that line")
        return True

    def _add_flow(self, node: Node, new: Any, names: Sequence[str] = (), behind: int = 0) -> None:
        opening = "[" if isinstance(node, SequenceNode) else "{"
        at = self._text.index(opening, node.start_mark.index) + 1
        if behind:
            at = self._end_of(items(node)[behind - 1])
            comma = _COMMA_AFTER.match(self._text, at)
            if comma is None:
                self._changes.append((at, at, ", " + flow(new[0], None)))
                return
            at = comma.end()
        held = bool(node.value)
        indent = None
        if held:
            skipped = _BLANK_AND_COMMENTS.match(self._text, at)
            assert skipped is not None
            at = skipped.end()
            before = self._text[self._line_start(at) : at]
            if not before.strip():
                indent = len(before)
        parts = [flow(value, indent) for value in new]
        if names:
            # In brackets a key has quotes, as in JSON.
            parts = [f"{json.dumps(name)}: {part}" for name, part in zip(names, parts, strict=True)]
        separator = ", " if indent is None else ",\n" + " " * indent
        text = separator.join([*parts, ""] if held else parts)
        self._changes.append((at, at, text.replace("\n", self._newline)))

    def _insert_lines(self, at: int, lines: Sequence[str]) -> None:
        self._changes.append((at, at, "".join(self._newline + line for line in lines)))

    # -- taking out

    def drop_entries(self, mapping: Node, gone: Callable[[str, Node], bool]) -> bool:
        """Remove the entries of a mapping for which ``gone`` is true; return whether all were."""
        held = entries(mapping)
        chosen = [gone(str(key.value), value) for key, value in held]
        self._drop(
            is_flow(mapping),
            chosen,
            lambda index: int(held[index][0].start_mark.index),
            lambda index: self._end(held[index]),
        )
        return bool(held) and all(chosen)

    def drop_items(self, sequence: Node, gone: Callable[[Node], bool]) -> bool:
        """Remove the items of a list for which ``gone`` is true; return whether all were."""
        held = items(sequence)
        chosen = [gone(item) for item in held]
        self._drop(
            is_flow(sequence),
            chosen,
            lambda index: self._item_start(held[index], in_block=not is_flow(sequence)),
            lambda index: self._end_of(held[index]),
        )
        return bool(held) and all(chosen)

    def _drop(
        self,
        flow: bool,
        gone: Sequence[bool],
        start_of: Callable[[int], int],
        end_of: Callable[[int], int],
    ) -> None:
        index = 0
        while index < len(gone):
            if not gone[index]:
                index += 1
                continue
            last = index
            while last + 1 < len(gone) and gone[last + 1]:
                last += 1
            start, end = start_of(index), end_of(last)
            line_start = self._line_start(start)
            if flow:
                if (comma := _COMMA_AFTER.match(self._text, end)) is not None:
                    end = comma.end()
                elif (before := self._text[:start].rstrip()).endswith(","):
                    start = len(before[:-1].rstrip())
            elif self._text[line_start:start].strip():
                # The entry shares its line with the dash of a list: the next one takes its place.
                end = start_of(last + 1) if last + 1 < len(gone) else end
            else:
                start, end = self._line_end(line_start - 1), self._line_end(end)
            self._changes.append((start, end, ""))
            index = last + 1

    # -- places

    def _line_start(self, index: int) -> int:
        return self._text.rfind("\n", 0, index) + 1

    def _line_end(self, index: int) -> int:
        """Return the index of the line break that ends the line of ``index``."""
        end = self._text.find("\n", index)
        end = len(self._text) if end < 0 else end
        return end - 1 if self._text[end - 1 : end] == "\r" else end

    def _after_colon(self, key: Node) -> int:
        return self._text.index(":", key.end_mark.index) + 1

    def _item_start(self, item: Node, *, in_block: bool) -> int:
        start = int(item.start_mark.index)
        return self._text.rindex("-", 0, start) if in_block else start

    def _end(self, pair: Entry) -> int:
        """Return the index at which an entry's text ends."""
        key, value = pair
        if is_alias(pair) or value.start_mark.index == value.end_mark.index:
            return self._after_colon(key)
        return self._end_of(value)

    def _end_of(self, node: Node) -> int:
        """Return the index at which a node's own text ends, before any blanks and comments."""
        if not is_flow(node):
            if entries(node):
                return self._end(entries(node)[-1])
            if items(node):
                return self._end_of(items(node)[-1])
        start, end = node.start_mark.index, node.end_mark.index
        return int(start + len(self._text[start:end].rstrip()))


def taken_from_elsewhere(path: str, at: Node) -> ConfigError:
    """Return the error for an alias into which nothing can be put; ``at`` is on its line."""
    return ConfigError(
        f"{path} (line {line_of(at)}) is an alias: write it out there, for a change to it"
        " would change the place that it was taken from, too"
    )


def style_of(spec: Entry) -> Style:
    """Return the indentation of a pod spec's text; ``spec`` is its entry in the template."""
    key, pod = spec
    if is_flow(pod) or is_alias(spec):
        return Style()
    containers = entry(pod, "containers")
    step = entries(pod)[0][0].start_mark.column - key.start_mark.column if entries(pod) else 2
    if containers is None or is_flow(containers[1]) or is_alias(containers):
        return Style(step)
    name, sequence = containers
    return Style(step, max(0, sequence.start_mark.column - name.start_mark.column))
