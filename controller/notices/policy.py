# SPDX-License-Identifier: Apache-2.0
"""Which signs count as a notice."""

from __future__ import annotations

from dataclasses import dataclass

from controller.taints import DEFAULT_TAINTS, TaintRule


@dataclass(frozen=True, slots=True)
class NoticePolicy:
    """What is asked for, and when.

    ``taints``: which mean that a node's pods have to go. More: drains for what ends no pod.
    ``cordon``: whether a cordoned node counts, as at the beginning of ``kubectl drain``. It costs a
    save and a smaller world where somebody cordons a node and evicts nobody.
    ``deadline_s``: the time that a drain has, in seconds. The kubelet's own notice shortens it;
    longer: ranks that hang hold the others for longer.
    ``again_s``: for so long after a notice was lifted none is given to that pod, in seconds.
    Longer: a sign that comes back is passed on later; shorter: one that flaps costs more saves.
    """

    taints: tuple[TaintRule, ...] = tuple(TaintRule.of(text) for text in DEFAULT_TAINTS)
    cordon: bool = True
    deadline_s: float = 600.0
    again_s: float = 30.0
