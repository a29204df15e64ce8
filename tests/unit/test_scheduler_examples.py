# SPDX-License-Identifier: Apache-2.0
"""The manifests of docs/schedulers.md: the APIs have their fields, and inject takes them whole."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from injection.injection import Request, inject, take_out
from tests.support.injection.injecting import FLAGS, again, loaded, sidecars, variables

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "kubernetes" / "schedulers").glob("*.yaml"))
PAGE = (ROOT / "docs" / "schedulers.md").read_text(encoding="utf-8")
REQUEST = Request({name: FLAGS[name] for name in ("etcd_endpoints", "image")}, {})
ENDLESS = "its containers are started again also when training has ended well"


class Core(Enum):
    """Parts that Kubernetes' own schema describes: how an object is made of each."""

    JOB = ("batch/v1", "Job", "spec")
    PODS = ("v1", "PodTemplate", "template")
    OBJECT = ("batch/v1", "Job", "")


_JOB_TEMPLATE = {"metadata": dict, "spec": Core.JOB}
_RESOURCE = {"name": str, "nominalQuota": (int, str)}
_FLAVOR = {"name": str, "resources": [_RESOURCE]}
_POLICY = {
    "event": {"PodFailed", "PodEvicted", "PodPending", "TaskCompleted", "Unknown", "*"},
    "action": {"AbortJob", "RestartJob", "RestartTask", "RestartPod", "CompleteJob"},
}
_NODE = {"name": str, "replicas": int, "template": _JOB_TEMPLATE}

FIELDS: dict[str, Any] = {
    "kueue.x-k8s.io/v1beta2 ResourceFlavor": None,
    "kueue.x-k8s.io/v1beta2 ClusterQueue": {
        "namespaceSelector": dict,
        "preemption": {
            "withinClusterQueue": {"Never", "LowerPriority", "LowerOrNewerEqualPriority"}
        },
        "resourceGroups": [{"coveredResources": [str], "flavors": [_FLAVOR]}],
    },
    "kueue.x-k8s.io/v1beta2 LocalQueue": {"clusterQueue": str},
    "batch/v1 Job": Core.OBJECT,
    "jobset.x-k8s.io/v1alpha2 JobSet": {
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": [_NODE],
    },
    "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet": {
        "replicas": int,
        "leaderWorkerTemplate": {
            "size": int,
            "restartPolicy": {"RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"},
            "leaderTemplate": Core.PODS,
            "workerTemplate": Core.PODS,
        },
    },
    "batch.volcano.sh/v1alpha1 Job": {
        "schedulerName": str,
        "queue": str,
        "minAvailable": int,
        "tasks": [{"name": str, "replicas": int, "policies": [_POLICY], "template": Core.PODS}],
    },
    "trainer.kubeflow.org/v1alpha1 TrainingRuntime": {
        "mlPolicy": {"numNodes": int, "torch": dict},
        "template": {"spec": {"replicatedJobs": [_NODE]}},
    },
    "trainer.kubeflow.org/v1alpha1 TrainJob": {
        "runtimeRef": {"kind": {"TrainingRuntime", "ClusterTrainingRuntime"}, "name": str},
        "trainer": {"numNodes": int},
    },
}
"""The fields that the manifests use of each API, as its reference has them."""


def faults(value: Any, shape: Any, path: str) -> Iterator[str]:
    """What of a value the API does not have; raises where Kubernetes' own schema refuses it."""
    match shape:
        case Core():
            _taken_by_kubernetes(value, shape)
        case dict():
            for key, below in value.items():
                if key not in shape:
                    yield f"{path}.{key} is unknown"
                else:
                    yield from faults(below, shape[key], f"{path}.{key}")
        case [item]:
            for number, below in enumerate(value):
                yield from faults(below, item, f"{path}[{number}]")
        case set():
            if value not in shape:
                yield f"{path} is {value}"
        case _:
            if not isinstance(value, shape):
                yield f"{path} is {value!r}"


def _taken_by_kubernetes(value: Any, part: Core) -> None:
    import kubernetes_validate

    version, kind, key = part.value
    whole = {"apiVersion": version, "kind": kind, "metadata": {"name": "n"}, key: value}
    kubernetes_validate.validate(whole if key else value, "1.36", strict=True)


def faults_of(text: str) -> list[str]:
    found: list[str] = []
    for one in loaded(text):
        kind = f"{one['apiVersion']} {one['kind']}"
        shape = FIELDS[kind]
        if isinstance(shape, Core):
            found += faults(one, shape, kind)
        else:
            assert {*one} <= {"apiVersion", "kind", "metadata", "spec"}
            found += faults(one.get("spec", {}), shape or {}, kind)
    return found


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_apis_have_each_field_of_a_manifest(path: Path) -> None:
    assert f"(../examples/kubernetes/schedulers/{path.name})" in PAGE
    text = path.read_text(encoding="utf-8")
    assert faults_of(text) == []
    assert faults_of(inject(text, REQUEST).text) == []


def test_a_field_that_an_api_lacks_is_found() -> None:
    import kubernetes_validate

    texts = {path.stem: path.read_text(encoding="utf-8") for path in EXAMPLES}
    assert faults_of(texts["volcano"].replace("minAvailable", "minAvailible")) != []
    assert faults_of(texts["leaderworkerset"].replace("Policy: None", "Policy: Never")) != []
    assert faults_of(texts["trainer"].replace("numNodes: 4", "numNodes: four")) != []
    with pytest.raises(kubernetes_validate.ValidationError):
        faults_of(texts["jobset"].replace("backoffLimit", "backOffLimit"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_inject_takes_a_manifest_whole(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    done = inject(text, REQUEST)
    (sidecar,) = sidecars(done.text)
    said = variables(sidecar)
    assert (said["MUSTER_MIN"], said["MUSTER_MAX"], said["MUSTER_SLOTS"]) == ("2", "4", "2")
    assert again(done.text) == done.text
    assert take_out(done.text).text == text
    warnings = [note for note in done.notes if note.level != "note"]
    assert [note for note in warnings if ENDLESS not in note] == []
    assert bool(warnings) == (path.stem == "leaderworkerset")
