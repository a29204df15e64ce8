# SPDX-License-Identifier: Apache-2.0
"""What the sidecar of a template is told, and what is said about the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.config.sidecar import Config
from agent.config.table import load, settings_of
from agent.rundir.files import torch_environment
from console.inject import facts
from console.inject.injection import Request, inject
from rdzv.errors import ConfigError
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import FLAGS, again, injected, loaded, pods
from tests.support.injection.plans import manifest


def pod_of(text: str, /, **flags: str | None) -> Any:
    return pods(loaded(injected(text, **flags).text))[0]


def told(text: str, /, **flags: str | None) -> dict[str, Any]:
    """The sidecar's variables: text, or where the text comes from."""
    env = pod_of(text, **flags)["initContainers"][0]["env"]
    return {v["name"]: v.get("value", v.get("valueFrom")) for v in env}


def field(path: str) -> dict[str, Any]:
    return {"fieldRef": {"fieldPath": path}}


@pytest.mark.parametrize(
    ("container", "slots"),
    [
        ({}, "1"),
        ({"command": ["torchrun", "--nproc-per-node=4", "t.py"]}, "4"),
        ({"command": ["torchrun"], "args": ["--nproc_per_node", "4"]}, "4"),
        ({"command": ["sh", "-c", "exec torchrun --nproc-per-node '2' t.py"]}, "2"),
        ({"env": [{"name": "PET_NPROC_PER_NODE", "value": "3"}]}, "3"),
        ({"resources": {"limits": {"nvidia.com/gpu": 8}}}, "8"),
        ({"resources": {"limits": {"nvidia.com/mig-1g.5gb": "2"}}}, "2"),
        ({"resources": {"limits": {"amd.com/gpu": "4", "cpu": 9}}}, "4"),
        (
            {
                "command": ["torchrun", "--nproc-per-node=gpu"],
                "resources": {"limits": {"nvidia.com/gpu": 2}},
            },
            "2",
        ),
        (
            {
                "command": ["sh", "-c", "torchrun --nproc-per-node=$GPUS t.py"],
                "resources": {"limits": {"nvidia.com/gpu": 2}},
            },
            "2",
        ),
    ],
)
def test_slots_as_the_spec_says(container: dict[str, Any], slots: str) -> None:
    assert told(manifest(**container))["MUSTER_SLOTS"] == slots


def test_slots_as_the_object_says() -> None:
    said = [
        {v["name"]: v.get("value") for v in pod["initContainers"][0]["env"]}
        for pod in pods(loaded(injected(CORPUS["mpi"]).text))
    ]
    launcher, worker = said
    assert (launcher["MUSTER_ROLE"], launcher.get("MUSTER_SLOTS")) == ("launcher", None)
    assert (worker.get("MUSTER_ROLE"), worker["MUSTER_SLOTS"]) == (None, "2")


@pytest.mark.parametrize("flags", [{}, {"min_nodes": None, "max_nodes": None}])
def test_min_and_max_as_an_elastic_object_says(flags: dict[str, str | None]) -> None:
    said = told(CORPUS["anchors"], **flags)
    expected = ("2", "4") if not flags else ("1", "4")
    assert (said["MUSTER_MIN"], said["MUSTER_MAX"]) == expected


def test_who_the_member_is_comes_from_the_pod() -> None:
    said = told(manifest(), job=None)
    assert said["MUSTER_JOB"] == "digits"
    assert said["MUSTER_NAMESPACE"] == field("metadata.namespace")
    assert said["MUSTER_MEMBER"] == field("metadata.name")
    assert said["MUSTER_POD_UID"] == field("metadata.uid")
    assert said["MUSTER_ADDRESS"] == field("status.podIP")
    assert said["MUSTER_NODE"] == field("spec.nodeName")
    assert told(manifest(), namespace="other")["MUSTER_NAMESPACE"] == "other"


def test_the_uid_of_the_job_where_an_object_lives_as_long_as_it() -> None:
    uid = field("metadata.labels['batch.kubernetes.io/controller-uid']")
    assert told(manifest("Job"))["MUSTER_JOB_UID"] == uid
    assert told(manifest("CronJob"))["MUSTER_JOB_UID"] == uid
    for kind in ("Deployment", "StatefulSet", "ReplicaSet"):
        assert "MUSTER_JOB_UID" not in told(manifest(kind))


