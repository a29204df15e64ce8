# SPDX-License-Identifier: Apache-2.0
"""Taints of nodes, and rules that select those that count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Taint:
    """One taint of a node."""

    key: str
    value: str
    effect: str


DEFAULT_TAINTS = (
    # Kubernetes: the machine is off, or given up by hand.
    "node.kubernetes.io/out-of-service",
    "node.cloudprovider.kubernetes.io/shutdown",
    # Autoscalers, before they evict.
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    # Cloud providers' handlers, on a node that is to be reclaimed or maintained.
    "aws-node-termination-handler/spot-itn",
    "aws-node-termination-handler/rebalance-recommendation",
    "aws-node-termination-handler/asg-lifecycle-termination",
    "aws-node-termination-handler/scheduled-maintenance",
    "cloud.google.com/impending-node-termination",
    "remediator.kubernetes.azure.com/unschedulable",
    # NVSentinel, if it is configured to taint; by default it cordons.
    "AggregatedNodeHealth",
    "nvidia.com/gpu-error",
    "nvidia.com/gpu-xid-error",
    "nvidia.com/gpu-nvlink-error",
    "nvidia.com/syslog-xid-error",
)
"""Only temporary taints; none that a node has for life, as those that mark spot capacity."""

SOFT = "PreferNoSchedule"


@dataclass(frozen=True, slots=True)
class TaintRule:
    """A rule that matches taints by key, and by value and effect if they are given."""

    key: str
    value: str | None = None
    effect: str = ""

    @classmethod
    def of(cls, text: str) -> TaintRule:
        """Parse KEY[=VALUE][:EFFECT], as kubectl spells it; raises ``ValueError`` without a key."""
        named, _, effect = text.partition(":")
        key, equals, value = named.partition("=")
        if not key:
            raise ValueError("expected KEY[=VALUE][:EFFECT]")
        return cls(key, value if equals else None, effect)

    def fits(self, taint: Taint) -> bool:
        """Return whether ``taint`` matches; a soft effect evicts no pod and has to be named."""
        if taint.key != self.key or self.value not in (None, taint.value):
            return False
        return taint.effect == self.effect if self.effect else taint.effect != SOFT
