# SPDX-License-Identifier: Apache-2.0
"""A notice that this pod will end, as one line of JSON on a unix socket.

Deadlines are sent as seconds left: wall clocks are never compared.
"""

from __future__ import annotations

import json
from typing import Literal, cast, get_args

from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.records.codec import take_seconds

Source = Literal["prestop", "sigterm", "hold", "control"]
"""The source of a notice: the sidecar's own preStop hook, ``muster-run`` that got a SIGTERM,
``muster-hold`` as the training container's preStop hook, or any other program in the pod."""

REASON_LENGTH = 200
LINE_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice; ``seconds_left`` until the pod is killed, or None if the source cannot know."""

    source: Source
    reason: str
    seconds_left: float | None


def read_notice(line: bytes) -> Notice:
    """Decode the line of a client; raise ``RecordError`` with what is wrong with it."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"a notice that is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RecordError("a notice is a JSON object")
    source, reason, left = (fields.get(name) for name in ("notice", "reason", "seconds_left"))
    if source not in get_args(Source):
        raise RecordError(f"'notice' is {source!r}: expected one of {', '.join(get_args(Source))}")
    if not isinstance(reason, str):
        raise RecordError(f"'reason' is {reason!r}: expected text")
    if left is not None:
        left = take_seconds("a notice", fields, "seconds_left")
    printable = "".join(c if c.isprintable() else " " for c in reason)[:REASON_LENGTH]
    return Notice(cast(Source, source), printable, left)
