# SPDX-License-Identifier: Apache-2.0
"""What the chart does about pods that no replica of the webhook has seen."""

from __future__ import annotations

import pytest

from controller.admission.uninjected import selects
from tests.support.chart import HelmFailed, named, pods, rendered

pytestmark = pytest.mark.timeout(1800)  # the first one may have to build helm

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
    objects = rendered("injection.failurePolicy=Fail")
    of_namespace = {"kubernetes.io/metadata.name": namespace}
    if labelled:
        of_namespace["muster.dev/inject"] = "true"
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
    assert all(
        one["metadata"].get("namespace", "muster-system") == "muster-system"
        for one in objects
        if [*pods([one])]
    )


def test_the_right_to_evict_comes_with_the_value_alone() -> None:
    def evicts(*values: str) -> tuple[bool, bool]:
        objects = rendered(*values)
        rules = [rule for one in objects for rule in one.get("rules", []) if isinstance(rule, dict)]
        right = any("pods/eviction" in rule.get("resources", ()) for rule in rules)
        ((_, spec),) = [pod for pod in pods(objects) if pod[0].startswith("Deployment/")]
        return right, "--evict-uninjected=on" in spec["containers"][0]["command"]

    assert evicts() == (False, False)
    assert evicts("injection.evict=true") == (True, True)
    for needed in ("rbac.pods", "rbac.events", "jobs.follow"):
        with pytest.raises(HelmFailed, match="evict needs"):
            evicts("injection.evict=true", f"{needed}=false")
