# SPDX-License-Identifier: Apache-2.0
"""The priority of the chart's pods, and what a user adds to them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chart import HelmFailed, of_kind, rendered

pytestmark = pytest.mark.timeout(1800)  # the first one may have to build helm

CLASSES = "priorityClasses.enabled=true"
RESTORED = ("etcd.backup.claim=snapshots", "etcd.restore=snapshot.db")
KINDS = {"etcd": "StatefulSet", "controller": "Deployment"}


def template(part: str, *values: str, **more: Any) -> dict[str, Any]:
    (found,) = of_kind(rendered(*values, **more), KINDS[part])
    made: dict[str, Any] = found["spec"]["template"]
    return made


def classes(*values: str) -> dict[str, int]:
    found = of_kind(rendered(*values), "PriorityClass")
    return {one["metadata"]["name"]: one["value"] for one in found}


@pytest.mark.parametrize("value", ["10", "1000", "100000000"])
def test_no_job_preempts_what_it_needs(value: str) -> None:
    made = classes(CLASSES, f"priorityClasses.value={value}")
    assert made["muster-training-low"] < made["muster-training"] < made["muster-system"]
    # Higher ones are Kubernetes' own.
    assert made["muster-system"] <= 1_000_000_000


@pytest.mark.parametrize("part", KINDS)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), None),
        ((CLASSES,), "muster-system"),
        (("{part}.priorityClassName=system-cluster-critical",), "system-cluster-critical"),
        (("{part}.priorityClassName=system-cluster-critical", CLASSES), "system-cluster-critical"),
    ],
)
def test_etcd_and_the_controller_have_the_class_above_the_jobs_or_another(
    part: str, given: tuple[str, ...], expected: str | None
) -> None:
    made = template(part, *(value.format(part=part) for value in given))
    assert made["spec"].get("priorityClassName") == expected


def test_the_restore_has_the_members_class() -> None:
    jobs = of_kind(rendered(CLASSES, *RESTORED), "Job")
    assert jobs
    for job in jobs:
        assert job["spec"]["template"]["spec"]["priorityClassName"] == "muster-system"


ADDED: dict[str, Any] = {
    "podLabels": {"team": "ml", "sidecar.istio.io/inject": "false"},
    "podAnnotations": {"prometheus.io/scrape": "true"},
    "extraEnv": [{"name": "GOGC", "value": "50"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
}


@pytest.mark.parametrize("part", KINDS)
def test_labels_annotations_env_and_volumes_are_added(part: str) -> None:
    made, plain = template(part, more={part: ADDED}), template(part)
    assert made["metadata"]["annotations"] == ADDED["podAnnotations"]
    assert made["metadata"]["labels"] == {**plain["metadata"]["labels"], **ADDED["podLabels"]}
    (container,), (before,) = (one["spec"]["containers"] for one in (made, plain))
    assert container["env"] == [*before.get("env", []), *ADDED["extraEnv"]]
    assert container["volumeMounts"] == [*before["volumeMounts"], *ADDED["extraVolumeMounts"]]
    assert made["spec"]["volumes"] == [*plain["spec"]["volumes"], *ADDED["extraVolumes"]]


def test_volumes_are_added_where_etcd_has_none_of_its_own() -> None:
    alone = ("etcd.auth.enabled=false", "etcd.tls.enabled=false")
    assert template("etcd", *alone, more={"etcd": ADDED})["spec"]["volumes"] == [
        *ADDED["extraVolumes"]
    ]


@pytest.mark.parametrize("part", KINDS)
@pytest.mark.parametrize("label", ["app.kubernetes.io/component", "muster.dev/members"])
def test_labels_that_pods_are_selected_by_cannot_be_replaced(part: str, label: str) -> None:
    with pytest.raises(HelmFailed, match=f"/{part}/podLabels"):
        rendered(more={part: {"podLabels": {label: "else"}}})


@pytest.mark.parametrize(
    "given", ["imagePullSecrets={one,two}", "imagePullSecrets[0].name=one,imagePullSecrets[1]=two"]
)
def test_pull_secrets_are_names_or_what_every_other_chart_takes(given: str) -> None:
    for part in KINDS:
        spec = template(part, given)["spec"]
        assert spec["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