def test_the_number_of_a_pod_is_told_where_its_controller_gives_one() -> None:
    labels = {
        "StatefulSet": "apps.kubernetes.io/pod-index",
        "Job": "batch.kubernetes.io/job-completion-index",
    }
    for kind, label in labels.items():
        assert told(manifest(kind))["MUSTER_INDEX"] == field(f"metadata.labels['{label}']")
    assert "MUSTER_INDEX" not in told(manifest("Deployment"))


def test_every_run_of_a_cron_job_is_a_job_of_its_own() -> None:
    name = field("metadata.labels['batch.kubernetes.io/job-name']")
    assert told(manifest("CronJob"), job=None)["MUSTER_JOB"] == name
    assert told(manifest("CronJob"), job="nightly")["MUSTER_JOB"] == "nightly"
    env = pod_of(manifest("CronJob"), job=None)["containers"][0]["env"]
    assert {"name": "PET_RDZV_ID", "valueFrom": name} in env


@pytest.mark.parametrize("wrap", ["true", "false"])
def test_a_sidecar_takes_what_it_is_told(wrap: str) -> None:
    flags = {"etcd_endpoints": "https://e:1", "etcd_secret": "s"}
    flags["etcd_secret_keys"] = "ca.crt,tls.crt,tls.key,username,password"
    said = told(manifest(command=["a"], pod={"hostNetwork": True}), wrap=wrap, **flags)
    assert set(said) <= {setting.variable for setting in settings_of(Config).values()}
    files = {name for name in said if name.startswith("MUSTER_ETCD_")}
    parts = ("ENDPOINTS", "CACERT", "CERT", "KEY", "USER", "PASSWORD_FILE")
    assert files == {f"MUSTER_ETCD_{part}" for part in parts}
    plain = {n: v if isinstance(v, str) else "10.0.0.1" for n, v in said.items() if n not in files}
    config = load(Config, {}, plain)
    assert (config.c10d_port == 0) == (wrap == "true")
    assert (config.min_nodes, config.max_nodes, config.grace_s) == (2, 4, 60)


def test_secrets_are_the_sidecars_alone() -> None:
    pod = pod_of(manifest(command=["a"]), etcd_endpoints="https://e:1", etcd_secret="s")
    assert {"name": "muster-etcd", "secret": {"secretName": "s"}} in pod["volumes"]
    (trainer,) = pod["containers"]
    assert [mount["name"] for mount in trainer["volumeMounts"]] == ["muster-run"]
    assert "ETCD" not in json.dumps(trainer)


def test_the_sidecar_needs_no_rights() -> None:
    made = pod_of(manifest())["initContainers"][0]["securityContext"]
    assert made == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


LIMITS = {"cpu": "2", "memory": "4Gi"}
BOTH = {"cpu": "500m", "memory": "128Mi"}


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
    ("kind", "endless"),
    [("Deployment", True), ("StatefulSet", True), ("DaemonSet", True), ("Job", False)],
)
def test_who_starts_containers_again_after_a_good_end_is_told_so(kind: str, endless: bool) -> None:
    said = [note for note in injected(manifest(kind)).notes if "take a Job" in note]
    assert len(said) == endless


ONE = {"cpu": "1", "memory": "1Gi"}


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
    assert again(result.text) == result.text


@pytest.mark.parametrize("of_the_pod", [{}, None, {"requests": {}}])
def test_a_pod_that_asks_for_nothing_itself(of_the_pod: Any) -> None:
    result = injected(manifest(resources={"limits": LIMITS}, pod={"resources": of_the_pod}))
    asked = pods(loaded(result.text))[0]["initContainers"][0]["resources"]
    assert asked == {"requests": BOTH, "limits": BOTH}
    assert not any("resources" in note for note in result.notes)


def test_a_sidecar_leaves_its_own_resources_where_the_pod_gets_some() -> None:
    text = injected(manifest(resources={"limits": LIMITS})).text
    value = json.loads(text)
    (pod,) = pods(value)
    pod["resources"] = {"limits": ONE}
    assert "resources" not in pods(json.loads(again(json.dumps(value))))[0]["initContainers"][0]


