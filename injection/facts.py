# SPDX-License-Identifier: Apache-2.0
"""The facts of a pod template that its sidecar depends on: shape, containers and QoS class.

With them go the CPU and memory of the sidecar, by which the pod keeps that class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal

from launcher_shim.torchrun.launcher import VARIABLES
from rdzv.errors import ConfigError

QualityOfService = Literal["Guaranteed", "Burstable", "BestEffort"]

_ACCELERATOR = re.compile(
    r"(nvidia\.com/(gpu|mig-.+)|amd\.com/gpu|gpu\.intel\.com/(i915|xe)|habana\.ai/gaudi"
    r"|aws\.amazon\.com/neuron(core)?|google\.com/tpu|huawei\.com/Ascend.+)"
)
_PER_NODE = re.compile(r"--nproc[-_]per[-_]node(?:[=\s]+)(\S+)")
_COUNTED = ("gpu", "auto")

_QUANTITY = re.compile(
    r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?)([numkMGTPE]|[KMGTPE]i)?"
)
_SUFFIXES = {
    "": Decimal(1),
    **{suffix: Decimal(1000) ** (power - 3) for power, suffix in enumerate("num")},
    **{suffix: Decimal(1000) ** (power + 1) for power, suffix in enumerate("kMGTPE")},
    **{suffix + "i": Decimal(1024) ** (power + 1) for power, suffix in enumerate("KMGTPE")},
}
"""The suffixes of Kubernetes' quantities, with their factors."""

PROXIES = frozenset({"istio-proxy", "linkerd-proxy"})
"""The containers of meshes. Once a mesh has taken over a pod's network, nothing in the pod reaches
the store before its proxy runs."""

_TRUE = frozenset({"true", "yes", "on", "y"})
"""Words for true in YAML 1.1, which kubectl reads; the parser here reads only the first as such."""


def is_true(value: Any) -> bool:
    """Return whether a boolean field is true."""
    return value is True or str(value).lower() in _TRUE


