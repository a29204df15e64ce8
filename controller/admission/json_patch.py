# SPDX-License-Identifier: Apache-2.0
"""The difference of two JSON values, as a JSON Patch (RFC 6902) that turns one into the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Operation = dict[str, Any]


def difference(before: Any, after: Any, path: str = "") -> Iterator[Operation]:
    """Yield the operations, in an order in which they can be applied."""
    if before == after and type(before) is type(after):
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in [*before, *(key for key in after if key not in before)]:
            below = f"{path}/{_escaped(key)}"
            if key not in after:
                yield {"op": "remove", "path": below}
            elif key not in before:
                yield {"op": "add", "path": below, "value": after[key]}
            else:
                yield from difference(before[key], after[key], below)
        return
    if isinstance(before, list) and isinstance(after, list) and before:
        # Muster puts items into lists in one place: the patch adds them there, and shows no more.
        new = len(after) - len(before)
        if new >= 0:
            pairs = zip(before, after, strict=False)
            same = next((n for n, (old, now) in enumerate(pairs) if old != now), len(before))
            for value in reversed(after[same : same + new]):
                yield {"op": "add", "path": f"{path}/{same}", "value": value}
            for index in range(same, len(before)):
                yield from difference(before[index], after[index + new], f"{path}/{index + new}")
            return
    yield {"op": "replace", "path": path, "value": after}


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
