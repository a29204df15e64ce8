# SPDX-License-Identifier: Apache-2.0
"""Early notices: the drains to request and to cancel, for signs that a pod will end.

A pure function of the observed state. A drain that somebody else requested is never cancelled, nor
one whose pod is being terminated. If a user cancels one, or its pod outlives it, it is not
requested again while the same sign lasts. The store has such a drain's reason, for the replica that
leads next.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from controller.cluster.api import Object
from controller.jobs import JobState
from controller.node_signs import (
    DEFAULT_CONDITIONS,
    DEFAULT_TAINTS,
    ConditionRule,
    NodeCondition,
    Taint,
    TaintRule,
)
from controller.owners import PodSeen, pod_of
from rdzv.keys import JobKeys
from rdzv.records.drain import CONTROLLER, Drain
from rdzv.records.job import Member

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


@dataclass(frozen=True, slots=True)
class Sign:
    """A reason for a pod to go. ``sure``: the pod will end; a cordon alone does not end any."""

    key: str
    sentence: str
    sure: bool = True


@dataclass(frozen=True, slots=True)
class Asked:
    """The requests for a pod: the signs they were for, and the time of the last cancellation."""

    signs: frozenset[str] = frozenset()
    lifted_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class NoticeGiven:
    """A drain to request."""

    keys: JobKeys
    member: Member
    signs: tuple[Sign, ...]
    preempted: bool = False

    @property
    def reason(self) -> str:
        """The reason for the history, the most certain sign first."""
        return "; ".join(sign.sentence for sign in self.signs)


@dataclass(frozen=True, slots=True)
class NoticeLifted:
    """A drain to cancel."""

    keys: JobKeys
    drain: Drain
    reason: str


@dataclass(frozen=True, slots=True)
class PreemptionSeen:
    """A drain, whoever requested it, to mark as one of a pod that makes room for another one."""

    keys: JobKeys
    drain: Drain


@dataclass(frozen=True, slots=True)
class NoticeDecision:
    """The decision for one job. ``asked``: the requests to remember for its pods.

    ``wake_at_s``: the time at which the decision may change without an event.
    """

    asks: tuple[NoticeGiven, ...] = ()
    lifts: tuple[NoticeLifted, ...] = ()
    marks: tuple[PreemptionSeen, ...] = ()
    asked: Mapping[str, Asked] = field(default_factory=dict)
    wake_at_s: float = math.inf


def decide_notices(
    now: float,
    nodes: Mapping[str, NodeSeen],
    pods: Mapping[str, PodSeen],
    job: JobState,
    asked: Mapping[str, Asked],
    policy: NoticePolicy,
) -> NoticeDecision:
    """Decide for a job at ``now``, monotonic, in seconds. ``nodes`` are by name, ``pods`` by UID.

    ``asked`` is what was remembered of this job's pods before; the caller adds the requests that it
    carries out.
    """
    asks: list[NoticeGiven] = []
    lifts: list[NoticeLifted] = []
    marks: list[PreemptionSeen] = []
    kept: dict[str, Asked] = {}
    wake_at_s = math.inf
    going: set[str] = set()
    for member in sorted(job.snapshot.members.values(), key=lambda one: one.age_order):
        uid = member.pod_uid
        pod = pod_of(pods, job.keys, member.name, uid)
        drain = job.snapshot.drains.get(uid)
        if pod is not None and pod.preempted and drain and not (drain.preempted or drain.outcome):
            marks.append(PreemptionSeen(job.keys, drain))
        node = nodes.get(pod.node) if pod is not None else None
        if pod is None or node is None or pod.deleted:
            # Nothing is known of the pod, or it is terminating, which the kubelet reports.
            if uid in asked:
                kept[uid] = asked[uid]
            continue
        signs = signs_of(pod, node, policy)
        before = asked[uid] if uid in asked else Asked(_dismissed(signs, job, member))
        here = replace(before, signs=before.signs & {sign.key for sign in signs})
        if drain is not None:
            # Whoever cancels this drain, of whatever source, knows of these signs.
            here = replace(here, signs=frozenset(sign.key for sign in signs))
            if not signs and _may_be_lifted(drain):
                lifts.append(NoticeLifted(job.keys, drain, f"{pod.node} is in service again"))
        elif _is_news(signs, here) and _may_ask(signs, job, member, going):
            again_s = here.lifted_s + policy.again_s
            if now >= again_s:
                asks.append(NoticeGiven(job.keys, member, signs, pod.preempted))
                going.add(uid)
            else:
                wake_at_s = min(wake_at_s, again_s)
        kept[uid] = here
    return NoticeDecision(tuple(asks), tuple(lifts), tuple(marks), kept, wake_at_s)


def signs_of(pod: PodSeen, node: NodeSeen, policy: NoticePolicy) -> tuple[Sign, ...]:
    """Return every sign that the pod has to go; the most certain first."""
    found: list[Sign] = []
    if pod.disruption:
        found.append(Sign("disruption", f"Kubernetes is about to end it: {pod.disruption}"))
    if node.shutting_down:
        found.append(Sign("shutdown", f"node {node.name} is shutting down"))
    for taint in node.taints:
        # Its user knows of the taint and tolerates it: the pod stays.
        if taint.key in pod.tolerates or not any(rule.fits(taint) for rule in policy.taints):
            continue
        value = f"={taint.value}" if taint.value else ""
        sentence = f"node {node.name} has the taint {taint.key}{value}:{taint.effect}"
        found.append(Sign(f"taint {taint.key}", sentence))
    for condition in node.conditions:
        if any(rule.fits(condition) for rule in policy.conditions):
            sentence = f"node {node.name} has the condition {condition}"
            found.append(Sign(f"condition {condition}", sentence))
    if policy.cordon and node.cordoned:
        found.append(Sign("cordon", f"node {node.name} is cordoned", sure=False))
    return tuple(found)


def after_ask(asked: Mapping[str, Asked], ask: NoticeGiven) -> dict[str, Asked]:
    """Return ``asked`` after ``ask`` was carried out."""
    uid = ask.member.pod_uid
    before = asked.get(uid, Asked())
    signs = before.signs | {sign.key for sign in ask.signs}
    return {**asked, uid: replace(before, signs=signs)}


def after_lift(asked: Mapping[str, Asked], lift: NoticeLifted, now: float) -> dict[str, Asked]:
    """Return ``asked`` after ``lift`` was carried out."""
    return {**asked, lift.drain.pod_uid: Asked(lifted_s=now)}


def _is_news(signs: tuple[Sign, ...], asked: Asked) -> bool:
    """Return whether a sign is new; if a drain was requested for each, somebody cancelled it."""
    return any(sign.key not in asked.signs for sign in signs)


def _dismissed(signs: tuple[Sign, ...], job: JobState, member: Member) -> frozenset[str]:
    """Return the signs for which the last drain of this pod was cancelled, as the store has it."""
    holder = job.snapshot.incarnations.get(member.name)
    if holder is None or holder.pod_uid != member.pod_uid:
        return frozenset()
    return frozenset(sign.key for sign in signs if sign.sentence in holder.dismissed)


def _may_ask(signs: tuple[Sign, ...], job: JobState, member: Member, going: set[str]) -> bool:
    """Return whether the pod is sure to end, or the job can do without it."""
    return any(sign.sure for sign in signs) or _leaves_enough(job, member, going)


def _leaves_enough(job: JobState, member: Member, going: set[str]) -> bool:
    """Return whether the job can train without the member and those already asked to go."""
    rules = job.snapshot.rules
    if rules is None:
        return False
    stay = [one for one in job.listing.listed if one.pod_uid not in going]
    return len([one for one in stay if one.name != member.name]) >= rules.policy.smallest


def _may_be_lifted(drain: Drain) -> bool:
    """Return whether only the controller requested the drain, and the pod is not being ended."""
    return _is_ours(drain) and not drain.ends


def _is_ours(drain: Drain) -> bool:
    return drain.source == CONTROLLER
