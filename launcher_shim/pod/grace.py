# SPDX-License-Identifier: Apache-2.0
"""The grace of a container, from the notice to its end, and the part of it kept in reserve."""

from __future__ import annotations

import re
from typing import Mapping

VARIABLE = "MUSTER_GRACE_S"
DEFAULT_S = 30.0
"""Kubernetes' own default of terminationGracePeriodSeconds."""

_SECONDS = re.compile(r"(\d+(?:\.\d+)?)s?")


def grace_s(environ: Mapping[str, str]) -> float:
    """Read the grace in seconds; raises ``ValueError`` with one sentence."""
    text = environ.get(VARIABLE) or str(DEFAULT_S)
    match = _SECONDS.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{VARIABLE} is {text!r}: give the pod's terminationGracePeriodSeconds, as in 30"
        )
    return float(match.group(1))


FAREWELL_S = 1.0
"""The reserve of a job that is finishing, in seconds: with nothing to save, all that is left to do
is to end."""


def reserve_s(grace: float) -> float:
    """Return how long before its end a container gets SIGTERM at the latest, in seconds."""
    return max(1.0, min(5.0, grace / 3))
