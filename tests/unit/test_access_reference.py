# SPDX-License-Identifier: Apache-2.0
"""Which Secret a pod gets as it is admitted: its own job's, unless it brings another."""

from __future__ import annotations

from typing import Any

import pytest

from controller.access.secret import RELEASE, JobName, job_of_pod
from controller.admission.decision import Verdict, decide
from controller.owner_kinds import owner_of
from controller.owners import pod_of, pod_seen
from injection.workloads import Manifest
from injection.yaml_tree import value_of
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import FLAGS, environ, loaded, manifest
from tests.support.injection.owners import pods_of
from tests.support.injection.patching import patched

UNSAID = {"etcd_secret", "etcd_secret_keys", "job"}
STORE = {"etcd_endpoints": "https://etcd:2379"}
SAID = environ({k: v for k, v in (FLAGS | STORE).items() if k not in UNSAID})


def admitted(pod: dict[str, Any], read: Any = None, release: str = "") -> tuple[Verdict, Any]:
    verdict = decide(pod, "team", owner_of(pod), read, SAID, access=True, release=release)
    made = patched(pod, verdict.patch)
    made["metadata"]["namespace"] = "team"
    return verdict, made


@pytest.mark.parametrize("name", sorted(CORPUS))
def test_every_pod_is_found_as_one_of_its_job_and_names_that_jobs_secret(name: str) -> None:
    """By its label, which the chart's NetworkPolicy goes by, too."""
    for one in Manifest(CORPUS[name]).objects:
        document = value_of(one.node)
        if document.get("kind") == "Pod":
            document["metadata"].setdefault("annotations", {})["muster.dev/job"] = "digits"
        for _, pod, read in pods_of(document):
            verdict, made = admitted(pod, read)
            assert verdict.injected, verdict.reason
            assert made["metadata"]["labels"]["muster.dev/job"]
            if "muster.dev/etcd-secret" in (pod["metadata"].get("annotations") or {}):
                continue
            job = job_of_pod(made)
            assert job is not None
            assert job.namespace == "team"
            (volume,) = [v for v in made["spec"]["volumes"] if v["name"] == "muster-etcd"]
            assert volume["secret"]["secretName"] == job.secret


def one_pod(**annotations: str) -> dict[str, Any]:
    ((_, pod, _),) = pods_of(loaded(manifest(command=["torchrun", "train.py"]))[0])
    notes = {f"muster.dev/{key.replace('_', '-')}": value for key, value in annotations.items()}
    pod["metadata"]["annotations"] = notes
    return pod


@pytest.mark.parametrize(
    "annotations",
    [
        {"etcd_secret": "mine", "etcd_secret_keys": "ca.crt,username,password"},
        {"etcd_endpoints": "mine:2379"},
    ],
)
def test_a_pod_that_brings_its_own_store_or_secret_is_given_none(
    annotations: dict[str, str],
) -> None:
    _, made = admitted(one_pod(**annotations))
    assert "muster-store" not in str(made)
    assert job_of_pod(made) is None


def test_no_pod_gets_access_to_another_namespaces_job() -> None:
    verdict, made = admitted(one_pod(namespace="other-team", job="train"))
    assert not verdict.injected
    assert "muster.dev/namespace" in verdict.reason
    assert job_of_pod(made) is None
    # Said by hand, it leads to the Secret of its own namespace, and to nothing else.
    forged: dict[str, Any] = {"metadata": {"namespace": "team", "annotations": {}, "labels": {}}}
    notes = forged["metadata"]["annotations"]
    notes |= {"muster.dev/job": "train", "muster.dev/namespace": "other-team"}
    notes["muster.dev/etcd-secret"] = JobName("other-team", "train").secret
    assert job_of_pod(forged) == JobName("team", "train")
    notes |= {"muster.dev/job": "a/b", "muster.dev/etcd-secret": JobName("team", "a/b").secret}
    assert job_of_pod(forged) is None


@pytest.mark.parametrize("length", [6, 64, 240])
@pytest.mark.parametrize("label", [None, "by-hand"])
def test_a_job_named_after_its_object_has_the_access_of_that_name(
    length: int, label: str | None
) -> None:
    """Whatever its label says, and whether or not it can have the name."""
    pod, name = one_pod(), "j" * length
    metadata = pod["metadata"]
    metadata["ownerReferences"][0]["name"] = f"{name}-{metadata['labels']['pod-template-hash']}"
    if label is not None:
        metadata["labels"]["muster.dev/job"] = label
    _, made = admitted(pod)
    assert len(made["metadata"]["labels"]["muster.dev/job"]) <= 63
    job = JobName("team", name)
    assert job_of_pod(made) == job
    (volume,) = [v for v in made["spec"]["volumes"] if v["name"] == "muster-etcd"]
    assert volume["secret"]["secretName"] == job.secret
    seen = {**made, "metadata": {**made["metadata"], "uid": "u", "name": "p"}}
    pods = {"u": pod_seen(seen)}
    assert pod_of(pods, job.keys, "p", "u") is not None


def test_a_pod_whose_object_has_a_name_that_no_job_can_have_does_not_wait_for_a_secret() -> None:
    pod = one_pod()
    pod["metadata"]["ownerReferences"][0]["name"] = "a/b"
    verdict, _ = admitted(pod)
    assert not verdict.injected
    assert "'a/b'" in verdict.reason
    pod["metadata"]["annotations"]["muster.dev/job"] = "train"
    assert admitted(pod)[0].injected


def test_a_pod_is_of_the_release_that_injected_it() -> None:
    _, made = admitted(one_pod(), release="ours")
    assert job_of_pod(made, "ours") == JobName("team", "digits")
    assert job_of_pod(made, "theirs") is None
    # A reference that a person has written may be to the Secret of any release.
    del made["metadata"]["annotations"][RELEASE]
    assert job_of_pod(made, "theirs") == JobName("team", "digits")
