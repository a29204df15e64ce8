# SPDX-License-Identifier: Apache-2.0
"""Which signs count as a notice."""

from __future__ import annotations

from dataclasses import dataclass

from controller.taints import DEFAULT_TAINTS, TaintRule


@dataclass(frozen=True, slots=True)
class NoticePolicy:
    """For which signs of a node a drain is requested, and when."""

    taints: tuple[TaintRule, ...] = tuple(TaintRule.of(text) for text in DEFAULT_TAINTS)
    """The taints that mean that a node's pods have to go. More of them: drains for what ends no
    pod."""
    cordon: bool = True
    """Whether a cordoned node counts, as at the beginning of ``kubectl drain``. It costs a save and
    a smaller world where a node is cordoned and none of its pods is evicted."""
    deadline_s: float = 600.0
    """The time that a drain has, in seconds. The kubelet's own notice shortens it; longer: ranks
    that hang hold the others for longer."""
    again_s: float = 30.0
    """For so long after a notice was lifted none is given to that pod, in seconds. Longer: a sign
    that comes back is passed on later; shorter: one that flaps costs more saves."""
