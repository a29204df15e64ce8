# SPDX-License-Identifier: Apache-2.0
"""The pod template that ``muster submit --from`` completes: of a Pod, or of what makes pods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from injection import facts
from injection.facts import check_shape
from injection.workloads import Manifest, Template
from injection.yaml_tree import value_of
from rdzv.errors import ConfigError

CONTAINER = "trainer"
"""The name of the container that trains, where submit makes it."""

_OF_ONE_POD = ("nodeName", "hostname", "subdomain", "restartPolicy")
"""Entries of a pod spec that cannot be those of many pods, or that the Job decides."""


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """Labels and annotations, the pod spec, and the index of its container that trains."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=lambda: {"containers": [{"name": CONTAINER}]})
    index: int = 0

    @property
    def container(self) -> Mapping[str, Any]:
        """The container that trains."""
        found: Mapping[str, Any] = self.spec["containers"][self.index]
        return found

    def has_variable(self, name: str) -> bool:
        """Return whether the container sets the variable itself."""
        return any(one.get("name") == name for one in facts.listed(self.container, "env"))


def read_template(text: str, file: str, container: str | None, *, has_command: bool) -> PodTemplate:
    """Read the only pod template of ``text``; raises ``ConfigError`` that names ``file``.

    ``container``: the name of the one that trains. ``has_command``: another command is given.
    """
    try:
        return _read(text, container, has_command=has_command)
    except ConfigError as error:
        raise ConfigError(f"--from: {file}: {error}") from error


def _read(text: str, wanted: str | None, *, has_command: bool) -> PodTemplate:
    objects = Manifest(text).objects
    found = [(one, template) for one in objects for template in one.templates()]
    if others := [one.label for one in objects if not one.templates()]:
        raise ConfigError(f"{others[0]} has no pods: leave it out, and apply it by kubectl apply")
    if len(found) != 1:
        raise ConfigError(f"it has {len(found)} pod templates: give one with a single pod template")
    ((_, template),) = found
    value = _value(template)
    spec: dict[str, Any] = {
        key: part for key, part in (value.get("spec") or {}).items() if key not in _OF_ONE_POD
    }
    index = _index(spec, wanted)
    container = spec["containers"][index]
    if not (has_command or container.get("command") or container.get("args")):
        raise ConfigError(
            f"container {container.get('name')} has no command: give one, as in -- torchrun"
            " train.py"
        )
    metadata = value.get("metadata") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    return PodTemplate(labels, annotations, spec, index)


def _value(template: Template) -> Mapping[str, Any]:
    value = value_of(template.node)
    check_shape(value, template.path)
    found: Mapping[str, Any] = value
    return found


def _index(spec: Mapping[str, Any], wanted: str | None) -> int:
    """Return the index of the container that trains."""
    names = [one.get("name") for one in facts.listed(spec, "containers")]
    ours = [name for name in names if name not in facts.PROXIES]
    if wanted is None and len(ours) == 1:
        return names.index(ours[0])
    if wanted in ours:
        return names.index(wanted)
    if not ours:
        raise ConfigError("the pod has no container: give the one that trains")
    missing = "" if wanted is None else f"there is no container {wanted}; "
    choice = ", ".join(map(str, ours))
    raise ConfigError(f"{missing}name the one that trains by --container: {choice}")
