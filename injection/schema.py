# SPDX-License-Identifier: Apache-2.0
"""The shape that injection requires of the parts of a pod template that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rdzv.errors import ConfigError

_CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "args": [str],
    "env": [{"name": str}],
    "ports": [{}],
    "volumeMounts": [{"name": str}],
    "lifecycle": {},
    "resources": {"limits": {}, "requests": {}},
}
TEMPLATE: Mapping[str, Any] = {
    "metadata": {"labels": {}, "annotations": {}},
    "spec": {
        "initContainers": [_CONTAINER],
        "containers": [_CONTAINER],
        "volumes": [{"name": str}],
        "imagePullSecrets": [{"name": str}],
        "resources": {"limits": {}, "requests": {}},
        "nodeSelector": {},
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": str}]}]
                }
            }
        },
        "os": {"name": str},
    },
}


def check(value: Any, path: str, shape: Any = TEMPLATE) -> None:
    """Raise ``ConfigError`` that names the first place with another shape; null fits any."""
    if isinstance(shape, Mapping):
        if not isinstance(value, Mapping):
            raise _misfit(path, value, "a mapping")
        for key, inner in shape.items():
            if value.get(key) is not None:
                check(value[key], f"{path}.{key}" if path else key, inner)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise _misfit(path, value, "a list")
        for number, item in enumerate(value):
            check(item, f"{path}[{number}]", shape[0])
    elif not isinstance(value, shape):
        raise _misfit(path, value, "text")


def _misfit(path: str, value: Any, expected: str) -> ConfigError:
    shown = "a mapping" if isinstance(value, Mapping) else repr(value)
    return ConfigError(f"{path or 'the template'} is {shown[:60]}: {expected} belongs there")
