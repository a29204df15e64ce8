# SPDX-License-Identifier: Apache-2.0
"""Two releases in one cluster: helm refuses the second one if it is for namespaces of the first."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.support.chart import CHART, HelmFailed, RunningRelease, helm

pytestmark = pytest.mark.timeout(1800)  # the first one may have to build helm

GROUP = "admissionregistration.k8s.io/v1"
TEAM = "injection.namespaceSelector.matchLabels.team="


def webhook(release: str, namespace: str, *values: str) -> dict[str, Any]:
    """What a release has put into the cluster; helm adds the annotations as it installs."""
    text = helm(
        *(
            "template",
            release,
            str(CHART),
            "--namespace",
            namespace,
            "-s",
            "templates/webhook.yaml",
        ),
        *(word for value in values for word in ("--set", value)),
    )
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
