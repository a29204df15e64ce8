# SPDX-License-Identifier: Apache-2.0
"""The chart as helm renders it, for the oldest, a middle and the newest Kubernetes: no cluster."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from controller.config import ControllerConfig, defaults
from injection.settings import TABLE
from rdzv.settings import settings_of
from tests.support.chart import CHART, HelmFailed, command_of, helm, named, of_kind, pods, rendered
from tests.support.sources import ROOT

pytestmark = pytest.mark.timeout(1800)  # the first one may have to build helm

VERSIONS = ("1.29.0", "1.33.0", "1.36.0")
THREE = ("etcd.replicas=3", "etcd.tls.enabled=true")
EVICT = "injection.evict=true"
BACKUP = ("etcd.backup.enabled=true", "etcd.backup.claim=snapshots")
EXTERNAL = ("etcd.enabled=false", "externalEtcd.endpoints={https://a:2379,https://b:2379}")
MATRIX = {
    "as it is": (),
    "one member": ("etcd.replicas=1",),
    "grown": (*BACKUP, "etcd.restore=muster-etcd-1.db", "etcd.restoreToNewClaims=true"),
    "three members": (*THREE, *BACKUP),
    "restored": (*THREE, *BACKUP, "etcd.restore=muster-etcd-1.db", "etcd.nodeSelector.disk=ssd"),
    "own certificates": (*THREE, "etcd.tls.existingSecret=from-cert-manager"),
    "external": EXTERNAL,
    "external, followed": (*EXTERNAL, "jobs.etcdSecret=store"),
    "external, with access": (*EXTERNAL, "externalEtcd.accessSecret=etcd-admin"),
    "no authentication": ("etcd.auth.enabled=false",),
    "no TLS": ("etcd.auth.enabled=false", "etcd.tls.enabled=false"),
    "access by hand": ("rbac.access=false",),
    "without a controller": ("controller.enabled=false",),
    "to try": ("etcd.persistence.enabled=false", "networkPolicies.enabled=false"),
    "much of it": (
        *("priorityClasses.enabled=true", "rbac.owners=false", "nameOverride=elastic"),
        *("rbac.annotations=true", "jobs.desired=false", "jobs.page=false"),
        *("notices.taints={maintenance=soon:NoSchedule,spot}", "notices.cordon=false"),
        "notices.conditions={Terminating,AcceleratedHardwareReady=False}",
        *("imagePullSecrets[0].name=registry", "etcd.spread=preferred"),
        *("controller.priorityClassName=system-cluster-critical", "etcd.podLabels.team=ml"),
        *("etcd.extraEnv[0].name=GOGC", "etcd.extraEnv[0].value=off"),
        *("controller.extraVolumes[0].name=more", "controller.extraVolumes[0].secret.secretName=s"),
        *("imagePullSecrets[1]=another", "injection.defaults.min=1", "controller.replicas=1"),
        *("controller.apiServer.host=10.0.0.1", EVICT, "injection.failurePolicy=Fail"),
        *("etcd.nodeSelector.disk=ssd", "controller.tolerations[0].operator=Exists"),
        f"etcd.image.digest=sha256:{'0' * 64}",
    ),
}


@pytest.mark.parametrize("case", ["as it is", "much of it", "external, with access"])
def test_each_rendering_is_the_same_as_the_one_before(case: str) -> None:
    """As for Argo CD and Flux, which apply what differs."""
    assert rendered(*MATRIX[case]) == rendered(*MATRIX[case])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", MATRIX)
def test_each_kubernetes_takes_it_strictly(case: str, version: str) -> None:
    # Here, for it takes a second, and each process of the tests reads this file.
    import kubernetes_validate

    for one in rendered(*MATRIX[case], version=version):
        kubernetes_validate.validate(one, version.rpartition(".")[0], strict=True)


@pytest.mark.parametrize("case", MATRIX)
def test_helm_has_no_fault_to_find(case: str) -> None:
    given = [word for value in MATRIX[case] for word in ("--set", value)]
    said = helm("lint", "--strict", str(CHART), *given)
    assert "0 chart(s) failed" in said


@pytest.mark.parametrize("case", MATRIX)
def test_every_pod_is_restricted_and_only_the_controller_has_a_token(case: str) -> None:
    seen = list(pods(rendered(*MATRIX[case])))
    assert seen
    for name, spec in seen:
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert container["resources"]["limits"]["memory"], name
        volumes = {key for volume in spec.get("volumes", []) for key in volume} - {"name"}
        assert volumes <= {"emptyDir", "secret", "persistentVolumeClaim"}, name
        is_controller = name.startswith("Deployment/")
        assert spec["automountServiceAccountToken"] is is_controller, name


@pytest.mark.parametrize(("user", "written"), [("none", None), (1_000_660_000, 1_000_660_000)])
def test_users_are_left_to_the_cluster_or_are_the_one_given(
    user: str | int, written: int | None
) -> None:
    """helm reads a number of a values file as a float, and a large one is to be written out."""
    given = {"user": user, "injection": {"defaults": {"user": user}}}
    objects = rendered(*BACKUP, more=given)
    for name, spec in pods(objects):
        for key in ("runAsUser", "runAsGroup", "fsGroup"):
            assert spec["securityContext"].get(key) == written, (name, key)
    assert f"--default=user={user}" in command_of(objects)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("user=0", "/user"),
        ("etcd.replica=3", "'replica' not allowed"),
        ("contoller.enabled=true", "'contoller' not allowed"),
        ("injection.defaults.mni=2", "at '/injection/defaults': additional properties 'mni' not"),
        ("etcd.replicas=2", "/etcd/replicas"),
        ("etcd.image.digest=latest", "/etcd/image/digest"),
        ("etcd.enabled=false", "externalEtcd.endpoints is empty"),
        ("etcd.backup.enabled=true", "etcd.backup.claim is empty"),
        ("etcd.restore=muster-etcd-1.db", "etcd.restore is a file on etcd.backup.claim"),
        ("etcd.restore=../else", "/etcd/restore"),
        ("etcd.tls.enabled=false", "etcd.auth.enabled needs etcd.tls.enabled"),
        ("access.keepAfter=a day", "/access/keepAfter"),
        ("injection.failurePolicy=Never", "/injection/failurePolicy"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(value: str, said: str) -> None:
    with pytest.raises(HelmFailed, match=re.escape(said)):
        rendered(value)


def test_every_value_is_in_the_schema_and_on_the_page() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def check(value: Any, shape: Any, path: str) -> None:
        if isinstance(value, dict) and "properties" in shape:
            assert shape["additionalProperties"] is False, path
            assert set(value) <= set(shape["properties"]), path
            for key, below in value.items():
                check(below, shape["properties"][key], f"{path}.{key}")

    check(values, schema, "")
    making = [sys.executable, str(ROOT / "scripts" / "generate-chart-docs"), "--print"]
    made = subprocess.run(making, capture_output=True, text=True, check=True).stdout
    assert (CHART / "README.md").read_text() == made, "run scripts/generate-chart-docs"


def test_the_chart_takes_each_default_that_the_controller_takes() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    taken = set(schema["properties"]["injection"]["properties"]["defaults"]["properties"])
    # The chart gives the first two itself; the others are of a Job, or of a single pod.
    others = {"image", "etcd-endpoints", "pod-failure-policy", "horovod"}
    assert taken | others == {one.flag.removeprefix("--") for one in TABLE.values()}


def test_the_doctor_of_helm_test_is_told_of_three_members_in_one_word() -> None:
    pod = named(rendered(*THREE), "Pod", "muster-test")
    *words, endpoints = pod["spec"]["containers"][0]["command"]
    assert words == ["muster", "doctor", "helm-test"]
    assert endpoints.count(":2379") == 3


@pytest.mark.parametrize("case", ["as it is", "much of it", "external, with access"])
def test_the_controller_takes_the_command_that_the_chart_gives_it(case: str) -> None:
    objects = rendered(*MATRIX[case])
    program, command, *flags = command_of(objects)
    assert (program, command) == ("muster", "controller")
    known = {setting.flag: setting for setting in settings_of(ControllerConfig).values()}
    given = []
    for flag, _, value in (text.partition("=") for text in flags):
        if flag == "--default":
            given.append(value)
        else:
            known[flag].parse(value)
    if any(value.startswith("etcd-endpoints=https") for value in given):
        given += ["etcd-secret=muster-etcd", "etcd-secret-keys=ca.crt"]
    assert "MUSTER_ETCD_ENDPOINTS" in defaults(given)


def test_no_pod_is_kept_out_and_the_charts_own_are_not_asked_about() -> None:
    webhook = named(rendered(), "MutatingWebhookConfiguration", "muster-controller-muster-system")
    for one in webhook["webhooks"]:
        assert (one["failurePolicy"], one["timeoutSeconds"]) == ("Ignore", 5)
        assert one["rules"][0]["operations"] == ["CREATE"]
        (excluded,) = one["namespaceSelector"]["matchExpressions"]
        assert {"kube-system", "muster-system"} <= {*excluded["values"]}


def test_its_rights_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "controller.md").read_text()
    table = page.partition("\n## Rights\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([a-z, ]+) \| [^|]+ \| ([^|]+) \|", table, re.MULTILINE)
    verbs = {row[1]: row[0] for row in rows}
    granted = set()
    for kind, name in (
        ("Role", "muster-controller"),
        ("ClusterRole", "muster-controller-muster-system"),
        ("ClusterRole", "muster-controller-evict-muster-system"),
    ):
        for rule in named(rendered("rbac.annotations=true", EVICT), kind, name)["rules"]:
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
            granted.add(", ".join(rule["verbs"]))
    assert granted == set(verbs) - {"verbs"}
    fewer = named(
        rendered("rbac.owners=false", "rbac.events=false", "rbac.pods=false", "rbac.access=false"),
        "ClusterRole",
        "muster-controller-muster-system",
    )
    assert [rule["resources"] for rule in fewer["rules"]] == [
        ["mutatingwebhookconfigurations"],
        ["namespaces"],
    ]


def test_it_starts_where_it_could_not_trust_the_store_and_follows_no_job() -> None:
    def flags(*values: str) -> set[str]:
        return {text.partition("=")[0] for text in command_of(rendered(*values))}

    assert "--follow-jobs" not in flags(*EXTERNAL)
    assert {"--follow-jobs", "--etcd-cacert"} <= flags(*EXTERNAL, "jobs.etcdSecret=store")
    assert {"--follow-jobs", "--store-access"} <= flags(*THREE)


def test_members_of_three_know_each_other_by_the_names_that_clients_use() -> None:
    objects = rendered(*THREE)
    command = command_of(objects, "StatefulSet")
    flags = dict(text.removeprefix("--").partition("=")[::2] for text in command)
    hosts = [f"muster-etcd-{n}.muster-etcd.muster-system.svc" for n in range(3)]
    members = [f"muster-etcd-{n}=https://{host}:2380" for n, host in enumerate(hosts)]
    assert flags["initial-cluster"] == ",".join(members)
    clients = ",".join(f"https://{host}:2379" for host in hosts)
    assert f"--default=etcd-endpoints={clients}" in command_of(objects)


def test_no_key_is_made_where_the_controller_makes_it() -> None:
    """A tool that renders the chart without a cluster would make another one each time."""
    for one in of_kind(rendered(), "Secret"):
        assert not one.get("data"), one["metadata"]["name"]


def test_members_take_no_client_for_a_peer() -> None:
    """Clients have an authority of their own, whose key no pod but the controller is given."""
    objects = rendered(*THREE)
    command = command_of(objects, "StatefulSet")
    assert "--client-cert-auth" in command
    assert "--trusted-ca-file=/etc/etcd/clients/client-ca.crt" in command
    assert "--peer-trusted-ca-file=/etc/etcd/tls/ca.crt" in command
    for name, spec in pods(objects):
        for volume in spec.get("volumes", []):
            keys = [item["key"] for item in volume.get("secret", {}).get("items", [])]
            assert bool(keys) is ("secret" in volume), name
            assert not {"ca.key", "client-ca.key"} & {*keys}, name


def test_every_right_to_secrets_but_those_of_jobs_is_by_name() -> None:
    for values in MATRIX.values():
        if "controller.enabled=false" in values:
            continue
        for one in of_kind(rendered(*values), "Role"):
            assert all(rule["resourceNames"] for rule in one["rules"]), one["metadata"]["name"]
