# SPDX-License-Identifier: Apache-2.0
"""The CPU and memory of the sidecar, so that the pod keeps its QoS class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from injection.facts import QualityOfService

Asked = Mapping[str, tuple[str, str | None]]
"""Request and limit by the name of the resource; None for a limit that is not given."""

RESOURCES = ("cpu", "memory", "ephemeral-storage")
MEMORY = "128Mi"
CPU_LIMIT = "500m"
"""The sidecar starts within 1.5 s on this much; at rest it uses less than a hundredth of it."""
CPU_REQUEST = "50m"

_DEFAULTS: Asked = {"memory": (MEMORY, MEMORY), "cpu": (CPU_REQUEST, CPU_LIMIT)}


def resources(
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
