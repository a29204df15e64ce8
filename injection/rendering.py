# SPDX-License-Identifier: Apache-2.0
"""Plain values as YAML text, in the style of the text that they go into."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def scalar_in_flow(value: str) -> str:
    """Render a key in brackets: always in quotes, as in JSON."""
    return json.dumps(value)