def listed(mapping: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list under a key; empty if there is none."""
    value = mapping.get(key)
    return value if isinstance(value, list) else []


def containers(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return every container of a pod spec, initContainers first."""
    return [*listed(pod, "initContainers"), *listed(pod, "containers")]


def starts_before(pod: Mapping[str, Any]) -> int:
    """Return how many initContainers start before the sidecar: all up to a mesh's native proxy."""
    return max(
        (
            number
            for number, container in enumerate(listed(pod, "initContainers"), 1)
            if container.get("name") in PROXIES and container.get("restartPolicy") == "Always"
        ),
        default=0,
    )


def quality_of_service(all_containers: Sequence[Mapping[str, Any]]) -> QualityOfService:
    """Return the QoS class that Kubernetes gives a pod of these containers."""
    asked = [
        (_resource(c, "requests", name), _resource(c, "limits", name))
        for c in all_containers
        for name in ("cpu", "memory")
    ]
    if all(request in (None, 0) and limit in (None, 0) for request, limit in asked):
        return "BestEffort"
    guaranteed = all(
        limit not in (None, 0) and (request is None or request == limit) for request, limit in asked
    )
    return "Guaranteed" if guaranteed else "Burstable"


def asks_as_a_whole(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod spec itself asks for CPU or memory, for all containers together."""
    return any(
        _resource(pod, which, name) is not None
        for which in ("requests", "limits")
        for name in ("cpu", "memory")
    )


def limits_cpu(all_containers: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether every container has a CPU limit, as a quota may require."""
    return all(_resource(c, "limits", "cpu") not in (None, 0) for c in all_containers)


def accelerators(container: Mapping[str, Any]) -> int:
    """Return the number of accelerators that a container asks for."""
    resources = container.get("resources") or {}
    limits = resources.get("limits") or resources.get("requests") or {}
    return sum(whole_number(v) for name, v in limits.items() if _ACCELERATOR.fullmatch(str(name)))


def slots(container: Mapping[str, Any], others: Sequence[str]) -> int:
    """Return the worker processes in a pod: torchrun's number, or the object's in ``others``.

    Without such a number it is one per accelerator, at least one.
    """
    line = _PER_NODE.search(" ".join(words_of(container)))
    variables = {e.get("name"): e.get("value") for e in listed(container, "env")}
    for text in (line and line[1], variables.get(VARIABLES["nproc-per-node"]), *others):
        value = str(text or "").strip("'\"")
        if value.isdecimal() and int(value):
            return int(value)
        if value in _COUNTED:
            break
    return accelerators(container) or 1


def words_of(container: Mapping[str, Any]) -> list[str]:
    """Return a container's command and arguments."""
    return [str(word) for word in (*listed(container, "command"), *listed(container, "args"))]


def quantity(text: str) -> Decimal | None:
    """Return one of Kubernetes' quantities as a number; None for another text."""
    match = _QUANTITY.fullmatch(text)
    return None if match is None else Decimal(match[1]) * _SUFFIXES[match[2] or ""]


def ports(all_containers: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int]]:
    """Yield the container's name and the number of every port that is declared."""
    for container in all_containers:
        for port in listed(container, "ports"):
            if isinstance(number := port.get("containerPort"), int):
                yield str(container.get("name")), number


def _resource(holder: Mapping[str, Any], which: str, name: str) -> Decimal | str | None:
    """Return a quantity of a container or a pod as a number; as text if it is a placeholder.

    None if it is not set.
    """
    value = ((holder.get("resources") or {}).get(which) or {}).get(name)
    if value is None:
        return None
    number = quantity(str(value))
    return str(value) if number is None else number


def whole_number(value: Any) -> int:
    """Return a value that is a whole number; 0 for any other."""
    text = str(value)
    return int(text) if text.isdecimal() else 0


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


def check_shape(value: Any, path: str, shape: Any = TEMPLATE) -> None:
    """Raise ``ConfigError`` that names the first place with another shape; null fits any."""
    if isinstance(shape, Mapping):
        if not isinstance(value, Mapping):
            raise _misfit(path, value, "a mapping")
        for key, inner in shape.items():
            if value.get(key) is not None:
                check_shape(value[key], f"{path}.{key}" if path else key, inner)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise _misfit(path, value, "a list")
        for number, item in enumerate(value):
            check_shape(item, f"{path}[{number}]", shape[0])
    elif not isinstance(value, shape):
        raise _misfit(path, value, "text")


def _misfit(path: str, value: Any, expected: str) -> ConfigError:
    shown = "a mapping" if isinstance(value, Mapping) else repr(value)
    return ConfigError(f"{path or 'the template'} is {shown[:60]}: {expected} belongs there")


Asked = Mapping[str, tuple[str, str | None]]
"""Request and limit by the name of the resource; None for a limit that is not given."""

RESOURCES = ("cpu", "memory", "ephemeral-storage")
SIDECAR_MEMORY = "128Mi"
CPU_LIMIT = "500m"
"""The sidecar starts within 1.5 s on this much; at rest it uses less than a hundredth of it."""
CPU_REQUEST = "50m"

_DEFAULTS: Asked = {"memory": (SIDECAR_MEMORY, SIDECAR_MEMORY), "cpu": (CPU_REQUEST, CPU_LIMIT)}


def resources_for(
    quality: QualityOfService, *, cpu_is_limited: bool, asked: Asked | None = None
) -> dict[str, Any]:
    """Return a sidecar's resources, by which the pod keeps its QoS class and satisfies a quota.

    ``asked`` is what a setting says. ``cpu_is_limited``: whether all others have a CPU limit; else
    the sidecar has one only if a setting gives it.
    """
    if quality == "BestEffort":
        return {}
    asked = asked or {}
    both = {**_DEFAULTS, **asked}
    most = {name: limit or request for name, (request, limit) in both.items()}
    if quality == "Guaranteed":
        return {"requests": dict(most), "limits": most}
    if not (cpu_is_limited or asked.get("cpu", ("", None))[1]):
        del most["cpu"]
    return {"requests": {name: request for name, (request, _) in both.items()}, "limits": most}
