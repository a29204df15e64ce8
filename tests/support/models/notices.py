# SPDX-License-Identifier: Apache-2.0
"""A small cluster in which nodes are cordoned, tainted, to end and put back, and what must hold.

What is decided is applied as the store would: nothing that lost its compare is written. Between two
decisions anything may happen, in any order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from controller import notices
from controller.jobs import JobState
from controller.node_signs import NodeCondition, Taint
from controller.notices import (
    Asked,
    NodeSeen,
    NoticeDecision,
    NoticePolicy,
    after_ask,
    after_lift,
    decide_notices,
)
from controller.owners import PodSeen
from rdzv.drain.transactions import cancel
from rdzv.keys import JobKeys
from rdzv.records.drain import CONTROLLER, Commit, Drain
from rdzv.records.job import Incarnation, Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import Snapshot, listing_of
from rdzv.store import Put
from tests.support.records import drain, kv, member

KEYS = JobKeys("team", "digits")
POLICY = NoticePolicy()
GOES = NodeCondition("PreemptionScheduled", "True")
ILL = NodeCondition("GpuMemWatch", "True")
SPOT = Taint("aws-node-termination-handler/spot-itn", "", "NoSchedule")
FOREIGN = Taint("kubernetes.azure.com/scalesetpriority", "spot", "NoSchedule")
NODES = ("north", "south")
LEAST = 2


class Broken(AssertionError):
    """A rule does not hold."""


@dataclass
class Cluster:
    """One job of four pods on two nodes.

    ``seen``: the signs beside each drain at the last decision; ``taken_back``: those of drains that
    a person took back then, or a sidecar; ``inherited``: those of them that the leader before saw.
    """

    now: float = 0.0
    nodes: dict[str, NodeSeen] = field(
        default_factory=lambda: {name: NodeSeen(name) for name in NODES}
    )
    pods: dict[str, PodSeen] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    drains: dict[str, Drain] = field(default_factory=dict)
    commit: Commit = field(default_factory=lambda: Commit(mod_revision=1))
    asked: dict[str, Asked] = field(default_factory=dict)
    seen: dict[str, set[str]] = field(default_factory=dict)
    taken_back: dict[str, set[str]] = field(default_factory=dict)
    incarnations: dict[str, Incarnation] = field(default_factory=dict)
    inherited: set[str] = field(default_factory=set)
    revision: int = 1

    def __post_init__(self) -> None:
        for number, name in enumerate("abcd"):
            uid = f"uid-{name}"
            node = NODES[number % 2]
            self.pods[uid] = PodSeen(uid, "team", name, node, None, None, job=KEYS.job_name)
            self.members[name] = replace(member(name, number + 1), version="0.2.0")
            self.incarnations[name] = Incarnation(name, number + 1, uid)

    # -- what may happen

    def cordon(self, draw: random.Random) -> None:
        self._node(draw, lambda node: replace(node, cordoned=not node.cordoned))

    def taint(self, draw: random.Random) -> None:
        self._node(draw, lambda node: replace(node, taints=() if node.taints else (SPOT,)))

    def condition(self, draw: random.Random) -> None:
        shown = draw.choice(((), (ILL,), (ILL, GOES)))
        self._node(draw, lambda node: replace(node, conditions=shown))

    def foreign_taint(self, draw: random.Random) -> None:
        self._node(draw, lambda node: replace(node, taints=(FOREIGN,)) if not node.taints else node)

    def pass_time(self, draw: random.Random) -> None:
        self.now += draw.choice((1.0, 40.0))

    def drain_by_hand(self, draw: random.Random) -> None:
        name = draw.choice("abcd")
        held = self.drains.get(f"uid-{name}")
        if held is not None and (held.source != CONTROLLER or held.outcome):
            return
        self._put(replace(drain(name, source="operator"), requested_by="me@desk"))

    def cancel_by_hand(self, draw: random.Random, uid: str = "") -> None:
        if not self.drains:
            return
        uid = uid or draw.choice(sorted(self.drains))
        if self._cancelled(uid):
            self.taken_back[uid] = self.seen.get(uid, set())
            self.inherited.discard(uid)

    def outlive(self, draw: random.Random) -> None:
        """A pod's sidecar takes a drain of the controller back, past its deadline."""
        uid = draw.choice(sorted(self.pods))
        if (held := self.drains.get(uid)) and held.source == CONTROLLER:
            self.cancel_by_hand(draw, uid)

    def grant(self, draw: random.Random) -> None:
        if self.drains:
            uid = draw.choice(sorted(self.drains))
            self._put(replace(self.drains[uid], outcome="committed", step=4))

    def end(self, draw: random.Random) -> None:
        """The kubelet ends a pod, which its sidecar may hear before the API server shows it."""
        uid = draw.choice(sorted(self.pods))
        held = self.drains.get(uid) or drain(self.pods[uid].name, source="prestop")
        self._put(replace(held, ending=True))
        self.pods[uid] = replace(self.pods[uid], deleted=draw.random() < 0.5)

    def change_leader(self, draw: random.Random) -> None:
        self.asked = {}
        # Of the signs beside a drain the next one knows those that it was for.
        for uid, keys in self.seen.items():
            keys &= self._named(uid, self.drains[uid].reason if uid in self.drains else "")
        for uid, keys in self.taken_back.items():
            keys &= self._named(uid, self.incarnations[self.pods[uid].name].dismissed)
        self.inherited = set(self.taken_back)

    ACTS = (
        *(cordon, taint, condition, foreign_taint, pass_time, drain_by_hand, cancel_by_hand),
        *(grant, end, change_leader, outlive),
    )

    def _node(self, draw: random.Random, change: object) -> None:
        name = draw.choice(NODES)
        assert callable(change)
        self.nodes[name] = change(self.nodes[name])

    def _put(self, record: Drain) -> None:
        self.revision += 1
        self.drains[record.pod_uid] = replace(record, mod_revision=self.revision)

    def _cancelled(self, uid: str, *, sign_gone: bool = False) -> bool:
        planned = cancel(KEYS, self.state().snapshot, uid, sign_gone=sign_gone)
        if isinstance(planned, str):
            return False
        name = self.drains.pop(uid).member
        key = KEYS.incarnation(name)
        put = next(one for one in planned[1] if isinstance(one, Put) and one.key == key)
        self.incarnations[name] = Incarnation.from_kv(kv(key, self.revision, put.value))
        return True

    # -- what is decided, and what must hold

    def state(self) -> JobState:
        snapshot = Snapshot(
            self.revision,
            Job(JobPolicy(LEAST, 4), mod_revision=1),
            dict(self.members),
            drains=dict(self.drains),
            commit=self.commit,
            incarnations=dict(self.incarnations),
        )
        return JobState(KEYS, self.revision, snapshot, listing_of(snapshot))

    def signs(self, uid: str) -> tuple[notices.Sign, ...]:
        """What says so of a pod, as a reader of the page would say."""
        node = self.nodes[self.pods[uid].node]
        found = [notices.Sign(f"taint {one.key}", "") for one in node.taints if one == SPOT]
        found += [notices.Sign(f"condition {one}", "") for one in node.conditions if one == GOES]
        return (*found, *([notices.Sign("cordon", "", sure=False)] if node.cordoned else []))

    def step(self) -> NoticeDecision:
        """Decide once, hold that against the rules, and carry it out."""
        before = dict(self.drains)
        state = self.state()
        made = decide_notices(self.now, self.nodes, self.pods, state, self.asked, POLICY)
        self.asked = dict(made.asked)
        for lift in made.lifts:
            held = before[lift.drain.pod_uid]
            _must(held.source == CONTROLLER, "a drain of somebody else is taken back")
            _must(not held.ends, "the drain of a pod that is being ended is taken back")
            _must(not self.signs(held.pod_uid), "a drain is taken back whose sign is still there")
            if self._cancelled(held.pod_uid, sign_gone=True):
                self.asked = after_lift(self.asked, lift, self.now)
        for ask in made.asks:
            uid = ask.member.pod_uid
            _must(uid not in before, "a pod that drains is asked again")
            _must(bool(self.signs(uid)), "a pod is asked without a sign")
            _must(not self.pods[uid].deleted, "a pod that is being ended is asked")
            new = {sign.key for sign in ask.signs} - self.taken_back.get(uid, set())
            who = "the next leader overrules who took a drain back"
            if uid not in self.inherited:
                who = "who took a drain back by hand is overruled"
            _must(bool(new), who)
            self._put(replace(drain(ask.member.name, source=CONTROLLER), reason=ask.reason))
            self.asked = after_ask(self.asked, ask)
        sure = [ask for ask in made.asks if any(sign.sure for sign in ask.signs)]
        if made.asks and not sure:
            listed = self.state().listing.listed
            _must(len(listed) >= LEAST, "a cordon alone leaves fewer than min")
        self.seen = {uid: self._keys(uid) for uid in self.drains}
        for uid, keys in self.taken_back.items():
            keys &= self._keys(uid)
        return made

    def _shown(self, uid: str) -> tuple[notices.Sign, ...]:
        return notices.signs_of(self.pods[uid], self.nodes[self.pods[uid].node], POLICY)

    def _named(self, uid: str, reason: str) -> set[str]:
        return {sign.key for sign in self._shown(uid) if sign.sentence in reason}

    def _keys(self, uid: str) -> set[str]:
        return {sign.key for sign in self.signs(uid)}

    def settle(self) -> None:
        """Let time pass until nothing is decided any more, and look at what came of it."""
        for _ in range(4):
            self.now += 2 * POLICY.again_s
            made = self.step()
        _must(not made.asks and not made.lifts, "it never comes to rest")
        for uid, pod in self.pods.items():
            held = self.drains.get(uid)
            if pod.deleted:
                continue
            sure = any(sign.sure for sign in self.signs(uid))
            if sure and not self.taken_back.get(uid):
                _must(held is not None, "a pod whose node is taken away is not asked")
            if not self.signs(uid) and held is not None and held.source == CONTROLLER:
                _must(held.ends, "a drain stays although its sign is gone")


def _must(holds: bool, rule: str) -> None:
    if not holds:
        raise Broken(rule)


def explore(seed: int, acts: int = 30) -> None:
    """Let ``acts`` things happen, with a decision after each or after several."""
    draw = random.Random(seed)
    cluster = Cluster()
    for _ in range(acts):
        draw.choice(Cluster.ACTS)(cluster, draw)
        if draw.random() < 0.7:
            cluster.step()
    cluster.settle()