def asking(of_the_pod: Any, by_hand: Any) -> str:
    """An injected pod that asks itself, and hands that let its sidecar ask too."""
    value = json.loads(injected(manifest(pod={"resources": of_the_pod})).text)
    (pod,) = pods(value)
    pod["initContainers"][0]["resources"] = by_hand
    return json.dumps(value)


def test_what_hands_give_a_sidecar_within_its_pod_stays() -> None:
    by_hand = {"requests": {"memory": "64Mi"}}
    text = again(asking({"requests": ONE}, by_hand))
    assert pods(json.loads(text))[0]["initContainers"][0]["resources"] == by_hand


@pytest.mark.parametrize("by_hand", [{"requests": {"memory": "64Mi"}}, {"limits": {"memory": 1}}])
def test_what_hands_give_a_sidecar_is_not_to_become_the_pods(by_hand: Any) -> None:
    """Without a request of its own a pod requests what its containers do, not what it may use."""
    with pytest.raises(ConfigError) as caught:
        again(asking({"limits": ONE, "requests": {"cpu": "1"}}, by_hand))
    (line,) = str(caught.value).splitlines()
    assert "spec.template.spec.initContainers[muster].resources asks for memory" in line
    assert "spec.template.spec.resources.requests does not" in line
    assert line.endswith(": give a request there, or remove it here")


def test_ports_on_the_network_of_a_node_are_the_jobs_own() -> None:
    text = manifest(command=["a"], pod={"hostNetwork": True})
    one, other = told(text, job="one"), told(text, job="other")
    names = ("MUSTER_HTTP_PORT", "MUSTER_RELAY_PORT")
    ports = {said[name] for said in (one, other) for name in names}
    assert len(ports) == 4
    assert all(20_000 <= int(port) < 29_400 for port in ports)
    assert told(text, job="one") == one
    (note,) = [n for n in injected(text, job="one").notes if "hostNetwork" in n]
    assert one["MUSTER_HTTP_PORT"] in note
    assert told(text, http_port="12345")["MUSTER_HTTP_PORT"] == "12345"
    probe = pod_of(text, http_port="12345")["initContainers"][0]["startupProbe"]
    assert probe["httpGet"] == {"path": "/readyz", "port": 12345}


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("torchrun --nnodes=2:4 t.py", []),
        ("torchrun --nnodes 3 t.py", ["--nnodes"]),
        ("torchrun --rdzv_endpoint=$H:29400 --rdzv-id=1 t.py", ["--rdzv-endpoint", "--rdzv-id"]),
        ("torchrun --standalone t.py", ["--standalone"]),
        ("torchrun t.py --my-nnodes=3 --nnodes-of=1", []),
        ("python -m torch.distributed.run --master_addr x", ["--master-addr"]),
    ],
)
def test_options_that_overrule_the_sidecar_are_named(line: str, options: list[str]) -> None:
    for command in (line.split(), ["sh", "-c", f"cd /app && {line}"]):
        notes = injected(manifest(command=command)).notes
        named = [option for option in options if any(f"has {option} in" in n for n in notes)]
        assert named == options
        assert sum(" in its command: kept" in note for note in notes) == len(options)


def test_without_a_command_the_end_is_held_by_a_hook() -> None:
    result = injected(CORPUS["hold"])
    (trainer,) = pods(loaded(result.text))[0]["containers"]
    assert trainer["lifecycle"] == {
        "preStop": {"exec": {"command": ["/var/run/muster/bin/muster-hold"]}},
        "postStart": {"exec": {"command": ["true"]}},
    }
    values = {v["name"]: v.get("value") for v in trainer["env"]}
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


@pytest.mark.parametrize(
    ("wrap", "sentence"),
    [("true", "comes out of the grace"), ("false", "call /var/run/muster/bin/muster-hold")],
)
def test_a_hook_of_the_users_stays(wrap: str, sentence: str) -> None:
    hook = {"preStop": {"sleep": {"seconds": 3}}}
    text = manifest(command=["a"], lifecycle=hook)
    assert pod_of(text, wrap=wrap)["containers"][0]["lifecycle"] == hook
    assert any(sentence in note for note in injected(text, wrap=wrap).notes)


