# SPDX-License-Identifier: Apache-2.0
"""The policy of notices: the signs that count."""

from __future__ import annotations

from dataclasses import dataclass

from controller.conditions import DEFAULT_CONDITIONS, ConditionRule
from controller.taints import DEFAULT_TAINTS, TaintRule


@dataclass(frozen=True, slots=True)
class NoticePolicy:
    """The signs of a node for which a drain is requested, and the time limits."""

    taints: tuple[TaintRule, ...] = tuple(TaintRule.of(text) for text in DEFAULT_TAINTS)
    """The taints that mean that a node's pods have to go. More of them: drains for taints that end
    no pod."""
    conditions: tuple[ConditionRule, ...] = tuple(map(ConditionRule.of, DEFAULT_CONDITIONS))
    """The conditions that mean that a node's pods have to go. More of them: drains for conditions
    that end no pod."""
    cordon: bool = True
    """Whether a cordoned node counts, as at the start of ``kubectl drain``. The cost: a save and a
    smaller world even if none of the cordoned node's pods is evicted."""
    deadline_s: float = 600.0
    """The time until a drain's deadline, in seconds. The kubelet's own notice shortens it; longer:
    ranks that hang block the others for longer."""
    again_s: float = 30.0
    """Minimum time from the cancellation of a pod's drain to the next request, in seconds. Longer:
    a sign that comes back is passed on later; shorter: one that flaps costs more saves."""
