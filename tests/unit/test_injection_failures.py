# SPDX-License-Identifier: Apache-2.0
"""Jobs that count evicted or drained pods as failures, and the manifests of docs/schedulers.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from controller.admission.decision import decide
from controller.owner_kinds import owner_of
from injection import failure_policy
from injection.failure_policy import policy_for
from injection.injection import Request, inject
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import (
    FLAGS,
    SENTENCES,
    environ,
    injected,
    lawful,
    loaded,
    manifest,
    of_sentences,
    refused,
    removed,
    settled,
    sidecars,
    variables,
)
from tests.support.injection.owners import at, pods_of
from tests.support.sources import ROOT


def said(text: str, /, **flags: str | None) -> list[str]:
    """The remarks on failures."""
    return [*of_sentences(text, {*vars(failure_policy)} & {*SENTENCES}, **flags)]


def of_jobs(kind: str = "Job", /, **beside: Any) -> str:
    value = json.loads(manifest(kind, command=["torchrun"], pod={"restartPolicy": "Never"}))
    job = value["spec"]["jobTemplate"]["spec"] if kind == "CronJob" else value["spec"]
    job.update(beside)
    return json.dumps(value)


def ignoring(operator: str, *values: int, action: str = "Ignore") -> Any:
    return {"action": action, "onExitCodes": {"operator": operator, "values": list(values)}}


def rules(*rules: Any) -> Any:
    return {"rules": list(rules)}


NO_POLICY = (
    " has no podFailurePolicy: each pod that was drained counts as a failure of the job,"
    " for it ends with 143: add one that ignores DisruptionTarget and exit code 143, with"
    " restartPolicy: Never, or let --pod-failure-policy add it"
)
COUNTS = (
    "spec.podFailurePolicy does not ignore exit code 143, with which a drained container ends:"
    " each counts as a failure of the job: add a rule that does"
)
DISRUPTED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
NOT_DISRUPTED = {"type": "DisruptionTarget", "status": "False"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((of_jobs(kind), []) for kind in ("Deployment", "StatefulSet")),
        (of_jobs("Job"), [f"spec{NO_POLICY}"]),
        (of_jobs("CronJob"), [f"spec.jobTemplate.spec{NO_POLICY}"]),
        (of_jobs(podFailurePolicy=rules(ignoring("In", 1, 143))), []),
        (of_jobs("CronJob", podFailurePolicy=rules(ignoring("In", 1, 143))), []),
        (of_jobs(podFailurePolicy=rules(ignoring("NotIn", 1, 2))), []),
        (of_jobs(podFailurePolicy={"rules": None}), [COUNTS]),
        (of_jobs(podFailurePolicy=rules(None, "text")), [COUNTS]),
        (of_jobs(podFailurePolicy=rules(DISRUPTED)), [COUNTS]),
        (of_jobs(podFailurePolicy=rules(ignoring("In", 1, 143, action="Count"))), [COUNTS]),
        (of_jobs(podFailurePolicy=rules(ignoring("NotIn", 143))), [COUNTS]),
        (of_jobs(backoffLimit=0, podFailurePolicy=rules(DISRUPTED)), [COUNTS]),
        (of_jobs(backoffLimit=0, podFailurePolicy=rules(ignoring("In", 143))), []),
        (of_jobs(backoffLimit=6), [f"spec{NO_POLICY}"]),
        # A JobSet that makes its Jobs again loses all pods at once, and goes on.
        (
            CORPUS["jobset"]
            .replace("completions: 2", "backoffLimit: 0")
            .replace("spec:\n", "spec:\n  failurePolicy: {maxRestarts: 3}\n", 1),
            [f"spec.replicatedJobs.workers.template.spec{NO_POLICY}"],
        ),
    ],
)
def test_a_job_that_counts_drained_pods_as_failures_is_said(text: str, expected: list[str]) -> None:
    assert said(text) == expected


FIRST = "spec.backoffLimit is 0, so the first pod that is evicted ends the whole job:"
OFFERED = "--pod-failure-policy adds a podFailurePolicy that ignores it"
ADD_RULE = "does not ignore DisruptionTarget, so the first pod that is evicted ends the whole job"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (of_jobs(backoffLimit=0), f"Job/digits: {FIRST} {OFFERED}"),
        (
            of_jobs("CronJob", backoffLimit=0),
            f"CronJob/digits: {FIRST.replace('spec', 'spec.jobTemplate.spec')} {OFFERED}",
        ),
        (
            CORPUS["jobset"].replace("completions: 2", "backoffLimit: 0"),
            f"JobSet/set: {FIRST.replace('spec', 'spec.replicatedJobs.workers.template.spec')}"
            f" {OFFERED}",
        ),
        (of_jobs(backoffLimit=0, podFailurePolicy=rules(ignoring("In", 1))), ADD_RULE),
        (
            of_jobs(
                backoffLimit=0,
                podFailurePolicy=rules({"action": "Ignore", "onPodConditions": [NOT_DISRUPTED]}),
            ),
            ADD_RULE,
        ),
    ],
)
def test_a_job_that_its_first_eviction_ends_is_refused(text: str, sentence: str) -> None:
    line, allow = refused(text)
    assert sentence in line
    assert "--allow-bypass injects all the same" in allow
    notes = inject(text, Request(FLAGS, {}, allow_bypass=True)).notes
    assert [note.level for note in notes if sentence in f"{note}"] == ["warning"]


IN_YAML = """\
apiVersion: batch/v1
kind: Job
metadata: {name: night}
spec:
    # not one failure
    backoffLimit: 0
    template:   # of two
        spec:
            restartPolicy: Never
            containers:
                - name: trainer
                  image: i
                  command: [torchrun, t.py]
