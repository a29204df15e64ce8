# SPDX-License-Identifier: Apache-2.0
"""A node as far as it shows that its pods have to go."""

from __future__ import annotations

from dataclasses import dataclass

from controller.cluster.api import Object
from controller.taints import Taint

SHUTTING_DOWN = "node is shutting down"
"""What the kubelet says of itself, in the condition Ready, while it ends its pods in good order."""


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """What is kept of one node."""

    name: str
    cordoned: bool = False
    taints: tuple[Taint, ...] = ()
    shutting_down: bool = False


def node_seen(node: Object) -> NodeSeen:
    """Take from a node what matters."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    ready = [one for one in status.get("conditions") or [] if one.get("type") == "Ready"]
    return NodeSeen(
        node["metadata"]["name"],
        bool(spec.get("unschedulable")),
        tuple(
            Taint(one.get("key", ""), one.get("value") or "", one.get("effect", ""))
            for one in spec.get("taints") or []
        ),
        any(SHUTTING_DOWN in (one.get("message") or "") for one in ready),
    )
