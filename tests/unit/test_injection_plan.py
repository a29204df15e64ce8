# SPDX-License-Identifier: Apache-2.0
"""What the sidecar of a template is told, and what is said about the rest."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config import Config
from agent.rundir.files import torch_environment
from injection import facts
from injection.injection import Request, inject
from injection.kinds import job_label
from rdzv.errors import ConfigError
from rdzv.settings import load, settings_of
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import (
    FLAGS,
    again,
    injected,
    lawful,
    loaded,
    manifest,
    pods,
    settled,
    sidecars,
    told,
    variables,
)


def pod_of(text: str, /, **flags: str | None) -> Any:
    return pods(loaded(injected(text, **flags).text))[0]


def field(path: str) -> dict[str, Any]:
    return {"fieldRef": {"fieldPath": path}}


def label(name: str) -> dict[str, Any]:
    return field(f"metadata.labels['{name}']")


# --- what it is told ---

TORCHRUN = "torchrun --nproc-per-node=$GPUS t.py"
TWO_GPUS = {"limits": {"nvidia.com/gpu": 2}}
TWO_DASHED = {"limits": {"nvidia.com/mig-1g.5gb": "2"}}
ON_HOST = manifest(command=["a"], pod={"hostNetwork": True})
OWN_ENV = {"env": [{"name": "PET_NPROC_PER_NODE", "value": "3"}]}


SLOTS: list[tuple[dict[str, Any], str]] = [
    ({}, "1"),
    ({"command": ["torchrun", "--nproc-per-node=4", "t.py"]}, "4"),
    ({"command": ["torchrun"], "args": ["--nproc_per_node", "4"]}, "4"),
    ({"command": ["sh", "-c", "exec torchrun --nproc-per-node '2' t.py"]}, "2"),
    (OWN_ENV, "3"),
    ({"resources": {"limits": {"nvidia.com/gpu": 8}}}, "8"),
    ({"resources": TWO_DASHED}, "2"),
    ({"resources": {"limits": {"amd.com/gpu": "4", "cpu": 9}}}, "4"),
    ({"command": ["torchrun", "--nproc-per-node=gpu"], "resources": TWO_GPUS}, "2"),
    ({"command": ["sh", "-c", TORCHRUN], "resources": TWO_GPUS}, "2"),
]
NO_JOB: dict[str, str | None] = {"job": None}
UID = label("batch.kubernetes.io/controller-uid")
NAMED = {
    "MUSTER_JOB": "digits",
    "MUSTER_NAMESPACE": field("metadata.namespace"),
    "MUSTER_MEMBER": field("metadata.name"),
    "MUSTER_POD_UID": field("metadata.uid"),
    "MUSTER_ADDRESS": field("status.podIP"),
    "MUSTER_NODE": field("spec.nodeName"),
}
SET_INDEX = label("apps.kubernetes.io/pod-index")
JOB_INDEX = label("batch.kubernetes.io/job-completion-index")
JOB_NAME = label("batch.kubernetes.io/job-name")
JOBSET_NAME = label("jobset.sigs.k8s.io/jobset-name")
NO_SIZE: dict[str, str | None] = {"min_nodes": None, "max_nodes": None}
UNSET = ("FIRST_CALL", "LAST_CALL", "TOPOLOGY", "SIZES", "UNIT", "ON_CUT", "STUCK_AFTER", "WARM")
STUCK = {"stuck_after_s": "2m", "when_stuck": "reform"}
SIZES = {"max_nodes": "8", "sizes": "2,4,8", "gather_s": "30s", "on_cut": "hold"}


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        *((manifest(**container), {}, {"MUSTER_SLOTS": slots}) for container, slots in SLOTS),
        (CORPUS["anchors"], {}, {"MUSTER_MIN": "2", "MUSTER_MAX": "4"}),
        (CORPUS["anchors"], NO_SIZE, {"MUSTER_MIN": "1", "MUSTER_MAX": "4"}),
        (manifest(), NO_JOB, NAMED),
        (manifest(), {"namespace": "other"}, {"MUSTER_NAMESPACE": "other"}),
        (manifest("Job"), {}, {"MUSTER_JOB_UID": UID, "MUSTER_INDEX": JOB_INDEX}),
        (manifest("CronJob"), {}, {"MUSTER_JOB_UID": UID, "MUSTER_JOB": "digits"}),
        (manifest("CronJob"), NO_JOB, {"MUSTER_JOB": JOB_NAME}),
        (CORPUS["runtime"], NO_JOB, {"MUSTER_JOB": JOBSET_NAME}),
        (CORPUS["runtime"], {}, {"MUSTER_JOB": "digits"}),
        (manifest("StatefulSet"), {}, {"MUSTER_JOB_UID": None, "MUSTER_INDEX": SET_INDEX}),
        (manifest("Deployment"), {}, {"MUSTER_JOB_UID": None, "MUSTER_INDEX": None}),
        (manifest("ReplicaSet"), {}, {"MUSTER_JOB_UID": None}),
        (CORPUS["mpi"], {}, {"MUSTER_ROLE": "launcher", "MUSTER_SLOTS": "2"}),
        (manifest(), {}, {f"MUSTER_{name}": None for name in UNSET}),
        (manifest(), STUCK, {"MUSTER_STUCK_AFTER": "120s", "MUSTER_WHEN_STUCK": "reform"}),
        (
            manifest(),
            SIZES,
            {"MUSTER_SIZES": "2,4,8", "MUSTER_GATHER": "30s", "MUSTER_ON_CUT": "hold"},
        ),
        (
            manifest(),
            {"first_call_s": "3s", "last_call_s": "0"},
            {"MUSTER_FIRST_CALL": "3s", "MUSTER_LAST_CALL": "0s"},
        ),
        (manifest(), {"topology": "b1/r2"}, {"MUSTER_TOPOLOGY": "b1/r2"}),
        (CORPUS["own-rendezvous"], {"below_min": "hold"}, {"MUSTER_BELOW_MIN": None}),
        (CORPUS["commented-deployment"], {"below_min": "commit"}, {"MUSTER_BELOW_MIN": "commit"}),
        (ON_HOST, {"http_port": "12345"}, {"MUSTER_HTTP_PORT": "12345"}),
    ],
)
def test_what_the_sidecar_is_told(
    text: str, flags: dict[str, str | None], expected: dict[str, Any]
) -> None:
    said = told(text, **flags)
    assert {name: said.get(name) for name in expected} == expected
    # By its annotations another call without flags does the same.
    made = injected(text, **flags).text
    assert again(made) == made


def test_a_worker_has_the_slots_of_its_object_and_no_role() -> None:
    _, worker = map(variables, sidecars(injected(CORPUS["mpi"]).text))
    assert (worker.get("MUSTER_ROLE"), worker["MUSTER_SLOTS"]) == (None, "2")


def test_every_run_of_a_cron_job_is_a_rendezvous_of_its_own() -> None:
    env = pod_of(manifest("CronJob"), job=None)["containers"][0]["env"]
    assert {"name": "PET_RDZV_ID", "valueFrom": JOB_NAME} in env


@pytest.mark.parametrize(
    ("name", "own_name"),
    [
        ("block-scalars", "batch.kubernetes.io/job-name"),
        ("elastic-pytorch-job", "training.kubeflow.org/job-name"),
        ("elastic-mpi", "training.kubeflow.org/job-name"),
        ("jobset", "jobset.sigs.k8s.io/jobset-name"),
        ("volcano", "volcano.sh/job-name"),
    ],
)
def test_every_object_of_a_generated_name_is_a_job_of_its_own(name: str, own_name: str) -> None:
    text = re.sub(
        r"(?m)^metadata:(\s+| \{)name: [\w-]+", r"metadata:\1generateName: ft-", CORPUS[name]
    )
    assert "generateName: ft-" in text
    made = lawful(text, job=None)
    for one in sidecars(made):
        assert variables(one)["MUSTER_JOB"] == label(own_name)
    assert {*re.findall(r"muster\.dev/job: (\S+?)[,}\n]", made)} == {"ft"}
    assert inject(text, Request(FLAGS, {})).text.count("value: digits")


@pytest.mark.parametrize("wrap", ["true", "false"])
def test_a_sidecar_takes_what_it_is_told(wrap: str) -> None:
    flags = {"etcd_endpoints": "https://e:1", "etcd_secret": "s"}
    flags["etcd_secret_keys"] = "ca.crt,tls.crt,tls.key,username,password"
    said = told(ON_HOST, wrap=wrap, **flags)
    assert set(said) <= {setting.variable for setting in settings_of(Config).values()}
    files = {name for name in said if name.startswith("MUSTER_ETCD_")}
    parts = ("ENDPOINTS", "CACERT", "CERT", "KEY", "USER", "PASSWORD_FILE")
    assert files == {f"MUSTER_ETCD_{part}" for part in parts}
    plain = {n: v if isinstance(v, str) else "10.0.0.1" for n, v in said.items() if n not in files}
    config = load(Config, {}, plain)
    assert (config.c10d_port == 0) == (wrap == "true")
    assert (config.policy.min_nodes, config.policy.max_nodes, config.grace_s) == (2, 4, 60)


def test_a_setting_goes_with_its_annotation() -> None:
    made = again(injected(manifest(), **SIZES).text, sizes="any", unit="4")
    said = variables(sidecars(made)[0])
    assert (said["MUSTER_UNIT"], "MUSTER_SIZES" in said) == ("4", False)


def test_settings_come_from_the_environment_last() -> None:
    environ = {"MUSTER_MIN": "1", "MUSTER_MAX": "8", "MUSTER_IMAGE": "j", "MUSTER_JOB": ""}
    text = inject(manifest(), Request({**FLAGS, "max_nodes": None, "job": None}, environ)).text
    said = variables(sidecars(text)[0])
    assert (said["MUSTER_MIN"], said["MUSTER_MAX"], said["MUSTER_JOB"]) == ("2", "8", "digits")
    assert inject(text, Request({}, {"MUSTER_MAX": "9"})).text == text


ZONE = "{metadata.labels['topology.kubernetes.io/zone']}"
RACK = "{metadata.annotations['example.org/rack']}"


def test_a_topology_is_put_together_from_what_each_pod_says_of_itself() -> None:
    made = lawful(manifest(), topology=f"{ZONE}/b1/{RACK}")
    # A variable is put into another one only if it stands before it.
    assert list(variables(sidecars(made)[0]).items())[-3:] == [
        ("TOPOLOGY_PART_1", label("topology.kubernetes.io/zone")),
        ("TOPOLOGY_PART_3", field("metadata.annotations['example.org/rack']")),
        ("MUSTER_TOPOLOGY", "$(TOPOLOGY_PART_1)/b1/$(TOPOLOGY_PART_3)"),
    ]
    # Another one leaves no part behind.
    assert "TOPOLOGY_PART" not in again(made, topology="b1")


BELOW_MIN = {
    "commit": ("own-rendezvous", "anchors", "mpi", "training-job", "volcano", "many-documents"),
    None: ("commented-deployment", "block-scalars", "cron", "jobset", "runtime"),
}


@pytest.mark.parametrize(
    ("name", "sent"), [(name, sent) for sent, names in BELOW_MIN.items() for name in names]
)
def test_nobody_waits_for_a_replacement_that_cannot_come(name: str, sent: str | None) -> None:
    for one in sidecars(injected(CORPUS[name]).text):
        assert variables(one).get("MUSTER_BELOW_MIN") == sent


@pytest.mark.parametrize(
    ("said", "sent"),
    [
        ("podReplacementPolicy: Failed", "commit"),
        ("podReplacementPolicy: TerminatingOrFailed", None),
        ("podFailurePolicy: {rules: []}", "commit"),
    ],
)
def test_when_a_job_replaces_its_pods_is_its_own_to_say(said: str, sent: str | None) -> None:
    for name, line in (
        ("block-scalars", "    completions: 2\n"),
        ("cron", "            template:\n"),
        ("jobset", "        parallelism: 2\n"),
    ):
        indent = line[: len(line) - len(line.lstrip())]
        text = CORPUS[name].replace(line, f"{indent}{said}\n{line}")
        assert text != CORPUS[name]
        assert told(text).get("MUSTER_BELOW_MIN") == sent


def test_ports_on_the_network_of_a_node_are_the_jobs_own() -> None:
    one, other = told(ON_HOST, job="one"), told(ON_HOST, job="other")
    names = ("MUSTER_HTTP_PORT", "MUSTER_RELAY_PORT")
    ports = {said[name] for said in (one, other) for name in names}
    assert len(ports) == 4
    assert all(20_000 <= int(port) < 29_400 for port in ports)
    assert told(ON_HOST, job="one") == one
    (note,) = [n for n in injected(ON_HOST, job="one").notes if "hostNetwork" in n]
    assert one["MUSTER_HTTP_PORT"] in note
    probe = pod_of(ON_HOST, http_port="12345")["initContainers"][0]["startupProbe"]
    assert probe["httpGet"] == {"path": "/readyz", "port": 12345}


WORDS = {False: "no No off OFF n false False", True: "yes on Y true TRUE"}


@pytest.mark.parametrize(
    ("word", "on_host"), [(word, on) for on, words in WORDS.items() for word in words.split()]
)
def test_a_boolean_is_read_as_kubectl_reads_it(word: str, *, on_host: bool) -> None:
    text = CORPUS["many-documents"].replace("hostNetwork: true", f"hostNetwork: {word}")
    assert (told(text)["MUSTER_HTTP_PORT"] != "9400") == on_host


# --- its resources, rights and times ---


def test_secrets_are_the_sidecars_alone() -> None:
    pod = pod_of(manifest(command=["a"]), etcd_endpoints="https://e:1", etcd_secret="s")
    assert {"name": "muster-etcd", "secret": {"secretName": "s"}} in pod["volumes"]
    (trainer,) = pod["containers"]
    assert [mount["name"] for mount in trainer["volumeMounts"]] == ["muster-run"]
    assert "ETCD" not in json.dumps(trainer)


@pytest.mark.parametrize("user", [None, "1000", "none"])
def test_the_sidecar_needs_no_rights(user: str | None) -> None:
    number = int(user or 65532) if user != "none" else None
    made = sidecars(lawful(manifest(), user=user))[0]["securityContext"]
    assert made == {
        "runAsNonRoot": True,
        **({} if number is None else {"runAsUser": number, "runAsGroup": number}),
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


LIMITS = {"cpu": "2", "memory": "4Gi"}
BOTH = {"cpu": "500m", "memory": "128Mi"}
ONE = {"cpu": "1", "memory": "1Gi"}


@pytest.mark.parametrize(
    ("resources", "quality", "asked"),
    [
        ({}, "BestEffort", {}),
        ({"limits": {"nvidia.com/gpu": 1}}, "BestEffort", {}),
        ({"limits": LIMITS}, "Guaranteed", BOTH),
        ({"limits": LIMITS, "requests": LIMITS}, "Guaranteed", BOTH),
        ({"requests": {"cpu": "1"}}, "Burstable", {"memory": "128Mi"}),
        ({"limits": LIMITS, "requests": {"cpu": "1"}}, "Burstable", BOTH),
    ],
)
def test_the_pod_keeps_its_class(resources: Any, quality: str, asked: Any) -> None:
    before = {"containers": [{"name": "c", "resources": resources}]}
    assert facts.quality_of_service(facts.containers(before)) == quality
    after = pod_of(manifest(resources=resources))
    assert facts.quality_of_service(facts.containers(after)) == quality
    assert after["initContainers"][0].get("resources", {}).get("limits", {}) == asked


@pytest.mark.parametrize(
    ("requests", "limits", "quality"),
    [
        ({"cpu": "1", "memory": "4Gi"}, {"cpu": "1000m", "memory": "4096Mi"}, "Guaranteed"),
        ({"cpu": 0.5, "memory": "1e9"}, {"cpu": "500m", "memory": "1G"}, "Guaranteed"),
        ({"cpu": "1", "memory": "4G"}, {"cpu": "1", "memory": "4Gi"}, "Burstable"),
        ({"cpu": "0"}, {"cpu": "1", "memory": "4Gi"}, "Burstable"),
        ({"cpu": "0m"}, {"memory": "0Mi"}, "BestEffort"),
        ({"cpu": "${CPU}"}, {"cpu": "${CPU}", "memory": "4Gi"}, "Guaranteed"),
    ],
)
def test_quantities_are_compared_by_what_they_mean(
    requests: Any, limits: Any, quality: str
) -> None:
    container = {"name": "c", "resources": {"requests": requests, "limits": limits}}
    assert facts.quality_of_service([container]) == quality


@pytest.mark.parametrize(
    "of_the_pod",
    [{"requests": ONE, "limits": ONE}, {"limits": ONE}, {"requests": {"memory": "1Gi"}}],
)
@pytest.mark.parametrize("resources", [{}, {"limits": LIMITS, "requests": {"cpu": "1"}}])
def test_where_the_pod_itself_asks_the_sidecar_does_not(of_the_pod: Any, resources: Any) -> None:
    result = injected(manifest(resources=resources, pod={"resources": of_the_pod}))
    (pod,) = pods(loaded(result.text))
    assert "resources" not in pod["initContainers"][0]
    assert pod["resources"] == of_the_pod
    (note,) = [note for note in result.notes if "resources" in note or "BestEffort" in note]
    assert note.startswith("Deployment/digits: spec.template.spec.resources are for all containers")
    assert "128Mi" in note
    lawful(manifest(resources=resources, pod={"resources": of_the_pod}))


@pytest.mark.parametrize("of_the_pod", [{}, None, {"requests": {}}])
def test_a_pod_that_asks_for_nothing_itself(of_the_pod: Any) -> None:
    result = injected(manifest(resources={"limits": LIMITS}, pod={"resources": of_the_pod}))
    assert sidecars(result.text)[0]["resources"] == {"requests": BOTH, "limits": BOTH}
    assert not any("resources" in note for note in result.notes)


def changed_by_hand(text: str, pod: Any, sidecar: Any) -> str:
    """An injected JSON text whose pod and sidecar hands have changed."""
    value = json.loads(text)
    (found,) = pods(value)
    found.update(pod)
    found["initContainers"][0].update(sidecar)
    return json.dumps(value)


ASKS_FOR_MEMORY = {"requests": {"memory": "64Mi"}}


@pytest.mark.parametrize(
    ("made", "pod", "sidecar", "left"),
    [
        # The pod gets some of its own.
        (manifest(resources={"limits": LIMITS}), {"resources": {"limits": ONE}}, {}, None),
        (
            manifest(pod={"resources": {"requests": ONE}}),
            {},
            {"resources": ASKS_FOR_MEMORY},
            ASKS_FOR_MEMORY,
        ),
    ],
)
def test_resources_that_hands_give_the_pod_or_its_sidecar(
    made: str, pod: Any, sidecar: Any, left: Any
) -> None:
    text = settled(changed_by_hand(injected(made).text, pod, sidecar))
    assert sidecars(text)[0].get("resources") == left


ASKS = manifest(pod={"resources": {"limits": ONE, "requests": {"cpu": "1"}}})
OF_SIDECAR = "spec.template.spec.initContainers[muster].resources"
# Without a request of its own a pod requests what its containers do, not what it may use.
BECOMES_THE_PODS = (
    f"{OF_SIDECAR} asks for memory, and spec.template.spec.resources.requests does not: give a"
    " request there, or remove it here"
)


@pytest.mark.parametrize(
    ("text", "by_hand", "said"),
    [
        (ASKS, {"requests": {"memory": "64Mi"}}, BECOMES_THE_PODS),
        (ASKS, {"limits": {"memory": 1}}, BECOMES_THE_PODS),
        (
            manifest(),
            {"limits": {"nvidia.com/gpu": 1}},
            f"{OF_SIDECAR} asks for nvidia.com/gpu, which the sidecar would take from the training:"
            " remove it there",
        ),
        (
            manifest(resources={"limits": LIMITS}),
            {"requests": {"cpu": "1m"}},
            f"{OF_SIDECAR} would make the pod Burstable, which is Guaranteed without it: remove"
            " them, and inject chooses",
        ),
    ],
)
def test_resources_that_a_sidecar_cannot_have(text: str, by_hand: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        again(changed_by_hand(injected(text).text, {}, {"resources": by_hand}))
    assert str(caught.value) == f"Deployment/digits: {said}"


def carrying(**by_hand: str) -> str:
    """An injected text, with variables in the sidecar that hands wrote there."""
    text = injected(manifest(command=["a"])).text
    env = sidecars(text)[0]["env"] + [{"name": n, "value": v} for n, v in by_hand.items()]
    return changed_by_hand(text, {}, {"env": env})


@pytest.mark.parametrize(
    ("by_hand", "needed_s"),
    [
        ({}, 60 + 3 * 10),
        ({"MUSTER_LEASE_TTL": "1m"}, 60 + 3 * 60),
        ({"MUSTER_START_TIMEOUT": "5m"}, 300 + 3 * 10),
        ({"MUSTER_LEASE_TTL": "30.5", "MUSTER_START_TIMEOUT": ""}, 60 + 3 * 31),
    ],
)
def test_a_fresh_sidecar_has_the_time_that_it_may_need(
    by_hand: dict[str, str], needed_s: int
) -> None:
    probe = sidecars(settled(carrying(**by_hand)))[0]["startupProbe"]
    assert probe["periodSeconds"] == 1
    assert needed_s + 10 <= probe["failureThreshold"] <= 1.5 * needed_s + 30


def test_a_time_that_is_none_is_told() -> None:
    with pytest.raises(ConfigError, match=r"MUSTER_LEASE_TTL: 'long' .*expected a time such as"):
        again(carrying(MUSTER_LEASE_TTL="long"))


@pytest.mark.parametrize(("grace", "told_s"), [(None, "60"), (30, "30"), (2, "2"), (3600, "3600")])
def test_the_grace_is_the_users_or_a_minute(grace: int | None, told_s: str) -> None:
    text = manifest(pod={} if grace is None else {"terminationGracePeriodSeconds": grace})
    assert told(text)["MUSTER_GRACE_S"] == told_s
    short = any("few saves are that fast" in note for note in injected(text).notes)
    assert short == (grace == 2)


@pytest.mark.parametrize(
    ("text", "flags", "label"),
    [
        (manifest(), {}, "digits"),
        (manifest(), {"job": "j" * 64}, "j" * 46 + "-cb4ae4c4800f8b1a"),
        (manifest("CronJob"), NO_JOB, "digits"),
    ],
)
def test_every_pod_has_the_label_that_network_policies_select(
    text: str, flags: dict[str, str | None], label: str
) -> None:
    (made,) = loaded(injected(text, **flags).text)
    spec = made["spec"].get("jobTemplate", made)["spec"]
    assert spec["template"]["metadata"]["labels"]["muster.dev/job"] == label


@given(st.text("ab.-_", min_size=1, max_size=120), st.text("ab.-_", min_size=1, max_size=120))
def test_labels_are_ones_that_kubernetes_takes_and_no_two_jobs_share_one(
    one: str, other: str
) -> None:
    one, other = f"a{one}", f"a{other}"
    assert re.fullmatch(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?", job_label(one))
    assert (job_label(one) == job_label(other)) == (one == other)


# --- what is said ---

HOOK = {"preStop": {"sleep": {"seconds": 3}}}
HOOKED = manifest(command=["a"], lifecycle=HOOK)
WRAPPED = manifest(command=["/var/run/muster/bin/muster-run", "--", "torchrun"])
MISSPELT = CORPUS["settings-by-hand"].replace("muster.dev/max", "muster.dev/maximum")


@pytest.mark.parametrize(
    ("text", "flags", "sentence", "times"),
    [
        *((manifest(kind), {}, "take a Job", 1) for kind in ("Deployment", "StatefulSet")),
        (manifest("DaemonSet"), {}, "take a Job", 1),
        (manifest("Job"), {}, "take a Job", 0),
        (HOOKED, {"wrap": "true"}, "comes out of the grace", 1),
        (HOOKED, {"wrap": "false"}, "call /var/run/muster/bin/muster-hold", 1),
        (WRAPPED, {}, "before its command already", 1),
        (MISSPELT, {}, "muster.dev/maximum is kept, but nothing reads it", 1),
        (CORPUS["settings-by-hand"], {}, "nothing reads", 0),
    ],
)
def test_what_will_not_do_what_it_seems_to_is_said(
    text: str, flags: dict[str, str | None], sentence: str, times: int
) -> None:
    assert sum(sentence in note for note in injected(text, **flags).notes) == times


def test_a_command_that_is_wrapped_already_is_left_as_it_is() -> None:
    (container,) = pods(loaded(lawful(WRAPPED)))[0]["containers"]
    assert container["command"] == ["/var/run/muster/bin/muster-run", "--", "torchrun"]


@pytest.mark.parametrize("wrap", ["true", "false"])
def test_a_hook_of_the_users_stays(wrap: str) -> None:
    assert pod_of(HOOKED, wrap=wrap)["containers"][0]["lifecycle"] == HOOK


def test_without_a_command_the_end_is_held_by_a_hook() -> None:
    result = injected(CORPUS["hold"])
    (trainer,) = pods(loaded(result.text))[0]["containers"]
    assert trainer["lifecycle"] == {
        "preStop": {"exec": {"command": ["/var/run/muster/bin/muster-hold"]}},
        "postStart": {"exec": {"command": ["true"]}},
    }
    values = variables(trainer)
    of_the_pod = {"MUSTER_ADDRESS": "127.0.0.1", "MUSTER_NAMESPACE": "n", "MUSTER_MEMBER": "m"}
    of_the_pod |= {"MUSTER_POD_UID": "u", "MUSTER_NODE": ""}
    config = load(Config, {}, {**told(CORPUS["hold"]), **of_the_pod})
    expected = dict(torch_environment(config))
    del expected["PET_LOCAL_ADDR"], expected["MUSTER_MEMBER"], expected["PET_MAX_RESTARTS"]
    assert {name: values[name] for name in expected} == expected
    assert {*torch_environment(config), "PYTHONPATH"} <= set(values)
    assert (values["PET_MAX_RESTARTS"], values["PYTHONPATH"]) == ("3", "/src")
    said = " ".join(result.notes)
    assert "sets PET_MAX_RESTARTS: kept, where Muster would have '10'" in said
    assert "sets PYTHONPATH: kept, where Muster would have '/var/run/muster/python'" in said
    assert "has no command" in said


def test_an_object_of_an_unknown_kind() -> None:
    result = inject(manifest("Unheard"), Request(FLAGS, {}, (), "spec.*"))
    assert "muster-run" in result.text
    assert again(result.text) == result.text
    assert again(result.text, max_nodes="7").count('"7"') == 2
