# SPDX-License-Identifier: Apache-2.0
"""The record that a template keeps of what was put into it, and the earlier sidecar in it.

By the record all can be taken out again, and the changes that the user has made since are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from ruamel.yaml.nodes import Node

from agent.config import Config
from injection import sidecar
from injection.facts import resources_for
from injection.settings import DOMAIN
from injection.workloads import Words, further, walk
from injection.yaml_tree import child, fields, items, text_of, value_of
from rdzv.errors import ConfigError
from rdzv.settings import settings_of

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


def injected(node: Node) -> list[tuple[Node, str]]:
    """Return every template in ``node`` that has a record, and the path to it."""
    found: list[tuple[Node, str]] = []

    def below(words: Words, one: Node) -> Iterable[tuple[Words, Node]]:
        if ANNOTATION not in fields(child(one, "metadata", "annotations")):
            return further(words, one)
        found.append((one, ".".join(words)))
        return ()

    for _ in walk(node, below):
        pass
    return found


_OUR_CONTAINER_FIELDS = [
    resources_for(quality, cpu_is_limited=limited)
    for quality in ("Guaranteed", "Burstable", "BestEffort")
    for limited in (True, False)
]
_TOKENS = "/var/run/secrets/kubernetes.io/serviceaccount"
"""The path at which an API server mounts something into every container of a pod."""


@dataclass(frozen=True, slots=True)
class Former:
    """The settings of an earlier call, and its sidecar as it is now; both empty at first."""

    annotations: Mapping[str, str]
    container: Mapping[str, Any]
    let_go: bool = False
    """Whether inject, not the user, let pods go below min."""

    @classmethod
    def of(cls, template: Node) -> Former:
        """Read the settings and the sidecar of a template; raises ``ConfigError``."""
        annotations = own_annotations(template)
        record = Record.of(template)
        if record is None:
            return cls(annotations, {})
        for container in items(child(template, "spec", "initContainers")):
            if text_of(child(container, "name")) == sidecar.NAME:
                return cls(annotations, value_of(container), LETS_GO in record.added)
        return cls(annotations, {})

    @property
    def says_below_min(self) -> bool:
        """Whether a user has set the policy for drains that would leave fewer than min members."""
        found = [v for v in self.container.get("env") or [] if v.get("name") == sidecar.BELOW_MIN]
        ours = [{"name": sidecar.BELOW_MIN, "value": "commit"}] if self.let_go else []
        return found not in ([], ours)

    def resources(self) -> Mapping[str, Any] | None:
        """Return the sidecar's resources if a user has changed them; None if they are defaults."""
        found = self.container.get("resources")
        return None if not found or found in _OUR_CONTAINER_FIELDS else found

    def told(self, name: str) -> Any:
        """Return a setting of the sidecar as the user has written it there, else its default.

        Raises ``ConfigError`` if the sidecar would not accept it.
        """
        setting = settings_of(Config)[name]
        values = [v for v in self.container.get("env") or [] if v.get("name") == setting.variable]
        text = str((values[-1].get("value") if values else None) or setting.default_text({}))
        if "$(" in text:  # the kubelet expands it later
            text = str(setting.default_text({}))
        try:
            return setting.parse(text)
        except ValueError as error:
            raise ConfigError(
                f"the container {sidecar.NAME} has {setting.variable}: {setting.quote(text)} is"
                f" wrong: {error}"
            ) from error

    def taken_out(self) -> list[str]:
        """Describe the store variables and the mounts that a user added, one sentence each.

        They are not kept.
        """
        by_hand = [
            f"{variable['name']} was written by hand"
            for variable in self.container.get("env") or []
            if variable.get("name") in sidecar.SECRET_VARIABLES and not sidecar.is_ours(variable)
        ] + [
            f"the volume {mount.get('name')} was mounted by hand"
            for mount in self.container.get("volumeMounts") or []
            if mount.get("name") not in sidecar.VOLUMES and mount.get("mountPath") != _TOKENS
        ]
        return [
            f"container {sidecar.NAME}: {what}, and is taken out: what etcd asks for comes by"
            " --etcd-secret"
            for what in by_hand
        ]

    def carried_into(self, container: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``container`` with what a user has added to the former one."""
        names = {variable["name"] for variable in container["env"]}
        ours = sidecar.VARIABLES | (set() if self.says_below_min else {sidecar.BELOW_MIN})
        env = [
            variable
            for variable in self.container.get("env") or []
            if (name := str(variable.get("name"))) not in names | ours
            and not name.startswith(sidecar.TOPOLOGY_PART)
        ]
        # What a setting gives, too, is not the user's: it wins, and may have been another before.
        written = {"resources", *container}
        others = {key: value for key, value in self.container.items() if key not in written}
        return {**container, "env": [*container["env"], *env], **others}
