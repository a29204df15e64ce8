# SPDX-License-Identifier: Apache-2.0
"""The grace of a pod: what its spec grants, else Muster's default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rdzv.errors import ConfigError

GRACE = "terminationGracePeriodSeconds"

DEFAULT_GRACE_S = 60
"""The grace if the spec sets none. Kubernetes' 30 s leave 25 s for two steps and a save: little.
Not longer, because a job that is deleted as a whole may wait for replacements for all its grace."""

SHORT_S = 10
"""A shorter grace than this requires saves that take less than a few seconds."""


def granted_s(pod: Mapping[str, Any], path: str) -> int | None:
    """Return the grace that the pod spec at ``path`` sets, in seconds; raises ``ConfigError``.

    None if it sets none.
    """
    grace = pod.get(GRACE)
    if grace is None:
        return None
    if type(grace) is not int:
        raise ConfigError(
            f"{path}.{GRACE} is {grace!r}, and it has to be a whole number of seconds: write it in"
            f" digits alone, as in {GRACE}: {DEFAULT_GRACE_S}"
        )
    if grace < 1:
        raise ConfigError(
            f"{path}.{GRACE} is {grace}, which leaves no time to save: give some seconds, or leave"
            f" it out for {DEFAULT_GRACE_S}"
        )
    return grace
