# SPDX-License-Identifier: Apache-2.0
"""Two releases in one cluster, and pods that no replica of the webhook has seen."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from controller.admission.uninjected import selects
from tests.support.chart import (
    CHART,
    HelmFailed,
    RunningRelease,
    command_of,
    helm,
    named,
    pods,
    rendered,
)

pytestmark = pytest.mark.timeout(1800)  # the first one may have to build helm

GROUP = "admissionregistration.k8s.io/v1"
TEAM = "injection.namespaceSelector.matchLabels.team="


def webhook(release: str, namespace: str, *values: str) -> dict[str, Any]:
    """What a release has put into the cluster; helm adds the annotations as it installs."""
    words = ["template", release, str(CHART), "--namespace", namespace]
    given = [word for value in values for word in ("--set", value)]
    text = helm(*words, "--show-only", "templates/webhook.yaml", *given)
    (found,) = yaml.safe_load_all(text)
    found["metadata"]["annotations"] = {"meta.helm.sh/release-namespace": namespace}
    return dict(found)


def cluster(*webhooks: dict[str, Any]) -> RunningRelease:
    path = f"/apis/{GROUP}/mutatingwebhookconfigurations"
    kind = {"kind": "MutatingWebhookConfigurationList", "apiVersion": GROUP}
    return RunningRelease({path: {**kind, "items": list(webhooks)}})


@pytest.mark.parametrize(
    ("there", "ours", "refused"),
    [
        ((), (), True),
        ((f"{TEAM}b",), (), True),
        ((), (f"{TEAM}a",), True),
        ((f"{TEAM}a",), (f"{TEAM}a",), True),
        ((f"{TEAM}b",), (f"{TEAM}a",), False),
    ],
)
def test_a_second_release_is_refused_unless_a_label_keeps_them_apart(
    there: tuple[str, ...], ours: tuple[str, ...], refused: bool
) -> None:
    with cluster(webhook("trial", "b", *there)) as running:
        if not refused:
            assert running.rendered(*ours)
            return
        with pytest.raises(HelmFailed, match=r"release of webhook trial-controller-b injects pods"):
            running.rendered(*ours)


def test_a_release_is_no_second_one_of_itself() -> None:
    with cluster(webhook("muster", "muster-system", "nameOverride=before")) as running:
        assert running.rendered()


def test_both_webhooks_are_for_the_selected_namespaces() -> None:
    found = webhook("muster", "muster-system", f"{TEAM}a")
    selectors = [one["namespaceSelector"] for one in found["webhooks"]]
    assert [one["matchLabels"] for one in selectors] == [
        {"team": "a"},
        {"team": "a", "muster.dev/inject": "true"},
    ]
    assert all(one["matchExpressions"][0]["operator"] == "NotIn" for one in selectors)


CONFIGURATION = "muster-controller-muster-system"


@pytest.mark.parametrize(
    ("pod", "namespace", "kept_out"),
    [
        ({"muster.dev/inject": "true"}, "team", True),
        ({"muster.dev/inject": "false"}, "team", False),
        ({}, "team", False),
        ({"muster.dev/inject": "true"}, "muster-system", False),
        ({"muster.dev/inject": "true"}, "kube-system", False),
        ({"app.kubernetes.io/name": "muster"}, "muster-system", False),
    ],
)
@pytest.mark.parametrize("labelled", [False, True])
def test_fail_keeps_out_pods_with_the_label_alone_and_none_of_the_charts(
    pod: dict[str, str], namespace: str, kept_out: bool, labelled: bool
) -> None:
    of_namespace = {"kubernetes.io/metadata.name": namespace}
    if labelled:
        of_namespace["muster.dev/inject"] = "true"
    objects = rendered("injection.failurePolicy=Fail")
    webhook = named(objects, "MutatingWebhookConfiguration", CONFIGURATION)
    asked = [
        one["failurePolicy"]
        for one in webhook["webhooks"]
        if selects(one["objectSelector"], pod) and selects(one["namespaceSelector"], of_namespace)
    ]
    assert ("Fail" in asked) is kept_out


def test_no_pod_of_the_chart_is_kept_out() -> None:
    objects = rendered("injection.failurePolicy=Fail")
    webhook = named(objects, "MutatingWebhookConfiguration", CONFIGURATION)
    own = {"kubernetes.io/metadata.name": "muster-system", "muster.dev/inject": "true"}
    assert not any(selects(one["namespaceSelector"], own) for one in webhook["webhooks"])
    with_pods = [one for one in objects if [*pods([one])]]
    assert {one["metadata"].get("namespace", "muster-system") for one in with_pods} == {
        "muster-system"
    }


def test_the_right_to_evict_comes_with_the_value_alone() -> None:
    def evicts(*values: str) -> tuple[bool, bool]:
        objects = rendered(*values)
        rules = [rule for one in objects for rule in one.get("rules", []) if isinstance(rule, dict)]
        right = any("pods/eviction" in rule.get("resources", ()) for rule in rules)
        return right, "--evict-uninjected=on" in command_of(objects)

    assert evicts() == (False, False)
    assert evicts("injection.evict=true") == (True, True)
    for needed in ("rbac.pods", "rbac.events", "jobs.follow"):
        with pytest.raises(HelmFailed, match="evict needs"):
            evicts("injection.evict=true", f"{needed}=false")
