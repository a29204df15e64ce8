# SPDX-License-Identifier: Apache-2.0
"""The reduced view of a node: the signs that its pods have to go."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from controller.cluster.api import Object
from controller.conditions import NodeCondition
from controller.taints import Taint

SHUTTING_DOWN = "node is shutting down"
"""Part of the message of the condition Ready while the kubelet shuts its node down gracefully."""


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """The kept fields of one node."""

    name: str
    cordoned: bool = False
    taints: tuple[Taint, ...] = ()
    shutting_down: bool = False
    conditions: tuple[NodeCondition, ...] = ()


def node_seen(node: Object) -> NodeSeen:
    """Reduce a node to the fields that are kept."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    conditions = status.get("conditions") or []
    ready = [one for one in conditions if one.get("type") == "Ready"]
    return NodeSeen(
        node["metadata"]["name"],
        bool(spec.get("unschedulable")),
        tuple(
            Taint(one.get("key", ""), one.get("value") or "", one.get("effect", ""))
            for one in spec.get("taints") or []
        ),
        any(SHUTTING_DOWN in (one.get("message") or "") for one in ready),
        tuple(
            NodeCondition(sys.intern(one.get("type", "")), sys.intern(one.get("status", "")))
            for one in conditions
        ),
    )