def test_a_command_that_is_wrapped_already() -> None:
    command = ["/var/run/muster/bin/muster-run", "--", "torchrun"]
    result = injected(manifest(command=command))
    assert pods(loaded(result.text))[0]["containers"][0]["command"] == command
    assert any("before its command already" in note for note in result.notes)
    assert again(result.text) == result.text


@pytest.mark.parametrize(("grace", "told_s"), [(None, "60"), (30, "30"), (2, "2"), (3600, "3600")])
def test_the_grace_is_the_users_or_a_minute(grace: int | None, told_s: str) -> None:
    pod = {} if grace is None else {"terminationGracePeriodSeconds": grace}
    assert told(manifest(pod=pod))["MUSTER_GRACE_S"] == told_s
    short = any("few saves are that fast" in note for note in injected(manifest(pod=pod)).notes)
    assert short == (grace == 2)


def test_what_hands_give_the_sidecar_stays() -> None:
    text = injected(CORPUS["block-scalars"]).text
    text = text.replace(
        "restartPolicy: Always",
        "restartPolicy: Always\n                  imagePullPolicy: Never\n"
        "                  resources: {limits: {ephemeral-storage: 1Mi}}",
    ).replace(
        '- {name: MUSTER_MIN, value: "2"}',
        '- {name: MUSTER_MIN, value: "1"}\n'
        '                      - {name: MUSTER_LEASE_TTL, value: "20s"}',
    )
    made = pods(loaded(again(text)))[0]["initContainers"][0]
    assert made["imagePullPolicy"] == "Never"
    assert made["resources"] == {"limits": {"ephemeral-storage": "1Mi"}}
    assert {"name": "MUSTER_LEASE_TTL", "value": "20s"} in made["env"]
    assert {"name": "MUSTER_MIN", "value": "2"} in made["env"]
    assert again(again(text)) == again(text)


def test_a_role_or_a_secret_that_is_gone_leaves_nothing_behind() -> None:
    text = injected(manifest(), etcd_secret="s", etcd_endpoints="https://e:1").text
    plain = injected(text, etcd_endpoints="e:1", etcd_secret_keys="username,password").text
    env = {v["name"] for v in pods(loaded(plain))[0]["initContainers"][0]["env"]}
    assert not {"MUSTER_ETCD_CACERT", "MUSTER_ETCD_CERT"} & env
    assert {"MUSTER_ETCD_USER", "MUSTER_ETCD_PASSWORD_FILE"} <= env


def test_an_object_of_an_unknown_kind() -> None:
    result = inject(manifest("Unheard"), Request(FLAGS, {}, (), "spec.*"))
    assert "muster-run" in result.text
    assert again(result.text) == result.text
    assert again(result.text, max_nodes="7").count('"7"') == 2


def test_settings_come_from_the_environment_last() -> None:
    environ = {"MUSTER_MIN": "1", "MUSTER_MAX": "8", "MUSTER_IMAGE": "j", "MUSTER_JOB": ""}
    text = inject(manifest(), Request({**FLAGS, "max_nodes": None, "job": None}, environ)).text
    said = {v["name"]: v.get("value") for v in pods(loaded(text))[0]["initContainers"][0]["env"]}
    assert (said["MUSTER_MIN"], said["MUSTER_MAX"], said["MUSTER_JOB"]) == ("2", "8", "digits")
    assert inject(text, Request({}, {"MUSTER_MAX": "9"})).text == text


def test_an_annotation_that_nothing_reads_is_told() -> None:
    text = CORPUS["settings-by-hand"].replace("muster.dev/max", "muster.dev/maximum")
    notes = injected(text).notes
    assert any("muster.dev/maximum is kept, but nothing reads it" in note for note in notes)
    assert not any("nothing reads" in note for note in injected(CORPUS["settings-by-hand"]).notes)


def test_a_name_too_long_for_a_label_is_no_label() -> None:
    (metadata,) = [
        loaded(injected(manifest(), job="j" * 64).text)[0]["spec"]["template"]["metadata"]
    ]
    assert "labels" not in metadata
    assert metadata["annotations"]["muster.dev/job"] == "j" * 64


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
    text = manifest(resources={"requests": requests, "limits": limits})
    container = pods(loaded(text))[0]["containers"][0]
    assert facts.quality_of_service([container]) == quality


