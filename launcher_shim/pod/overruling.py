# SPDX-License-Identifier: Apache-2.0
"""The environment of torchrun if the container's own variables and the sidecar's differ.

The sidecar's win: with any other endpoint, id or bounds the pod would not train with the others.
But more restarts are kept, and so are rendezvous options that the sidecar does not set.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, Tuple

RESTARTS = "PET_MAX_RESTARTS"
OPTIONS = "PET_RDZV_CONF"
RUN_DIR = "MUSTER_RUN_DIR"
"""A difference in it is not reported: the two containers may have it under different paths."""


def merged(
    own: Mapping[str, str], delivered: Mapping[str, str]
) -> "Tuple[Dict[str, str], List[str]]":
    """Return the delivered variables as merged, and a sentence for each value that is overruled."""
    result: Dict[str, str] = {}
    overruled: List[str] = []
    for name, text in delivered.items():
        before = own.get(name, text)
        if name == RESTARTS:
            result[name], lost = _larger(before, text)
        elif name == OPTIONS:
            result[name], lost = _with_foreign_options(before, text)
        else:
            result[name], lost = text, before if before != text and name != RUN_DIR else ""
        if lost:
            overruled.append("%s: %s is overruled by %s" % (name, lost, result[name]))
    return result, overruled


def _larger(own: str, delivered: str) -> "Tuple[str, str]":
    """Return the larger of two numbers, and the container's own value if it is overruled."""
    if own.strip().isdecimal() and delivered.isdecimal() and int(own) >= int(delivered):
        return own.strip(), ""
    return delivered, own or "nothing"


def _with_foreign_options(own: str, delivered: str) -> "Tuple[str, str]":
    """Merge the options; return them, and the parts of the container's that are left out."""
    ours = dict(_option(part) for part in delivered.split(","))
    foreign: Dict[str, str] = {}
    lost: List[str] = []
    for part in filter(None, (part.strip() for part in own.split(","))):
        key, value = _option(part)
        if not key or not value or ours.get(key, value) != value:
            lost.append(part)  # torchrun takes no key without a value
        elif key not in ours:
            foreign[key] = value
    options = ["%s=%s" % pair for pair in {**ours, **foreign}.items()]
    return ",".join(options), ",".join(lost)


def _option(text: str) -> "Tuple[str, str]":
    key, _, value = text.partition("=")
    return key.strip(), value.strip()
