# SPDX-License-Identifier: Apache-2.0
"""Conditions of nodes, and rules that select those that say that the node is about to go."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeCondition:
    """One condition of a node; ``status``: ``True``, ``False`` or ``Unknown``."""

    type: str
    status: str

    def __str__(self) -> str:
        return self.type if self.status == "True" else f"{self.type}={self.status}"


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