def carrying(text: str, **variables: str) -> str:
    """An injected JSON text, with variables in the sidecar that hands wrote there."""
    value = json.loads(text)
    (pod,) = pods(value)
    pod["initContainers"][0]["env"] += [{"name": n, "value": v} for n, v in variables.items()]
    return json.dumps(value)


@pytest.mark.parametrize(
    ("variables", "needed_s"),
    [
        ({}, 60 + 3 * 10),
        ({"MUSTER_LEASE_TTL": "1m"}, 60 + 3 * 60),
        ({"MUSTER_START_TIMEOUT": "5m"}, 300 + 3 * 10),
        ({"MUSTER_LEASE_TTL": "30.5", "MUSTER_START_TIMEOUT": ""}, 60 + 3 * 31),
    ],
)
def test_a_fresh_sidecar_has_the_time_that_it_may_need(
    variables: dict[str, str], needed_s: int
) -> None:
    text = again(carrying(injected(manifest(command=["a"])).text, **variables))
    probe = pods(json.loads(text))[0]["initContainers"][0]["startupProbe"]
    assert probe["periodSeconds"] == 1
    assert needed_s + 10 <= probe["failureThreshold"] <= 1.5 * needed_s + 30
    assert again(text) == text


def test_a_time_that_is_none_is_told() -> None:
    text = carrying(injected(manifest(command=["a"])).text, MUSTER_LEASE_TTL="long")
    with pytest.raises(ConfigError, match=r"MUSTER_LEASE_TTL: 'long' .*expected a time such as"):
        again(text)


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("torchrun --nnodes=2:4 t.py", True),
        ("torchrun --nnodes '2:4' t.py", True),
        ("torchrun --nnodes=02:4 t.py", True),
        ("torchrun --nnodes=9:9 --nnodes=2:4 t.py", True),
        ("torchrun --nnodes=2:40 t.py", False),
        ("torchrun --nnodes=12:4 t.py", False),
        ("torchrun --nnodes=3 t.py --split 2:4", False),
        ("torchrun --nnodes=4 t.py", False),
        ("torchrun --nnodes=$MIN:$MAX t.py", False),
    ],
)
def test_nnodes_is_compared_by_its_numbers(line: str, same: bool) -> None:
    notes = injected(manifest(command=["sh", "-c", line])).notes
    said = [note for note in notes if "--nnodes" in note]
    assert len(said) == (0 if same else 1)
    for note in said:
        assert "2:4 is what counts: give the same, or none" in note
        assert "wins" not in note


def test_one_number_of_nodes_is_both() -> None:
    text = manifest(command=["torchrun", "--nnodes", "3", "t.py"])
    said = [n for n in injected(text, min_nodes="3", max_nodes="3").notes if "--nnodes" in n]
    assert said == []


@pytest.mark.parametrize(
    ("word", "on_host"),
    [
        *((word, False) for word in ("no", "No", "off", "OFF", "n", "false", "False")),
        *((word, True) for word in ("yes", "on", "Y", "true", "TRUE")),
    ],
)
def test_a_boolean_is_read_as_kubectl_reads_it(word: str, *, on_host: bool) -> None:
    text = CORPUS["many-documents"].replace("hostNetwork: true", f"hostNetwork: {word}")
    ports = [v for v in injected(text).text.splitlines() if "MUSTER_HTTP_PORT" in v]
    assert ("9400" not in ports[0]) == on_host


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("own-rendezvous", "commit"),
        ("anchors", "commit"),
        ("mpi", "commit"),
        ("training-job", "commit"),
        ("volcano", "commit"),
        ("many-documents", "commit"),
        ("commented-deployment", None),
        ("block-scalars", None),
        ("cron", None),
        ("jobset", None),
        ("runtime", None),
    ],
)
def test_nobody_waits_for_a_replacement_that_cannot_come(name: str, sent: str | None) -> None:
    for pod in pods(loaded(injected(CORPUS[name]).text)):
        if "initContainers" in pod:
            env = {v["name"]: v.get("value") for v in pod["initContainers"][0]["env"]}
            assert env.get("MUSTER_BELOW_MIN") == sent


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
