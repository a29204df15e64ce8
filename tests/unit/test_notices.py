# SPDX-License-Identifier: Apache-2.0
"""Notices that nodes and pods give before the kubelet: who is asked, and what is taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from controller import notices
from controller.node_signs import (
    DEFAULT_CONDITIONS,
    DEFAULT_TAINTS,
    ConditionRule,
    NodeCondition,
    Taint,
    TaintRule,
)
from controller.notices import (
    Asked,
    NodeSeen,
    NoticeDecision,
    NoticePolicy,
    decide_notices,
    node_seen,
    signs_of,
)
from controller.owners import PodSeen, pod_seen
from rdzv.drain.transactions import take_over
from rdzv.records.drain import CONTROLLER, Drain
from rdzv.store import KeyValue
from tests.support.models.notices import GOES, KEYS, LEAST, SPOT, Broken, Cluster, explore
from tests.support.records import drain


def explore_all() -> None:
    for seed in range(200):
        explore(seed)


POD = PodSeen("uid-a", "team", "a", "north", None, None, job="digits")


def test_whatever_happens_nobody_elses_drain_is_lifted_and_every_sign_is_passed_on() -> None:
    explore_all()


MUTATIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "a drain of somebody else is taken back": ("_is_ours", lambda drain: True),
    "who took a drain back by hand is overruled": ("_is_news", lambda signs, asked: bool(signs)),
    "the next leader overrules who took a drain back": ("_dismissed", lambda *_: frozenset()),
    "a cordon alone leaves fewer than min": ("_leaves_enough", lambda job, member, going: True),
    "a pod whose node is taken away is not asked": (
        "_may_ask",
        lambda signs, job, member, going: notices._leaves_enough(job, member, going),
    ),
    "a drain stays although its sign is gone": (
        "_may_be_lifted",
        lambda drain: notices._is_ours(drain) and not drain.ends and not drain.outcome,
    ),
    "the drain of a pod that is being ended is taken back": ("_may_be_lifted", notices._is_ours),
}


@pytest.mark.parametrize("rule", MUTATIONS)
def test_a_rule_that_is_taken_away_is_missed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, without = MUTATIONS[rule]
    monkeypatch.setattr(notices, name, without)
    with pytest.raises(Broken, match=rule):
        explore_all()


@pytest.mark.parametrize(
    ("node", "pod", "signs"),
    [
        (NodeSeen("north"), POD, []),
        (NodeSeen("north", cordoned=True), POD, ["cordon"]),
        (NodeSeen("north", taints=(SPOT,)), POD, [f"taint {SPOT.key}"]),
        # For as long as the node lives: it says nothing of an end.
        (
            NodeSeen(
                "north",
                taints=(Taint("kubernetes.azure.com/scalesetpriority", "spot", "NoSchedule"),),
            ),
            POD,
            [],
        ),
        (NodeSeen("north", taints=(replace(SPOT, effect="PreferNoSchedule"),)), POD, []),
        (NodeSeen("north", taints=(SPOT,)), replace(POD, tolerates=frozenset({SPOT.key})), []),
        (NodeSeen("north", shutting_down=True), POD, ["shutdown"]),
        (NodeSeen("north", conditions=(GOES,)), POD, ["condition PreemptionScheduled"]),
        (NodeSeen("north", conditions=(replace(GOES, status="False"),)), POD, []),
        # Parts that are ill, and what every node has.
        (NodeSeen("north", conditions=(NodeCondition("GpuMemWatch", "True"),)), POD, []),
        (NodeSeen("north", conditions=(NodeCondition("Ready", "True"),)), POD, []),
        (
            NodeSeen("north", cordoned=True, taints=(SPOT,), conditions=(GOES,)),
            POD,
            [f"taint {SPOT.key}", "condition PreemptionScheduled", "cordon"],
        ),
        (
            NodeSeen("north", cordoned=True),
            replace(POD, disruption="EvictionByEvictionAPI: evicted"),
            ["disruption", "cordon"],
        ),
    ],
)
def test_signs(node: NodeSeen, pod: PodSeen, signs: list[str]) -> None:
    assert [sign.key for sign in signs_of(pod, node, NoticePolicy())] == signs


def show(cluster: Cluster, *names: str, **changes: Any) -> NoticeDecision:
    """Let nodes show something; return what is decided then."""
    for name in names:
        cluster.nodes[name] = replace(cluster.nodes[name], **changes)
    return cluster.step()


def test_a_sign_that_flaps_costs_one_save_in_half_a_minute() -> None:
    cluster = Cluster()
    asks = 0
    for _ in range(20):
        for taints in ((SPOT,), ()):
            asks += len(show(cluster, "north", taints=taints).asks)
            cluster.now += 1.0
    assert asks == 2 * 2  # two pods, and forty seconds


def test_a_long_cordon_drains_a_pod_once_whoever_leads() -> None:
    cluster, draw = Cluster(), Random(0)
    for one in show(cluster, "north", cordoned=True).asks:
        cluster.cancel_by_hand(draw, one.member.pod_uid)
    for _ in range(3):
        cluster.change_leader(draw)
        assert cluster.step().asks == ()
    show(cluster, "north", cordoned=False)
    assert len(show(cluster, "north", cordoned=True).asks) == 2


def test_a_cordon_that_was_lifted_is_news_to_the_next_leader() -> None:
    cluster = Cluster()
    for cordoned in (True, False):
        show(cluster, "north", cordoned=cordoned)
    cluster.change_leader(Random(0))
    assert len(show(cluster, "north", cordoned=True).asks) == 2


def test_a_cordon_asks_no_more_than_can_be_spared_and_the_others_once_they_can() -> None:
    cluster = Cluster()
    assert len(show(cluster, *cluster.nodes, cordoned=True).asks) == 4 - LEAST
    assert cluster.step().asks == ()
    # A node that is taken away is another matter.
    assert len(show(cluster, "north", "south", taints=(SPOT,)).asks) == LEAST


def test_a_node_that_is_gone_lifts_nothing() -> None:
    cluster = Cluster()
    held = drain("a", source=CONTROLLER)
    cluster.drains["uid-a"] = held
    asked = {"uid-a": Asked(frozenset({"cordon"}))}
    made = decide_notices(0.0, {}, cluster.pods, cluster.state(), asked, NoticePolicy())
    assert made.lifts == ()
    assert made.asked["uid-a"].signs == {"cordon"}


def test_what_the_api_shows_is_taken_in() -> None:
    message = "container runtime is up; node is shutting down"
    shown = node_seen(
        {
            "metadata": {"name": "north"},
            "spec": {"unschedulable": True, "taints": [{"key": "k", "effect": "NoExecute"}]},
            "status": {"conditions": [{"type": "Ready", "status": "False", "message": message}]},
        }
    )
    conditions = (NodeCondition("Ready", "False"),)
    assert shown == NodeSeen("north", True, (Taint("k", "", "NoExecute"),), True, conditions)
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    pod = {
        "metadata": {"name": "a", "namespace": "team", "uid": "uid-a"},
        "spec": {"nodeName": "north", "tolerations": [{"operator": "Exists"}, {"key": "k"}]},
        "status": {"conditions": [condition]},
    }
    seen = pod_seen(pod)
    assert (seen.disruption, seen.preempted) == ("PreemptionByScheduler", True)
    assert seen.tolerates == {"k"}
    condition["reason"] = "EvictionByEvictionAPI"
    assert not pod_seen(pod).preempted
    condition["status"] = "False"
    assert pod_seen(pod).disruption == ""
    assert not pod_seen(pod).unplaced
    condition |= {"type": "PodScheduled", "reason": "Unschedulable"}
    assert pod_seen(pod).unplaced
    pod["metadata"] = {**seen.reference, "uid": "uid-a", "deletionTimestamp": "now"}
    assert not pod_seen(pod).unplaced


def test_the_drain_of_a_preempted_pod_says_so_whoever_asked_for_it() -> None:
    cluster = Cluster()
    for uid in ("uid-a", "uid-b"):
        cluster.pods[uid] = replace(cluster.pods[uid], disruption="room", preempted=True)
    cluster.pods["uid-a"] = replace(cluster.pods["uid-a"], deleted=True)

    def decided(held: Drain) -> NoticeDecision:
        cluster.drains["uid-a"] = held
        return decide_notices(0.0, cluster.nodes, cluster.pods, cluster.state(), {}, NoticePolicy())

    ended = replace(drain("a", source="prestop"), ending=True)
    made = decided(ended)
    assert [mark.drain.member for mark in made.marks] == ["a"]
    assert [(ask.member.name, ask.preempted) for ask in made.asks] == [("b", True)]
    assert decided(replace(ended, preempted=True)).marks == ()
    assert decided(replace(ended, outcome="committed")).marks == ()


def test_taints_are_named_as_kubectl_spells_them() -> None:
    rule = TaintRule.of("maintenance=soon:NoSchedule")
    assert rule.fits(Taint("maintenance", "soon", "NoSchedule"))
    assert not rule.fits(Taint("maintenance", "later", "NoSchedule"))
    assert TaintRule.of("m:PreferNoSchedule").fits(Taint("m", "", "PreferNoSchedule"))
    with pytest.raises(ValueError, match="KEY"):
        TaintRule.of("=x")
    assert len({*DEFAULT_TAINTS}) == len(DEFAULT_TAINTS)


def test_conditions_are_named_by_type_and_status() -> None:
    assert ConditionRule.of("Terminating").fits(NodeCondition("Terminating", "True"))
    assert not ConditionRule.of("Terminating").fits(NodeCondition("Terminating", "Unknown"))
    ill = ConditionRule.of("AcceleratedHardwareReady=False")
    assert ill.fits(NodeCondition("AcceleratedHardwareReady", "False"))
    assert not ill.fits(NodeCondition("AcceleratedHardwareReady", "True"))
    for wrong in ("", "=True", "Ready=", "Ready=no"):
        with pytest.raises(ValueError, match="TYPE"):
            ConditionRule.of(wrong)
    assert len({*DEFAULT_CONDITIONS}) == len(DEFAULT_CONDITIONS)


def test_a_condition_that_a_site_names_is_a_sign() -> None:
    node = NodeSeen("north", conditions=(NodeCondition("AcceleratedHardwareReady", "False"),))
    policy = NoticePolicy(conditions=(ConditionRule.of("AcceleratedHardwareReady=False"),))
    (sign,) = signs_of(POD, node, policy)
    assert sign.sentence == "node north has the condition AcceleratedHardwareReady=False"
    assert sign.sure
    assert signs_of(POD, node, NoticePolicy()) == ()


def test_a_heartbeat_of_a_condition_is_no_change() -> None:
    def shown(beat: str) -> NodeSeen:
        condition = {"type": "Terminating", "status": "False", "lastHeartbeatTime": beat}
        status = {"conditions": [{**condition, "message": beat}]}
        return node_seen({"metadata": {"name": "north"}, "status": status})

    assert shown("00:00") == shown("00:01")


def test_a_condition_drains_below_min_and_lifts_when_it_goes() -> None:
    cluster = Cluster()
    assert len(show(cluster, *cluster.nodes, conditions=(GOES,)).asks) == 4
    assert len(show(cluster, "south", conditions=()).lifts) == 2


def test_a_drain_that_a_person_asks_for_as_well_is_that_persons() -> None:
    cluster = Cluster()
    show(cluster, "north", taints=(SPOT,))
    asked = replace(drain("a", source="operator"), requested_by="me@desk", seconds_left=60.0)
    planned = take_over(KEYS, cluster.state().snapshot, asked)
    assert planned is not None
    (compare,), (put,) = planned
    assert compare.operand == cluster.drains["uid-a"].mod_revision
    after = Drain.from_kv(KeyValue(compare.key, put.value, 1, 9, 1, 0))  # type: ignore[union-attr]
    assert (after.source, after.requested_by, after.seconds_left) == ("operator", "me@desk", 60.0)
    cluster.drains["uid-a"] = after
    assert take_over(KEYS, cluster.state().snapshot, asked) is None
    assert [lift.drain.member for lift in show(cluster, "north", taints=()).lifts] == ["c"]