"""


@pytest.mark.parametrize(
    ("text", "path", "container"),
    [
        (IN_YAML, "spec", "trainer"),
        (of_jobs(backoffLimit=0), "spec", "c"),
        (of_jobs("CronJob"), "spec.jobTemplate.spec", "c"),
        (CORPUS["jobset"], "spec.replicatedJobs.workers.template.spec", "c"),
        (CORPUS["runtime"], "spec.template.spec.replicatedJobs.node.template.spec", "node"),
        (CORPUS["block-scalars"].replace("\n", "\r\n"), "spec", "trainer"),
    ],
)
def test_a_policy_is_added_and_comes_out_again_to_the_byte(
    text: str, path: str, container: str
) -> None:
    result = lawful(text, pod_failure_policy="true")
    job = at(loaded(result)[0], path)
    assert job["podFailurePolicy"] == policy_for(container)
    # Kubernetes takes no policy without it; where nothing is said, it would be another one.
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    added = f"{path}.podFailurePolicy is added: pods that are evicted or drained are no failures"
    assert said(text, pod_failure_policy="true") == [added]
    # With a policy the Job makes a pod again only once the old one is gone.
    assert variables(sidecars(result)[0])["MUSTER_BELOW_MIN"] == "commit"
    without = inject(result, Request({"pod_failure_policy": "false"}, {}, allow_bypass=True))
    assert "podFailurePolicy" not in at(loaded(without.text)[0], path)
    assert removed(without.text) == text


def test_a_policy_that_hands_have_changed_is_theirs() -> None:
    made = injected(IN_YAML, pod_failure_policy="true").text
    by_hand = made.replace("values: [143]", "values: [143, 137]")
    assert by_hand != made
    assert "values: [143, 137]" in removed(by_hand)
    assert "values: [143, 137]" in settled(by_hand)
    assert settled(by_hand).count("podFailurePolicy:") == 1


def test_a_policy_cannot_be_added_to_what_has_no_job_or_restarts_its_containers() -> None:
    (line,) = refused(manifest(), pod_failure_policy="true")
    assert "--pod-failure-policy (MUSTER_POD_FAILURE_POLICY): there is no Job in it" in line
    text = of_jobs().replace('"Never"', '"OnFailure"')
    (line,) = refused(text, pod_failure_policy="true")
    assert "spec.template.spec.restartPolicy is OnFailure, and has to be Never: change it" in line


def test_a_policy_of_the_users_is_kept() -> None:
    text = of_jobs(podFailurePolicy=rules(DISRUPTED))
    assert said(text, pod_failure_policy="true") == [COUNTS]


def test_a_pod_of_such_a_job_is_injected_as_its_save_is_worth_more_than_none() -> None:
    """The webhook cannot change the Job, which ends with the first eviction in any case."""
    (_, pod, read), *_ = pods_of(json.loads(of_jobs(backoffLimit=0)))
    verdict = decide(pod, "team", owner_of(pod), read, environ(FLAGS))
    assert verdict.injected
    sentence = "spec.backoffLimit is 0: all save when a pod is evicted, and then the whole job ends"
    assert sentence in verdict.warnings
    assert not any("pod-failure-policy" in one for one in verdict.warnings)


EXAMPLES = sorted((ROOT / "examples" / "kubernetes" / "schedulers").glob("*.yaml"))
SCHEDULER_PAGE = (ROOT / "docs" / "schedulers.md").read_text(encoding="utf-8")
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
    assert f"(../examples/kubernetes/schedulers/{path.name})" in SCHEDULER_PAGE
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
    assert settled(done.text) == done.text
    assert removed(done.text) == text
    warnings = [note for note in done.notes if note.level != "note"]
    assert [note for note in warnings if ENDLESS not in note] == []
    assert bool(warnings) == (path.stem == "leaderworkerset")
