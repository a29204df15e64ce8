# SPDX-License-Identifier: Apache-2.0
"""The number of etcd's members: three, or one to try, and never changed under a running etcd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.chart import HelmFailed, RunningRelease, rendered

pytestmark = pytest.mark.timeout(1800)  # the first one may have to build helm

ONE = "etcd.replicas=1"
THREE = "etcd.replicas=3"
NAME = "muster-etcd"
STATEFULSET = "/apis/apps/v1/namespaces/muster-system/statefulsets/muster-etcd"
MAY_CHANGE = {
    *("minReadySeconds", "ordinals", "persistentVolumeClaimRetentionPolicy", "replicas"),
    *("revisionHistoryLimit", "template", "updateStrategy"),
}
"""The fields of a StatefulSet's spec that the API server lets an update change."""


def members(*values: str) -> dict[str, Any]:
    (found,) = [one for one in rendered(*values) if one["kind"] == "StatefulSet"]
    return found


def running(labels: Mapping[str, str], replicas: int = 1) -> RunningRelease:
    """A release whose StatefulSet selects its pods by ``labels``."""
    metadata = {
        **{"name": NAME, "namespace": "muster-system"},
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": {
            "meta.helm.sh/release-name": "muster",
            "meta.helm.sh/release-namespace": "muster-system",
        },
    }
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}}
    kind = {"apiVersion": "apps/v1", "kind": "StatefulSet"}
    return RunningRelease({STATEFULSET: {**kind, "metadata": metadata, "spec": spec}})


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    return {key for key in {*before, *after} if before.get(key) != after.get(key)}


@pytest.mark.parametrize("persistence", ["true", "false"])
def test_the_api_server_refuses_another_number_of_members(persistence: str) -> None:
    """Members that are added to a running etcd make a second, empty one beside it."""
    kept = f"etcd.persistence.enabled={persistence}"
    one, three = members(ONE, kept)["spec"], members(THREE, kept)["spec"]
    assert changed(one, three) - MAY_CHANGE == {"selector"}
    assert one.get("volumeClaimTemplates") == three.get("volumeClaimTemplates")


def test_all_other_values_may_change_under_running_members() -> None:
    others = ("etcd.quotaBytes=1073741824", "etcd.nodeSelector.disk=ssd", "etcd.spread=preferred")
    assert changed(members()["spec"], members(*others)["spec"]) <= MAY_CHANGE
    backup = ("etcd.backup.enabled=true", "etcd.backup.claim=snapshots")
    restored = members(*backup, "etcd.restore=muster-etcd-1.db")["spec"]
    assert changed(members()["spec"], restored) <= MAY_CHANGE


def test_pods_have_the_labels_that_their_statefulset_selects_by() -> None:
    spec = members()["spec"]
    selected = spec["selector"]["matchLabels"]
    assert selected["muster.dev/members"] == "3"
    assert selected.items() <= spec["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("runs", "given"),
    [("1", (THREE,)), ("3", (ONE,)), ("1", ())],
    ids=["more", "fewer", "the default of another chart"],
)
def test_helm_says_why_the_number_cannot_change(runs: str, given: tuple[str, ...]) -> None:
    wanted = "1" if ONE in given else "3"
    with running({"muster.dev/members": runs}) as release, pytest.raises(HelmFailed) as failed:
        release.rendered(*given)
    assert f"etcd.replicas is {wanted}, but muster-etcd runs {runs}:" in str(failed.value)
    assert f"--set etcd.replicas={runs}" in str(failed.value)
    assert "docs/etcd-members.md" in str(failed.value)


def test_helm_says_what_to_do_about_members_of_an_older_chart() -> None:
    older = {"app.kubernetes.io/name": "muster"}
    with running(older) as release, pytest.raises(HelmFailed) as failed:
        release.rendered(ONE)
    assert "kubectl -n muster-system delete statefulset muster-etcd" in str(failed.value)
    assert "--set etcd.replicas=1" in str(failed.value)


@pytest.mark.parametrize("number", ["1", "3"])
def test_the_number_that_runs_is_taken(number: str) -> None:
    with running({"muster.dev/members": number}) as release:
        assert release.rendered(f"etcd.replicas={number}")


def test_three_members_are_the_default_and_share_no_node() -> None:
    spec = members()["spec"]
    assert spec["replicas"] == 3
    pod = spec["template"]["spec"]
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    (spread,) = pod["topologySpreadConstraints"]
    assert spread["topologyKey"] == "topology.kubernetes.io/zone"
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
    labels = spec["template"]["metadata"]["labels"]
    for one in (apart, spread):
        assert one["labelSelector"]["matchLabels"].items() <= labels.items()


def test_members_may_share_a_node_where_asked() -> None:
    pod = members("etcd.spread=preferred")["spec"]["template"]["spec"]
    assert list(pod["affinity"]["podAntiAffinity"]) == [
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]


def test_one_member_runs_anywhere() -> None:
    pod = members(ONE)["spec"]["template"]["spec"]
    assert not {"affinity", "topologySpreadConstraints"} & {*pod}
