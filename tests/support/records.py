# SPDX-License-Identifier: Apache-2.0
"""Records of a small job: members ``a``, ``b``, ... and the round 3 that they are in.

Each has what a test does not care about as a default.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar

from launcher_shim.c10d.rounds.inputs import RoundMembers, RunSnapshot
from launcher_shim.c10d.rounds.records import LeftReason, Node, NodeState, Round, Seat
from rdzv.members.registration import Identity
from rdzv.records.drain import Drain, Outcome
from rdzv.records.job import Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.store import KeyValue

T = TypeVar("T", Job, Identity)


def kv(key: str, revision: int = 1, value: bytes = b"1") -> KeyValue:
    """A key that was written once."""
    return KeyValue(key, value, revision, revision, 1, 0)


def member(name: str, age: int = 1, *, uid: str = "", most: int = 4, **changes: Any) -> Member:
    """A worker with one slot; ``age`` is its incarnation, ``most`` the job's max."""
    pod_uid = uid or f"uid-{name}"
    base = Member(name, pod_uid, age, "10.0.0.1", "host", "worker", 1, 1, most)
    return replace(base, **changes)


def drain(name: str, outcome: Outcome = "", *, uid: str = "", source: str = "sigterm") -> Drain:
    """A drain of the member's pod."""
    return Drain(uid or f"uid-{name}", name, "spot", source, outcome=outcome)


def node(
    member: str,
    state: NodeState = "asking",
    *,
    ask: int = 1,
    nonce: str = "n",
    number: int | None = None,
    left: LeftReason = "",
    addr: str = "",
    revision: int = 10,
) -> Node:
    """A node that asks, is in round ``number``, or left for a reason."""
    inside = 3 if state == "in" else 0
    reason = left or ("exit" if state == "left" else "")
    return Node(
        member,
        state,
        nonce,
        ask,
        addr or f"10.0.0.{member}",
        1,
        0,
        inside if number is None else number,
        reason,
        mod_revision=revision,
    )


def world(members: str = "abc", **changes: Any) -> Round:
    """The round 3 of these members, complete."""
    frozen = tuple(Seat(member, "n", 1) for member in members)
    return replace(Round(3, True, frozen=frozen, mod_revision=50), **changes)


def members(
    listed: str = "",
    *,
    leaving: str = "",
    granted: str = "",
    saved: str = "",
    quarantined: str = "",
    joins_wait: bool = False,
    ends_round: bool = False,
) -> RoundMembers:
    """What a round sees of its members, each of them by one letter."""
    return RoundMembers(
        frozenset(listed),
        frozenset(leaving),
        frozenset(granted),
        joins_wait,
        ends_round=ends_round,
        saved=frozenset(saved),
        quarantined=frozenset(quarantined),
    )


def run(
    nodes: Iterable[Node] = (),
    current: Round | None = None,
    *,
    listed: str = "abcd",
    membership: RoundMembers | None = None,
) -> RunSnapshot:
    """A run as a sidecar sees it; by default its round is the first one, and open."""
    return RunSnapshot(
        100, current or Round(), {one.member: one for one in nodes}, membership or members(listed)
    )


def by_policy(record: T, **values: Any) -> T:
    """A job, or an identity, with other values of its policy; ``desired`` is not the policy's."""
    of_policy = {one.name for one in fields(JobPolicy)} & values.keys()
    policy = replace(record.policy, **{name: values.pop(name) for name in of_policy})
    return replace(record, policy=policy, **values)
