# SPDX-License-Identifier: Apache-2.0
"""Conditions and taints of nodes, and rules that select those by which a node is about to go."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_CONDITIONS = (
    # Machine API (spot notices) and Gardener, before they take the machine away.
    "Terminating",
    # AKS's node problem detector: the scheduled events of a machine, by its newer and older names.
    "PreemptionScheduled",
    "PreemptScheduled",
    "TerminateScheduled",
    "RedeployScheduled",
    "RebootScheduled",
    # ACK's node problem detector: a spot instance is about to be released.
    "InstanceExpired",
    # NVSentinel: maintenance that the cloud has announced.
    "CSPMaintenance",
)
"""Only conditions with which the machine ends or restarts; none that says that a part is ill."""

STATUSES = ("True", "False", "Unknown")

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
class NodeCondition:
    """One condition of a node; ``status``: ``True``, ``False`` or ``Unknown``."""

    type: str
    status: str

    def __str__(self) -> str:
        return self.type if self.status == "True" else f"{self.type}={self.status}"


@dataclass(frozen=True, slots=True)
class ConditionRule:
    """A rule that matches conditions by type and status."""

    type: str
    status: str = "True"

    @classmethod
    def of(cls, text: str) -> ConditionRule:
        """Parse TYPE[=STATUS]; raises ``ValueError``."""
        kind, equals, status = text.partition("=")
        if not kind or (equals and status not in STATUSES):
            raise ValueError(f"expected TYPE[=STATUS], STATUS one of {', '.join(STATUSES)}")
        return cls(kind, status or "True")

    def fits(self, condition: NodeCondition) -> bool:
        """Return whether ``condition`` matches."""
        return (condition.type, condition.status) == (self.type, self.status)


@dataclass(frozen=True, slots=True)
class Taint:
    """One taint of a node."""

    key: str
    value: str
    effect: str


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
