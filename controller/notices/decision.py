# SPDX-License-Identifier: Apache-2.0
"""Whom to ask to drain, and which of these drains to take back: a pure function of what is seen.

A drain that somebody else asked for is never taken back, nor one that is granted or whose pod is
being ended. Who takes one back by hand is not overruled while the same sign lasts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from controller.jobs.state import JobState
from controller.notices.node import NodeSeen
from controller.notices.policy import NoticePolicy
from controller.owners.pods import PodSeen
from rdzv.drain.decision import granted
from rdzv.keys import JobKeys
from rdzv.records.drain import CONTROLLER, Drain
from rdzv.records.job import Member


@dataclass(frozen=True, slots=True)
class Sign:
    """Why a pod has to go. ``sure``: it will be ended; a cordon alone ends nothing."""

    key: str
    sentence: str
    sure: bool = True


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for a pod: for which signs, and when it was lifted last."""

    signs: frozenset[str] = frozenset()
    lifted_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class NoticeGiven:
    """A drain to ask for."""

    keys: JobKeys
    member: Member
    signs: tuple[Sign, ...]

    @property
    def reason(self) -> str:
        """For the history: that of the pod's end first."""
        return "; ".join(sign.sentence for sign in self.signs)


@dataclass(frozen=True, slots=True)
class NoticeLifted:
    """A drain to take back."""

    keys: JobKeys
    drain: Drain
    reason: str


@dataclass(frozen=True, slots=True)
class NoticeDecision:
    """For one job. ``asked``: what is remembered of its pods from now on.

    ``wake_at_s``: when time alone changes this.
    """

    asks: tuple[NoticeGiven, ...] = ()
    lifts: tuple[NoticeLifted, ...] = ()
    asked: Mapping[str, Asked] = field(default_factory=dict)
    wake_at_s: float = math.inf


def decide(
    now: float,
    nodes: Mapping[str, NodeSeen],
    pods: Mapping[str, PodSeen],
    job: JobState,
    asked: Mapping[str, Asked],
    policy: NoticePolicy,
) -> NoticeDecision:
    """Decide for a job at ``now``, monotonic, in seconds. ``nodes`` are by name, ``pods`` by UID.

    ``asked`` is what was remembered before; the caller adds what it has carried out.
    """
    asks: list[NoticeGiven] = []
    lifts: list[NoticeLifted] = []
    kept: dict[str, Asked] = {}
    wake_at_s = math.inf
    going: set[str] = set()
    for member in sorted(job.snapshot.members.values(), key=lambda one: one.age_order):
        uid = member.pod_uid
        pod = pods.get(uid)
        node = nodes.get(pod.node) if pod is not None else None
        if pod is None or node is None or pod.deleted:
            # Nothing is known, or its end has begun, of which the kubelet tells.
            if uid in asked:
                kept[uid] = asked[uid]
            continue
        signs = signs_of(pod, node, policy)
        before = asked.get(uid, Asked())
        here = replace(before, signs=before.signs & {sign.key for sign in signs})
        drain = job.snapshot.drains.get(uid)
        if drain is not None:
            # Whoever takes it back, whosever it is, has seen these signs.
            here = replace(here, signs=frozenset(sign.key for sign in signs))
            if not signs and _may_be_lifted(job, drain):
                lifts.append(NoticeLifted(job.keys, drain, f"{pod.node} is in service again"))
        elif _is_news(signs, here) and _may_ask(signs, job, member, going):
            again_s = here.lifted_s + policy.again_s
            if now >= again_s:
                asks.append(NoticeGiven(job.keys, member, signs))
                going.add(uid)
            else:
                wake_at_s = min(wake_at_s, again_s)
        if here != Asked():
            kept[uid] = here
    return NoticeDecision(tuple(asks), tuple(lifts), kept, wake_at_s)


def signs_of(pod: PodSeen, node: NodeSeen, policy: NoticePolicy) -> tuple[Sign, ...]:
    """Everything that says that the pod has to go; what ends it first."""
    found: list[Sign] = []
    if pod.disruption:
        found.append(Sign("disruption", f"Kubernetes is about to end it: {pod.disruption}"))
    if node.shutting_down:
        found.append(Sign("shutdown", f"node {node.name} is shutting down"))
    for taint in node.taints:
        # Its user knows of the taint, and has said that the pod stays.
        if taint.key in pod.tolerates or not any(rule.fits(taint) for rule in policy.taints):
            continue
        value = f"={taint.value}" if taint.value else ""
        sentence = f"node {node.name} has the taint {taint.key}{value}:{taint.effect}"
        found.append(Sign(f"taint {taint.key}", sentence))
    if policy.cordon and node.cordoned:
        found.append(Sign("cordon", f"node {node.name} is cordoned", sure=False))
    return tuple(found)


def after_ask(asked: Mapping[str, Asked], ask: NoticeGiven) -> dict[str, Asked]:
    """Remember that ``ask`` was carried out."""
    uid = ask.member.pod_uid
    before = asked.get(uid, Asked())
    signs = before.signs | {sign.key for sign in ask.signs}
    return {**asked, uid: replace(before, signs=signs)}


def after_lift(asked: Mapping[str, Asked], lift: NoticeLifted, now: float) -> dict[str, Asked]:
    """Remember that ``lift`` was carried out."""
    return {**asked, lift.drain.pod_uid: Asked(lifted_s=now)}


def _is_news(signs: tuple[Sign, ...], asked: Asked) -> bool:
    """Whether there is a sign for which nothing was asked yet: else somebody took that back."""
    return any(sign.key not in asked.signs for sign in signs)


def _may_ask(signs: tuple[Sign, ...], job: JobState, member: Member, going: set[str]) -> bool:
    """Whether the pod will surely be ended, or can be spared."""
    return any(sign.sure for sign in signs) or _leaves_enough(job, member, going)


def _leaves_enough(job: JobState, member: Member, going: set[str]) -> bool:
    """Whether the job can train without the member, and without those that are asked to go."""
    rules = job.snapshot.rules
    if rules is None:
        return False
    stay = [one for one in job.listing.listed if one.pod_uid not in going]
    return len([one for one in stay if one.name != member.name]) >= rules.sizes.smallest


def _may_be_lifted(job: JobState, drain: Drain) -> bool:
    """Whether the drain is ours alone, and its pod has not been let go."""
    return _is_ours(drain) and not drain.ends and not granted(job.snapshot.commit, drain)


def _is_ours(drain: Drain) -> bool:
    return drain.source == CONTROLLER
