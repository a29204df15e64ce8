# SPDX-License-Identifier: Apache-2.0
"""A pod that asks for its sidecar by a label gets what ``muster inject`` would have given it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.admission import decision
from controller.admission.decision import WITHOUT, Verdict, decide, difference, in_words_of_a_pod
from controller.cluster import paths
from controller.owner_kinds import owner_of
from injection.injection import Request, inject
from injection.settings import TABLE, annotation
from injection.workloads import Manifest
from injection.yaml_tree import value_of
from rdzv.errors import ConfigError
from rdzv.sentences import named
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import FLAGS, environ, loaded, manifest
from tests.support.injection.owners import at, defaulted, pods_of
from tests.support.injection.patching import patched

MAY_BE_THERE = {"labels", "annotations", "metadata", "env", "volumes", "volumeMounts", "lifecycle"}
"""A server leaves out what is written and empty, and its controllers add labels."""
MAY_BE_THERE |= {"beside/restartPolicy=ExitCode"}
"""It is in the owner, whom the webhook does not change."""


def admitted(
    pod: dict[str, Any], read: Any, flags: dict[str, str], *, access: bool = False
) -> tuple[Verdict, Any]:
    """The verdict, and the pod that the API server makes by it."""
    verdict = decide(pod, "default", owner_of(pod), read, environ(flags), access=access)
    return verdict, patched(pod, verdict.patch)


def essence(template: Any) -> Any:
    """What Kubernetes runs: defaults written out, and nothing that the owner adds."""
    made = defaulted(template)
    metadata = made["metadata"]
    wanted = {key: metadata.get(key) or {} for key in ("labels", "annotations")}
    annotations = wanted["annotations"]
    if record := annotations.get("muster.dev/added"):
        words = {*record.split()} - MAY_BE_THERE
        annotations = {**annotations, "muster.dev/added": sorted(words)}
    return annotations, made["spec"]


@pytest.mark.parametrize("name", sorted(CORPUS))
def test_a_labelled_pod_is_what_inject_would_have_made(name: str) -> None:
    text = CORPUS[name]
    try:
        injected = inject(text, Request(FLAGS, {}, ("*",), allow_bypass=True)).text
    except ConfigError as error:
        pytest.fail(f"the corpus has what cannot be injected: {error}")
    given, wanted = ([value_of(one.node) for one in Manifest(t).objects] for t in (text, injected))
    seen = 0
    for before, after in zip(given, wanted, strict=True):
        for path, pod, read in pods_of(before):
            verdict, made = admitted(pod, read, FLAGS)
            assert verdict.injected, verdict.reason
            assert essence(made) == essence(at(after, path))
            again, _ = admitted(made, read, FLAGS)
            assert again.patch == ()
            seen += 1
    assert seen


SETTINGS = st.fixed_dictionaries(
    {
        "min_nodes": st.integers(1, 4).map(str),
        "max_nodes": st.integers(2, 9).map(str),
        "etcd_endpoints": st.just("https://etcd.infra.svc:2379"),
        "etcd_secret": st.just("digits-etcd"),
        "image": st.just("example.org/muster-sidecar:0.1.0"),
    },
    optional={
        "unit": st.integers(1, 3).map(str),
        "slots": st.integers(1, 8).map(str),
        "gather_s": st.sampled_from(["5s", "2m"]),
        "topology": st.just("eu/{metadata.labels['topology.kubernetes.io/zone']}"),
        "relay_port": st.integers(1024, 60_000).map(str),
        "etcd_secret_keys": st.sampled_from(["ca.crt", "ca.crt,username,password"]),
    },
)


@given(SETTINGS, st.sampled_from(["Deployment", "StatefulSet", "Job"]), st.booleans())
def test_whatever_is_told_both_ways_are_one(
    flags: dict[str, str], kind: str, by_annotation: bool
) -> None:
    text = manifest(kind, command=["torchrun", "train.py"])
    before = json.loads(text)
    try:
        after = json.loads(inject(text, Request(flags, {})).text)
        refusal = None
    except ConfigError as error:
        said = [line.partition(": ")[2] for line in str(error).splitlines()]
        refusal = [in_words_of_a_pod(line) for line in said]
    (_, pod, read), *_ = pods_of(before)
    if by_annotation:
        own = {"muster.dev/" + TABLE[n].flag.removeprefix("--"): t for n, t in flags.items()}
        pod["metadata"]["annotations"] = own
    verdict, made = admitted(pod, read, {} if by_annotation else flags)
    if refusal is not None:
        assert [warning.removeprefix(WITHOUT) for warning in verdict.warnings] == refusal
        assert made == pod
        return
    _, spec = essence(made)
    assert spec == essence(at(after, "spec.template"))[1]


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        ({}, None),
        (manifest("Deployment", command=["torchrun"]), "digits"),
        (manifest("CronJob", command=["torchrun"]), "digits-29"),
        (CORPUS["jobset"], "set"),
        (CORPUS["volcano"], "volcano"),
        (CORPUS["elastic-pytorch-job"], "elastic-example-imagenet"),
    ],
)
def test_the_job_is_the_object_that_lives_as_long(pod: Any, expected: str | None) -> None:
    if not pod:
        assert owner_of({"metadata": {}}) is None
        return
    (_, made, read), *_ = pods_of(loaded(pod)[0])
    flags = {name: text for name, text in FLAGS.items() if name != "job"}
    _, after = admitted(made, read, flags)
    (sidecar,) = [one for one in after["spec"]["initContainers"] if one["name"] == "muster"]
    assert {"name": "MUSTER_JOB", "value": expected} in sidecar["env"]


@pytest.mark.parametrize(
    ("pod", "kind"),
    [
        (manifest("Deployment", command=["torchrun"]), "Deployment.apps"),
        (manifest("StatefulSet", command=["torchrun"]), "StatefulSet.apps"),
        (manifest("Job", command=["torchrun"]), "Job.batch"),
        (CORPUS["volcano"], "Job.batch.volcano.sh"),
        (CORPUS["jobset"], "JobSet.jobset.x-k8s.io"),
        (CORPUS["elastic-mpi"], "MPIJob.kubeflow.org"),
    ],
)
@pytest.mark.parametrize("access", [False, True])
def test_a_job_that_nobody_has_named_says_of_which_kind_it_is(
    pod: str, kind: str, access: bool
) -> None:
    unnamed = {name: text for name, text in FLAGS.items() if name != "job"}
    unnamed["etcd_endpoints"] = "https://e:1" if access else "e:1"
    for _, made, read in pods_of(loaded(pod)[0]):
        annotated = copy.deepcopy(made)
        annotated["metadata"].setdefault("annotations", {})["muster.dev/job"] = "named"
        for asking, flags, named_by_a_person in (
            (made, unnamed, False),
            (made, {**unnamed, "job": "named"}, True),
            (annotated, unnamed, True),
        ):
            verdict, after = admitted(asking, read, flags, access=access)
            assert verdict.injected, verdict.reason
            env = {v["name"]: v.get("value") for v in after["spec"]["initContainers"][0]["env"]}
            assert env.get("MUSTER_OWNER") == (None if named_by_a_person else kind)
            kept = after["metadata"]["annotations"].get("muster.dev/job")
            assert kept == ("named" if named_by_a_person else None)
            assert admitted(after, read, flags, access=access)[0].patch == ()


def test_min_and_max_come_from_what_the_pod_shows_where_its_owner_cannot_be_read() -> None:
    (_, pod, _), *_ = pods_of(loaded(CORPUS["elastic-pytorch-job"])[0])
    (container,) = pod["spec"]["containers"]
    container["env"].append({"name": "PET_NNODES", "value": "3:7"})
    flags = {k: v for k, v in FLAGS.items() if k not in ("min_nodes", "max_nodes")}
    _, made = admitted(pod, None, flags)
    env = {v["name"]: v.get("value") for v in made["spec"]["initContainers"][0]["env"]}
    assert (env["MUSTER_MIN"], env["MUSTER_MAX"]) == ("3", "7")


def test_what_only_the_owner_can_say_is_asked_for_and_not_claimed_to_be_added() -> None:
    made = loaded(CORPUS["elastic-mpi"])[0]
    worker = made["spec"]["mpiReplicaSpecs"]["Worker"]
    seen = {}
    for policy in (None, "Never", "ExitCode"):
        worker.pop("restartPolicy", None)
        if policy is not None:
            worker["restartPolicy"] = policy
        pods = {path: (pod, read) for path, pod, read in pods_of(made)}
        (path,) = [path for path in pods if "Worker" in path]
        verdict, _ = admitted(*pods[path], FLAGS)
        assert verdict.injected
        told = [one for one in verdict.warnings if "restartPolicy" in one]
        seen[policy] = [one.partition("restartPolicy ")[2].partition(":")[0] for one in told]
    assert seen == {None: ["is missing"], "Never": ["is Never"], "ExitCode": []}


RESTRICTED = {"runAsNonRoot": True, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize(
    ("users", "operators", "expected"),
    [
        (RESTRICTED, None, RESTRICTED),
        (RESTRICTED, {"runAsUser": 7}, {"runAsUser": 7}),
        (None, None, None),
    ],
)
def test_the_operators_own_container_is_as_restricted_as_the_users(
    users: Any, operators: Any, expected: Any
) -> None:
    pods = pods_of(loaded(CORPUS["elastic-mpi"])[0])
    ((pod, read),) = [(pod, read) for path, pod, read in pods if "Launcher" in path]
    delivery = {"name": "kubectl-delivery", "image": "example.org/kubectl-delivery"}
    other = {"name": "users-own", "image": "example.org/fetch"}
    if operators is not None:
        delivery["securityContext"] = operators
    if users is not None:
        pod["spec"]["containers"][0]["securityContext"] = users
    pod["spec"]["initContainers"] = [delivery, other]
    verdict, made = admitted(pod, read, FLAGS)
    assert verdict.injected, verdict.reason
    contexts = {one["name"]: one.get("securityContext") for one in made["spec"]["initContainers"]}
    assert contexts["kubectl-delivery"] == expected
    assert contexts["users-own"] is None


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("batch/v1", "../../../../api/v1/namespaces/muster-system/secrets/muster-controller"),
        ("batch/v1", "../../other/jobs/theirs"),
        ("batch/v1", "a?watch=1"),
        ("batch/v1", ""),
        ("batch/..", "a"),
        ("batch/v1/../..", "a"),
    ],
)
def test_a_pod_that_names_no_name_as_its_owner_has_nothing_read(version: str, name: str) -> None:
    assert paths.owner(version, "Job", "team", name) is None
    assert paths.owner("batch/v1", "Job", "team", "a.b-1")


def test_what_cannot_be_injected_is_admitted_with_the_reason() -> None:
    (_, pod, read), *_ = pods_of(json.loads(manifest(command=["deepspeed", "train.py"])))
    for flags in (FLAGS, {}):
        verdict, made = admitted(pod, read, flags)
        assert made == pod
        assert verdict.warnings
        assert not any("MUSTER_" in warning for warning in verdict.warnings)
        response = json.loads(decision.answer_to("u1", verdict))["response"]
        assert response["allowed"] is True
        assert "patch" not in response
        assert all(one.startswith("muster: " + WITHOUT) for one in response["warnings"])
        assert all(len(one) <= decision.WARNING_LENGTH for one in response["warnings"])


@pytest.mark.parametrize("access", [False, True])
def test_faults_name_annotations_and_each_only_once(access: bool) -> None:
    """No flag was typed, and a Secret is not missing but follows from the job's name."""
    pod = defaulted(loaded(CORPUS["plain-pod"])[0])
    defaults = environ({**FLAGS, "etcd_endpoints": "https://e:1"})
    del defaults["MUSTER_JOB"]
    verdict = decide(pod, "team", None, None, defaults, access=access)
    missing, *others = verdict.warnings
    assert missing.startswith(WITHOUT + "the annotation muster.dev/job is missing")
    assert not any("--" in one for one in verdict.warnings)
    assert [("muster.dev/etcd-secret," in one) for one in others] == ([] if access else [True])


