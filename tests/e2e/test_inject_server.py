# SPDX-License-Identifier: Apache-2.0
"""What ``muster inject`` makes, before a real API server: it takes all of it, strictly."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from injection.injection import Request, inject
from tests.support.cluster.lab import ROOT, KubectlFailed, Kubelab, Object
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import removed
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.kubelab]
pytestmark += [pytest.mark.timeout(1800)]  # the first test may have to make the cluster

FLAGS = {
    "job": "digits",
    "min_nodes": "2",
    "max_nodes": "4",
    "etcd_endpoints": "https://etcd:2379",
    "etcd_secret": "etcd-client",
    "etcd_secret_keys": "ca.crt,tls.crt,tls.key,username,password",
    "image": "example.org/muster-sidecar:0.1.0",
}
EXAMPLES = ["deployment", "statefulset", "indexed-job"]
OF_THE_CORPUS = ["plain-pod", "commented-deployment", "block-scalars", "flow-only", "json", "hold"]
OF_THE_CORPUS += ["list", "many-documents", "sorted-by-a-server", "cron", "windows-lines"]


@pytest.fixture
def namespace(kubelab: Kubelab) -> Iterator[str]:
    name = f"inject-{uuid.uuid4().hex[:8]}"
    kubelab.make_namespace(name)
    yield name
    kubelab.kubectl("delete", "namespace", name, "--wait=false")


def example(name: str) -> str:
    return (ROOT / "examples" / "kubernetes" / f"{name}.yaml").read_text(encoding="utf-8")


def injected(text: str, **flags: str) -> str:
    return inject(text, Request({**FLAGS, **flags}, {})).text


def tried(kubelab: Kubelab, namespace: str, text: str) -> list[Any]:
    """The objects as the server would keep them."""
    arguments = ("apply", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-")
    answer = json.loads(kubelab.kubectl("-n", namespace, *arguments, stdin=text))
    found: list[Any] = answer["items"] if answer["kind"] == "List" else [answer]
    return found


def pod_spec(thing: Any) -> Any:
    """The pod spec in an object."""
    if "containers" in thing:
        return thing
    inner = (pod_spec(value) for value in thing.values() if isinstance(value, dict))
    return next((found for found in inner if found is not None), None)


def test_a_server_takes_the_examples(kubelab: Kubelab, namespace: str) -> None:
    for name in EXAMPLES:
        for wrap in ("true", "false"):
            first, *_ = tried(kubelab, namespace, injected(example(name), wrap=wrap))
            sidecar = pod_spec(first)["initContainers"][0]
            assert (sidecar["name"], sidecar["restartPolicy"]) == ("muster", "Always")


def test_a_server_takes_what_people_write(kubelab: Kubelab, namespace: str) -> None:
    for name in OF_THE_CORPUS:
        # kubectl knows no %YAML 1.2, and wants namespaces to agree.
        text = CORPUS[name].replace(", namespace: research", "").removeprefix("%YAML 1.2\n")
        for thing in tried(kubelab, namespace, injected(text)):
            if (pod := pod_spec(thing)) is not None:
                assert pod["initContainers"][0]["name"] == "muster"


DIGITS = ("deployment", "digits")
CONFLICT = "the object has been modified"


def is_settled(deployment: Object) -> bool:
    """Whether its controller has seen the newest of it, and has said that it is there."""
    status = deployment.get("status", {})
    told = {one["type"]: one["status"] for one in status.get("conditions", [])}
    seen = status.get("observedGeneration") == deployment["metadata"]["generation"]
    return seen and told.get("Available") == "True"


def live_and_tried(
    kubelab: Kubelab, namespace: str, *changes: Callable[[str], str]
) -> list[Object]:
    """The spec as it is live, and as the server would keep it after each of some changes.

    All begin anew where the deployment's controller has written to it meanwhile.
    """
    deadline_s = time.monotonic() + 60
    while True:
        live = kubelab.kubectl("-n", namespace, "get", *DIGITS, "-o", "yaml")
        spec = kubelab.get(namespace, *DIGITS)["spec"]
        try:
            texts = [change(live) for change in changes]
            return [spec, *(tried(kubelab, namespace, text)[0]["spec"] for text in texts)]
        except KubectlFailed as error:
            if CONFLICT not in str(error) or time.monotonic() > deadline_s:
                raise


def test_what_is_live_can_be_injected_again_and_put_back(kubelab: Kubelab, namespace: str) -> None:
    before = example("deployment").replace("replicas: 3", "replicas: 0").partition("---")[0]
    plain = tried(kubelab, namespace, before)[0]["spec"]
    kubelab.apply(namespace, injected(before))
    wait_until(
        lambda: is_settled(kubelab.get(namespace, *DIGITS)), 120, "the deployment is settled"
    )
    spec, again, back, larger = live_and_tried(
        kubelab,
        namespace,
        lambda live: inject(live, Request({}, {})).text,
        removed,
        lambda live: inject(live, Request({"max_nodes": "9"}, {})).text,
    )
    assert again == spec
    assert back == plain
    changed = larger["template"]
    was = json.dumps(spec["template"])
    for old in ('"MUSTER_MAX", "value": "4"', '"muster.dev/max": "4"'):
        assert old in was
        was = was.replace(old, old.replace("4", "9"))
    assert changed == json.loads(was)


RESTRICTED = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
UNPRIVILEGED = {
    "allowPrivilegeEscalation": False,
    "runAsUser": 1000,
    "capabilities": {"drop": ["ALL"]},
}
LIMITS = {"limits": {"cpu": 1, "memory": "1Gi"}}


@pytest.mark.parametrize("asked", [{}, {"requests": {"cpu": "1"}}, LIMITS])
def test_a_restricted_namespace_takes_it_and_the_server_sees_the_class_that_was_there(
    kubelab: Kubelab, namespace: str, asked: dict[str, Any]
) -> None:
    level = "pod-security.kubernetes.io/enforce=restricted"
    kubelab.kubectl("label", "namespace", namespace, level)
    container = {"name": "c", "image": "i", "command": ["torchrun", "t.py"], "resources": asked}
    container["securityContext"] = UNPRIVILEGED
    spec = {"securityContext": RESTRICTED, "containers": [container]}
    text = json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
    (before,) = tried(kubelab, namespace, text)
    (after,) = tried(kubelab, namespace, injected(text))
    assert after["status"]["qosClass"] == before["status"]["qosClass"]


def test_kubeflows_own_schema_keeps_all_of_it(kubelab: Kubelab, namespace: str) -> None:
    if "pytorchjobs.kubeflow.org" not in kubelab.kubectl("get", "crd", "-o", "name"):
        kubelab.command("operator", timeout_s=1500)
    (kept,) = tried(kubelab, namespace, injected(example("pytorchjob")))
    template = kept["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    assert template["spec"]["initContainers"][0]["restartPolicy"] == "Always"
    assert template["metadata"]["annotations"]["muster.dev/etcd-secret"] == "etcd-client"
    for name in ("anchors", "mpi"):
        (kept,) = tried(kubelab, namespace, injected(CORPUS[name]))
        assert json.dumps(kept).count('"restartPolicy": "Always"') == 2
