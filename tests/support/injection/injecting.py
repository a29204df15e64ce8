# SPDX-License-Identifier: Apache-2.0
"""Injects into manifests, and reads what came of it."""

from __future__ import annotations

import functools
from typing import Any

import yaml

from console.inject.injection import Injected, Request, inject

FLAGS = {
    "job": "digits",
    "min_nodes": "2",
    "max_nodes": "4",
    "etcd_endpoints": "etcd:2379",
    "image": "example.org/muster-sidecar:0.1.0",
}


@functools.cache
def injected(text: str, /, **flags: str | None) -> Injected:
    return inject(text, Request({**FLAGS, **flags}, {}))


def again(text: str, /, **flags: str | None) -> str:
    return inject(text, Request(flags, {})).text


def loaded(text: str) -> list[Any]:
    """As another parser reads it, the one whose rules kubectl's are nearest to."""
    return list(yaml.safe_load_all(text.removeprefix("%YAML 1.2\n")))


def keeps(new: Any, old: Any) -> bool:
    """Whether all that was there is there, in its order; what was empty may have been filled."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(k in new and keeps(new[k], old[k]) for k in old)
    if isinstance(old, list):
        left = list(new) if isinstance(new, list) else []
        for item in old:
            while left and not keeps(left[0], item):
                left.pop(0)
            if not left:
                return False
            left.pop(0)
        return isinstance(new, list)
    return bool(old is None or new == old)


def pods(value: Any) -> list[Any]:
    """Every pod spec in a document."""
    if isinstance(value, list):
        return [pod for item in value for pod in pods(item)]
    if not isinstance(value, dict):
        return []
    own = [value] if isinstance(value.get("containers"), list) else []
    return own + [pod for below in value.values() for pod in pods(below)]
