# SPDX-License-Identifier: Apache-2.0
"""The record that a template keeps of what was put into it, so that it can be taken out again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from ruamel.yaml.nodes import Node

from injection.settings import DOMAIN
from injection.workloads import steps
from injection.yaml_tree import child, keys, value_of
from rdzv.errors import ConfigError

ANNOTATION = DOMAIN + "added"
LETS_GO = "below-min"
"""Word of a record: inject, not the user, told the sidecar to let pods go below min."""

WHOLE_COMMAND = "whole-command"
"""Word of a record: the container had no command before."""

_USERS = "not:"
_DIGEST_LENGTH = 16


@dataclass(slots=True)
class Record:
    """The record of an injection into one template.

    ``added``: the keys that it did not have before, the name of the training container, and each
    variable added to that with its value, so that a later change by hand stays the user's.
    ``users``: Muster's names that the user had put there before.
    """

    added: list[str] = field(default_factory=list)
    users: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return " ".join([*sorted(self.added), *(_USERS + name for name in sorted(self.users))])

    @classmethod
    def of(cls, template: Node) -> Record | None:
        """Read the record of a template; None if it has none."""
        text = own_annotations(template).get(ANNOTATION)
        if text is None:
            return None
        words = text.split()
        return cls(
            [word for word in words if not word.startswith(_USERS)],
            [word.removeprefix(_USERS) for word in words if word.startswith(_USERS)],
        )


def container_word(name: str) -> str:
    """Return the word by which a record names the training container."""
    return f"container/{quote(name, safe='')}"


def pull_secret_word(name: str) -> str:
    """Return the word by which a record names a Secret to pull images with."""
    return f"pull-secret/{quote(name, safe='')}"


def beside_word(key: str, value: Any) -> str:
    """Return the word by which a record names an entry that was put beside the template."""
    if not isinstance(value, str):
        whole = json.dumps(value, sort_keys=True).encode()
        value = hashlib.sha256(whole).hexdigest()[:_DIGEST_LENGTH]
    return f"beside/{key}={value}"


def variable_word(variable: Mapping[str, Any]) -> str:
    """Return the word of a record for a variable and its value, without a server's additions."""
    source = variable.get("valueFrom")
    field_ref = source.get("fieldRef") if isinstance(source, Mapping) else None
    path = field_ref.get("fieldPath") if isinstance(field_ref, Mapping) else None
    text = variable.get("value") if source is None else path
    return f"env/{quote(str(variable.get('name')), safe='')}={quote(str(text), safe=':/,')}"


def own_annotations(template: Node) -> dict[str, str]:
    """Return Muster's annotations of a template, whoever wrote them; raises ``ConfigError``."""
    values: Any = value_of(child(template, "metadata", "annotations"))
    if not isinstance(values, Mapping):
        return {}
    for name, value in values.items():
        if name.startswith(DOMAIN) and not isinstance(value, str):
            raise ConfigError(f"the annotation {name} is no text: put it in quotes")
    return {name: value for name, value in values.items() if name.startswith(DOMAIN)}


def injected(node: Node, path: str = "") -> Iterator[tuple[Node, str]]:
    """Yield every template in ``node`` that has a record, and the path to it."""
    if ANNOTATION in keys(child(node, "metadata", "annotations")):
        yield node, path
        return
    for name, below in steps(node):
        yield from injected(below, f"{path}.{name}" if path else name)
