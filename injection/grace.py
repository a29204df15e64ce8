# SPDX-License-Identifier: Apache-2.0
"""How long a pod has from the notice of its end: what its spec grants, or what it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rdzv.errors import ConfigError

GRACE = "terminationGracePeriodSeconds"

DEFAULT_GRACE_S = 60
"""Where the spec is silent. Kubernetes' 30 s leave 25 for two steps and a save: little. But a
job that is deleted as a whole may wait for replacements as long as its grace."""

SHORT_S = 10
"""Below this a save must take less than a few seconds."""


def granted_s(pod: Mapping[str, Any], path: str) -> int | None:
    """What the pod spec at ``path`` grants, in seconds; raises ``ConfigError``."""
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
