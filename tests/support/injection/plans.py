# SPDX-License-Identifier: Apache-2.0
"""Plans of injections."""

from __future__ import annotations

import json
from typing import Any


def manifest(kind: str = "Deployment", /, *, pod: Any = None, **container: Any) -> str:
    """JSON of an object with one container."""
    template = {"spec": {"containers": [{"name": "c", "image": "i", **container}], **(pod or {})}}
    groups = {"Job": "batch/v1", "CronJob": "batch/v1", "Unheard": "example.org/v1"}
    spec: dict[str, Any] = {"template": template}
    if kind == "CronJob":
        spec = {"jobTemplate": {"spec": spec}}
    return json.dumps(
        {
            "apiVersion": groups.get(kind, "apps/v1"),
            "kind": kind,
            "metadata": {"name": "digits"},
            "spec": spec,
        }
    )
