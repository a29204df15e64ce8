# SPDX-License-Identifier: Apache-2.0
"""What an API server makes of a pod by the patch that a webhook answers with."""

from __future__ import annotations

import copy
from typing import Any


def patched(value: Any, operations: Any) -> Any:
    """As RFC 6902 says, for the operations that are written."""
    value = copy.deepcopy(value)
    for operation in operations:
        *way, last = [
            w.replace("~1", "/").replace("~0", "~") for w in operation["path"].split("/")[1:]
        ]
        place = value
        for word in way:
            place = place[int(word)] if isinstance(place, list) else place[word]
        key: Any = int(last) if isinstance(place, list) else last
        if operation["op"] == "remove":
            del place[key]
        elif isinstance(place, list) and operation["op"] == "add":
            place.insert(key, operation["value"])
        else:
            place[key] = operation["value"]
    return value