def test_every_flag_in_a_sentence_becomes_its_annotation() -> None:
    for name, setting in TABLE.items():
        said = in_words_of_a_pod(f"give {setting.flag}, {named(setting.flag)} or --no-wrap")
        text = annotation(name)
        assert said == f'give {text}, the annotation {text} or muster.dev/wrap: "false"'


def test_mirror_of_a_static_pod_is_left_alone() -> None:
    pod = defaulted(loaded(CORPUS["plain-pod"])[0])
    pod["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "abc"}
    verdict, made = admitted(pod, None, FLAGS)
    assert made == pod
    assert "static pod" in verdict.reason


NO_POD = b'{"request": {"uid": "u", "object": {}}}'
NESTED = b'{"request": ' + b"[" * 100_000


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", NO_POD, NESTED], ids=len)
def test_what_is_no_review_is_refused(body: bytes) -> None:
    with pytest.raises(ConfigError, match="no AdmissionReview"):
        decision.read_review(body)
    if body != NO_POD:
        with pytest.raises(ConfigError, match="no AdmissionReview"):
            decision.uid_of(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab/~", max_size=2),
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(st.text("ab/~", max_size=2), below, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text("ab/~"), JSON), st.dictionaries(st.text("ab/~"), JSON))
def test_a_patch_makes_the_one_the_other(before: Any, after: Any) -> None:
    assert patched(before, list(difference(before, after))) == after
