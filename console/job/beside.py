# SPDX-License-Identifier: Apache-2.0
"""Pods that do not run, beside a view of a job that one of its sidecars draws.

The store does not know them: they come with the command, as a variable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields

from console.job.rows import PodFacts, PodLine, pod_lines
from rdzv.sentences import counted

NOT_RUNNING = "MUSTER_NOT_RUNNING"
"""The variable: JSON, with an object a pod."""

SENT_MOST = 20
"""The most pods that are sent: a command has room for 128 KiB."""

WHY_MOST = 500
"""Longest reason that is sent, in characters."""

_KNOWN = {one.name for one in fields(PodFacts)}


def beside(pods: Iterable[PodFacts]) -> dict[str, str]:
    """Return the variable for those of a job's pods whose sidecar does not run: pure."""
    idle = [one for one in pods if not one.runs]
    sent = [{**asdict(one), "why": one.why[:WHY_MOST]} for one in idle[:SENT_MOST]]
    if len(idle) > SENT_MOST:
        more = f"and {counted(len(idle) - SENT_MOST, 'more pod')}"
        sent.append(asdict(PodFacts(more, "Pending", runs=False)))
    return {NOT_RUNNING: json.dumps(sent)} if sent else {}


def not_running(environ: Mapping[str, str], now_unix_s: float) -> list[PodLine]:
    """Return the rows of those pods; none if a newer version sends what cannot be read: pure."""
    try:
        sent = json.loads(environ.get(NOT_RUNNING) or "[]")
        pods = [PodFacts(**{key: one[key] for key in _KNOWN & one.keys()}) for one in sent]
        return pod_lines(None, pods, now_unix_s)
    except (AttributeError, TypeError, ValueError):
        return []
