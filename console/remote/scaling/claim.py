# SPDX-License-Identifier: Apache-2.0
"""The claim of one operation on a job: an annotation of its owner, written by compare."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agent.verdict.view import moment

ANNOTATION = "muster.dev/scaling"

GRACE_S = 60.0
"""Time beyond its deadline that a claim holds: for its last writes, and for clocks that differ."""


@dataclass(frozen=True, slots=True)
class OperationClaim:
    """One operation: ``what`` it does, ``by`` whom, until when it holds; ``token`` tells it apart.

    ``most``: the job's max, which the operation has lowered and is to set back; None if not.
    """

    what: str
    by: str
    until_unix_s: float
    token: str
    most: int | None = None


def claim_patch(claim: OperationClaim | None) -> dict[str, Any]:
    """Return the merge patch that writes a claim to an owner, or takes it away."""
    value = None if claim is None else json.dumps(asdict(claim))
    return {"metadata": {"annotations": {ANNOTATION: value}}}


def claim_of(owner: Mapping[str, Any]) -> OperationClaim | None:
    """Return the claim that an owner has; None without one, or with one that cannot be read."""
    notes = (owner.get("metadata") or {}).get("annotations") or {}
    try:
        found = json.loads(notes[ANNOTATION])
        most = found.get("most")
        return OperationClaim(
            str(found["what"]),
            str(found["by"]),
            float(found["until_unix_s"]),
            str(found["token"]),
            most if type(most) is int else None,
        )
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def refusal(held: OperationClaim | None, now_unix_s: float) -> str:
    """Return why no other operation may begin now, in one sentence; empty if one may."""
    if held is None or held.until_unix_s <= now_unix_s:
        return ""
    return (
        f"{held.by} runs {held.what} on it, until {moment(held.until_unix_s)} at the latest: wait"
        " for that"
    )
