# SPDX-License-Identifier: Apache-2.0
"""One line of a training container: its time, and a text that no terminal acts on. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from agent.telemetry.logs import printable

_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d) ?")
_COLOURS = re.compile(r"\x1b\[[\d;:]*m")


@dataclass(frozen=True, slots=True)
class Source:
    """One container. ``also``: its name, if it is not the only one of its pod that is shown."""

    member: str
    also: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line. ``source``: the container that wrote it, as ``Source`` names it."""

    at_unix_ns: int
    source: Source
    text: str


def stamped(line: str, otherwise_unix_ns: int) -> tuple[int, str]:
    """Split a line of the kubelet into its time and its text.

    ``otherwise_unix_ns``: the time of a line without one, as a piece of a longer line is.
    """
    found = _STAMP.match(line)
    if found is None:
        return otherwise_unix_ns, line
    whole, fraction, zone = found.groups()
    try:
        moment = datetime.fromisoformat(whole + zone.replace("Z", "+00:00"))
    except ValueError:
        return otherwise_unix_ns, line
    nanoseconds = int((fraction or ".")[1:].ljust(9, "0")[:9])
    return int(moment.timestamp()) * 10**9 + nanoseconds, line[found.end() :]


def shown(text: str) -> str:
    """Return what to print of a line of a tenant: no control character but tabs.

    Colours are left out. A bar that was drawn over and over in one line is shown as drawn last.
    """
    text = _COLOURS.sub("", text).rstrip("\r\n").rpartition("\r")[2]
    return "\t".join(map(printable, text.split("\t")))
