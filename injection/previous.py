# SPDX-License-Identifier: Apache-2.0
"""The sidecar of an earlier injection, with the changes that its user has made since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ruamel.yaml.nodes import Node

from agent.config.sidecar import Config
from agent.config.table import settings_of
from injection import sidecar
from injection.annotations import LETS_GO, Record, own_annotations
from injection.sidecar_resources import resources
from injection.yaml_tree import child, items, text_of, value_of
from rdzv.errors import ConfigError

_OURS = [
    resources(quality, cpu_is_limited=limited)
    for quality in ("Guaranteed", "Burstable", "BestEffort")
    for limited in (True, False)
]
_TOKENS = "/var/run/secrets/kubernetes.io/serviceaccount"
"""The path at which an API server mounts something into every container of a pod."""

_WRITTEN = {
    "name",
    "image",
    "restartPolicy",
    "command",
    "env",
    "ports",
    "startupProbe",
    "readinessProbe",
    "lifecycle",
    "resources",
    "securityContext",
    "volumeMounts",
}
"""The fields that inject itself writes, always anew."""


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
        return None if not found or found in _OURS else found

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
        written = _WRITTEN | container.keys()
        others = {key: value for key, value in self.container.items() if key not in written}
        return {**container, "env": [*container["env"], *env], **others}
