# SPDX-License-Identifier: Apache-2.0
"""Jobs that count evicted or drained pods as failures, and the manifests of docs/schedulers.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controller.admission.decision import decide
from controller.owner_kinds import owner_of
from injection import failure_policy
from injection.failure_policy import policy_for
from injection.injection import Request, inject
from injection.workloads import Workload
from injection.yaml_tree import node_of
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


def takes(text: str) -> None:
    """Raise where Kubernetes' own schema refuses a pod template, or a whole Job."""
    import kubernetes_validate

    for one in loaded(text):
        parts = Workload(node_of(one)).templates()
        shown = [{"template": at(one, part.path)} for part in parts]
        about = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "n"}}
        whole = [one] if one["apiVersion"] == "batch/v1" else []
        for each in [*whole, *({**about, **template} for template in shown)]:
            kubernetes_validate.validate(each, "1.36", strict=True)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_inject_takes_a_manifest_whole(path: Path) -> None:
    assert f"(../examples/kubernetes/schedulers/{path.name})" in SCHEDULER_PAGE
    text = path.read_text(encoding="utf-8")
    done = inject(text, REQUEST)
    takes(text)
    takes(done.text)
    (sidecar,) = sidecars(done.text)
    said = variables(sidecar)
    assert (said["MUSTER_MIN"], said["MUSTER_MAX"], said["MUSTER_SLOTS"]) == ("2", "4", "2")
    assert settled(done.text) == done.text
    assert removed(done.text) == text
    warnings = [note for note in done.notes if note.level != "note"]
    assert [note for note in warnings if ENDLESS not in note] == []
    assert bool(warnings) == (path.stem == "leaderworkerset")
