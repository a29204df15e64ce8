# SPDX-License-Identifier: Apache-2.0
"""What ``muster inject`` says where it will not do what a user expects, in words that stay."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from console.inject import cautions
from rdzv.errors import ConfigError
from tests.support.injection.corpus import CORPUS, WITHOUT_PODS
from tests.support.injection.injecting import injected, loaded, pods
from tests.support.injection.plans import manifest

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
HOROVOD = cautions.HOROVOD
IGNORES_IT = {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [1, 143]}}


SENTENCES = [
    cautions.HOROVOD,
    cautions.MASTER,
    cautions.NO_POLICY,
    cautions.POLICY_COUNTS,
    cautions.SHARED_PROCESSES,
    cautions.OVERRULED,
    cautions.RESTARTS_LARGER,
    cautions.OPTIONS_MERGED,
]
PATTERNS = [re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(text))) for text in SENTENCES]


def said(text: str, /, **flags: str | None) -> list[str]:
    """The cautions, without the object that each begins with."""
    notes = [note.partition(": ")[2] for note in injected(text, **flags).notes]
    return [note for note in notes if any(pattern.fullmatch(note) for pattern in PATTERNS)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("elastic-pytorch-job", []),
        ("elastic-mpi-job", [HOROVOD]),
        ("elastic-training-job", [HOROVOD]),
    ],
)
def test_what_users_run_today_is_taken_and_what_will_not_work_is_said(
    name: str, expected: list[str]
) -> None:
    own = {"min_nodes": "1", "max_nodes": "3", "job": None}
    assert said(CORPUS[name], **own) == expected
    for pod in pods(loaded(injected(CORPUS[name], **own).text)):
        assert pod["initContainers"][0]["name"] == "muster"


@pytest.mark.parametrize("name", WITHOUT_PODS)
def test_what_has_no_pods_is_refused_and_each_object_named(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        injected(WITHOUT_PODS[name])
    kinds = [value["kind"] for value in loaded(WITHOUT_PODS[name])]
    lines = str(caught.value).splitlines()
    assert len(lines) == len(kinds)
    for line, kind in zip(lines, kinds, strict=True):
        assert line.startswith(f"{kind}/")
        assert line.endswith("left as it is: there is no pod template in it")


@pytest.mark.parametrize("name", ["mpi", "training-job"])
def test_horovod_is_not_started_through_muster(name: str) -> None:
    assert said(CORPUS[name]) == [HOROVOD], "once, though there are two templates"


def test_a_master_decides_over_the_job() -> None:
    (caution,) = said(CORPUS["anchors"])
    assert caution == (
        "spec.pytorchReplicaSpecs.Master: the whole job ends with its Master,"
        " wherever the others are: make it one more Worker"
    )


def of_jobs(kind: str, policy: Any) -> str:
    value = json.loads(manifest(kind, command=["torchrun"]))
    job = value["spec"]["jobTemplate"]["spec"] if kind == "CronJob" else value["spec"]
    if policy is not None:
        job["podFailurePolicy"] = policy
    return json.dumps(value)


@pytest.mark.parametrize(("kind", "path"), [("Job", "spec"), ("CronJob", "spec.jobTemplate.spec")])
def test_a_drained_pod_must_not_count_as_a_failure_of_its_job(kind: str, path: str) -> None:
    (caution,) = said(of_jobs(kind, None))
    assert caution == (
        f"{path} has no podFailurePolicy: each pod that was drained counts as a failure of the job,"
        " for it ends with 143: add one that ignores DisruptionTarget and exit code 143, with"
        " restartPolicy: Never"
    )
    assert said(of_jobs(kind, {"rules": [IGNORES_IT]})) == []


@pytest.mark.parametrize(
    "rules",
    [
        None,
        [None, "text"],
        [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}],
        [{**IGNORES_IT, "action": "Count"}],
        [{"action": "Ignore", "onExitCodes": {"operator": "NotIn", "values": [143]}}],
    ],
)
def test_a_policy_must_ignore_how_a_drained_container_ends(rules: Any) -> None:
    (caution,) = said(of_jobs("Job", {"rules": rules}))
    assert caution == (
        "spec.podFailurePolicy does not ignore exit code 143, with which a drained container ends:"
        " each counts as a failure of the job: add a rule that does"
    )


def test_a_policy_may_ignore_all_but_some_exit_codes() -> None:
    all_but = {"action": "Ignore", "onExitCodes": {"operator": "NotIn", "values": [1, 2]}}
    assert said(of_jobs("Job", {"rules": [all_but]})) == []


def test_kinds_that_are_no_jobs_need_no_policy() -> None:
    for kind in ("Deployment", "StatefulSet"):
        assert said(manifest(kind, command=["torchrun"])) == []


def test_a_secret_is_not_the_sidecars_alone_where_processes_are_shared() -> None:
    text = manifest(command=["torchrun"], pod={"shareProcessNamespace": True})
    tls: dict[str, str | None] = {"etcd_endpoints": "https://e:1", "etcd_secret": "etcd-client"}
    assert said(text, **tls) == [
        "spec.template.spec.shareProcessNamespace: a container that runs as root, or as the"
        " sidecar's user, can read the Secret etcd-client through the sidecar's /proc: leave it out"
    ]
    assert said(text) == []
    assert said(manifest(command=["torchrun"]), **tls) == []


def test_what_muster_run_overrules_is_said() -> None:
    env = [
        {"name": "PET_RDZV_ENDPOINT", "value": "head:29400"},
        {"name": "PET_MAX_RESTARTS", "value": "3"},
        {"name": "PET_RDZV_CONF", "value": "join_timeout=900"},
        {"name": "PET_NPROC_PER_NODE", "value": "2"},
    ]
    assert said(manifest(command=["torchrun"], env=env)) == [
        "container c sets PET_RDZV_ENDPOINT: muster-run overrules it",
        "container c sets PET_MAX_RESTARTS: the larger of it and what Muster says is what counts",
        "container c sets PET_RDZV_CONF: muster-run overrules the keys that Muster needs, and keeps"
        " the others",
    ]
    assert said(manifest(command=["torchrun"], env=env), wrap="false") == []


def test_the_page_has_every_sentence() -> None:
    page = " ".join(PAGE.read_text().split())
    for sentence in SENTENCES:
        words = sentence.replace("{status}", "143")
        assert re.sub(r"{(\w+)}", lambda found: found[1].upper(), words) in page
