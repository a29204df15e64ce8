# SPDX-License-Identifier: Apache-2.0
"""What people write into an injected file stays; what becomes of a Horovod job's pods and back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from injection.injection import Request, inject
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import (
    POD,
    edited,
    injected,
    keeps,
    lawful,
    loaded,
    manifest,
    refused,
    removed,
    settled,
    sidecars,
    told,
    variables,
)

ENV = "          env:\n"
SOURCE = "{name: PYTHONPATH, value: /src}"
RESTARTS = '{name: PET_MAX_RESTARTS, value: "3"}'
KEPT_RESTARTS = {"name": "PET_MAX_RESTARTS", "value": "3"}
SET = edited(POD, "kind: Deployment", "kind: StatefulSet")
CAT = "          command: [cat]\n"
TWO = f"{POD}        - name: log\n          image: l\n{CAT}"
HOOK = '["/var/run/muster/bin/muster-hold"]'
MOUNT = "{name: muster-run, mountPath: /logs/muster}"
KEPT_MOUNT = {"name": "muster-run", "mountPath": "/logs/muster"}
MOUNTS_BY_HAND = """\
          env:
            - {name: PYTHONPATH, value: /log}
          volumeMounts:
            - {name: muster-run, mountPath: /var/run/muster, readOnly: true}
"""
LOG = {"env": [{"name": "PYTHONPATH", "value": "/log"}], "volumeMounts": [{"readOnly": True}]}
TICKET = '        muster.dev/ticket: "7"\n'


def of_pod(**container: Any) -> Any:
    return {"spec": {"containers": [container]}}


@pytest.mark.parametrize("wrap", ["true", "false"])
@pytest.mark.parametrize(
    ("text", "old", "new", "kept"),
    [
        pytest.param(
            POD,
            ENV,
            f"{ENV}            - {SOURCE}\n            - {RESTARTS}\n",
            of_pod(env=[{"name": "PYTHONPATH", "value": "/src"}, KEPT_RESTARTS]),
            id="variables",
        ),
        pytest.param(
            POD, "name: trainer", "name: learner", of_pod(name="learner"), id="the container's name"
        ),
        pytest.param(
            POD,
            "volumeMounts: [",
            f"volumeMounts: [{MOUNT}, ",
            of_pod(volumeMounts=[KEPT_MOUNT]),
            id="a mount of the run directory elsewhere",
        ),
        pytest.param(TWO, CAT, MOUNTS_BY_HAND, of_pod(name="log", **LOG), id="another container"),
        pytest.param(
            POD,
            "labels: {",
            "labels: {muster.dev/team: vision, ",
            {"metadata": {"labels": {"muster.dev/team": "vision"}}},
            id="a label",
        ),
        pytest.param(
            POD,
            "annotations:\n",
            f"annotations:\n{TICKET}",
            {"metadata": {"annotations": {"muster.dev/ticket": "7"}}},
            id="an annotation",
        ),
    ],
)
def test_what_hands_write_later_stays_with_and_without_the_sidecar(
    text: str, old: str, new: str, kept: Any, wrap: str
) -> None:
    made = injected(text, wrap=wrap, container="trainer" if text is TWO else None).text
    by_hand = edited(made, old, new)
    others = loaded(by_hand)[0]["spec"]["template"]["spec"]["containers"][1:]
    after = settled(by_hand)
    for one in (after, removed(by_hand), removed(after)):
        template = loaded(one)[0]["spec"]["template"]
        assert keeps(template, kept)
        containers = template["spec"]["containers"]
        assert containers[1:] == others
        for container in containers:
            names = [variable["name"] for variable in container["env"]]
            assert len(names) == len({*names})
    assert after.count("bin/muster-run") == made.count("bin/muster-run")
    if old in text:
        assert removed(by_hand) == removed(after) == edited(text, old, new)


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ('{name: PET_MAX_RESTARTS, value: "10"}', RESTARTS, of_pod(env=[KEPT_RESTARTS])),
        (HOOK, '["sh"]', of_pod(lifecycle={"preStop": {"exec": {"command": ["sh"]}}})),
    ],
)
def test_what_hands_make_of_ours_stays(old: str, new: str, kept: Any) -> None:
    by_hand = edited(injected(POD, wrap="false").text, old, new)
    for text in (settled(by_hand), removed(by_hand)):
        assert keeps(loaded(text)[0]["spec"]["template"], kept)


def test_what_a_server_adds_to_a_variable_is_no_change_of_it() -> None:
    made = injected(POD, wrap="false").text
    live = made.replace("{fieldPath: status.podIP}", "{apiVersion: v1, fieldPath: status.podIP}")
    assert live != made
    assert removed(live) == POD


# --- in the sidecar itself ---


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
    (made,) = sidecars(settled(text))
    assert made["imagePullPolicy"] == "Never"
    assert made["resources"] == {"limits": {"ephemeral-storage": "1Mi"}}
    said = variables(made)
    assert (said["MUSTER_LEASE_TTL"], said["MUSTER_MIN"]) == ("20s", "2")


def test_what_a_kind_says_goes_with_the_kind() -> None:
    of_set = {"MUSTER_INDEX", "MUSTER_BELOW_MIN"}
    assert of_set <= told(SET).keys()
    made = settled(edited(injected(SET).text, "kind: StatefulSet", "kind: Deployment"))
    assert not of_set & variables(sidecars(made)[0]).keys()


def test_a_secret_that_is_gone_leaves_nothing_behind() -> None:
    text = injected(manifest(), etcd_secret="s", etcd_endpoints="https://e:1").text
    plain = injected(text, etcd_endpoints="e:1", etcd_secret_keys="username,password").text
    env = set(variables(sidecars(plain)[0]))
    assert not {"MUSTER_ETCD_CACERT", "MUSTER_ETCD_CERT"} & env
    assert {"MUSTER_ETCD_USER", "MUSTER_ETCD_PASSWORD_FILE"} <= env


def test_what_hands_write_of_the_store_is_told_when_it_is_taken_out() -> None:
    made = injected(POD).text
    by_hand = made.replace(
        "            - {name: MUSTER_SLOTS,",
        "            - {name: MUSTER_ETCD_CACERT, value: /etc/store/ca.pem}\n"
        "            - {name: MUSTER_SLOTS,",
    ).replace("volumeMounts: [", "volumeMounts: [{name: store, mountPath: /etc/store}, ", 1)
    later = inject(by_hand, Request({}, {}))
    assert later.text == made
    news = [note for note in later.notes if note not in injected(POD).notes]
    assert [note.partition(" by hand")[0] for note in news] == [
        "Deployment/digits: container muster: MUSTER_ETCD_CACERT was written",
        "Deployment/digits: container muster: the volume store was mounted",
    ]
    assert all("--etcd-secret" in note for note in news)


def test_what_inject_wrote_of_the_store_goes_without_a_word() -> None:
    tls = {"etcd_endpoints": "https://etcd:2379", "etcd_secret": "client"}
    made = injected(POD, **tls, etcd_secret_keys="ca.crt,username,password").text
    fewer = inject(made, Request({"etcd_secret_keys": "ca.crt"}, {}))
    assert "MUSTER_ETCD_USER" in made
    assert "MUSTER_ETCD_USER" not in fewer.text
    assert fewer.notes == injected(POD, **tls).notes


@pytest.mark.parametrize(
    ("text", "old", "new", "said"),
    [
        (
            POD,
            "- {name: MUSTER_MIN,",
            f"- {{name: MUSTER_BELOW_MIN, value: commit}}\n{'':12}- {{name: MUSTER_MIN,",
            "commit",
        ),
        (SET, "MUSTER_BELOW_MIN, value: commit", "MUSTER_BELOW_MIN, value: hold", "hold"),
        (SET, "MUSTER_BELOW_MIN, value: commit", "MUSTER_BELOW_MIN, value: commit", "commit"),
    ],
)
def test_what_hands_say_of_too_few_nodes_stays(text: str, old: str, new: str, said: str) -> None:
    made = settled(edited(injected(text).text, old, new))
    assert variables(sidecars(made)[0])["MUSTER_BELOW_MIN"] == said


BIN = "/var/run/muster/bin"
NO_SIZE: dict[str, str | None] = {"min_nodes": None, "max_nodes": None, "job": None}
ELASTIC = CORPUS["elastic-mpi"]


def replicas(text: str) -> tuple[Any, Any]:
    """Launcher and Worker of an MPIJob."""
    (job,) = loaded(text)
    specs = job["spec"]["mpiReplicaSpecs"]
    return specs["Launcher"], specs["Worker"]


def horovod_container(replica: Any) -> Any:
    (found,) = replica["template"]["spec"]["containers"]
    return found


def test_an_mpijob_says_all_that_is_needed_by_itself() -> None:
    text = injected(ELASTIC, **NO_SIZE).text
    launcher, worker = replicas(text)
    before, _ = replicas(ELASTIC)
    assert horovod_container(launcher)["command"] == [
        f"{BIN}/muster-run",
        "--",
        *horovod_container(before)["command"],
    ]
    assert horovod_container(worker)["command"] == [
        f"{BIN}/muster-run",
        "--",
        f"{BIN}/muster-exec",
        "--",
    ]
    assert worker["restartPolicy"] == "ExitCode"
    assert "restartPolicy" not in launcher
    both = [variables(sidecar) for sidecar in sidecars(text)]
    for one, role in zip(both, ("launcher", None), strict=True):
        assert (one["MUSTER_MIN"], one["MUSTER_MAX"]) == ("1", "3")
        assert (one.get("MUSTER_ROLE"), one["MUSTER_TUNNEL_PORT"]) == (role, "9401")
    ports = [[port["name"] for port in sidecar["ports"]] for sidecar in sidecars(text)]
    assert ports == [["muster-http"], ["muster-http", "muster-tunnel"]]


@pytest.mark.parametrize(
    "change",
    [
        ("      replicas: 2\n", "      replicas: 2\n      restartPolicy: ExitCode\n"),
        ("      replicas: 2\n", "      replicas: 2\n      restartPolicy: Never\n"),
        ("kubeflow.org/v1", "kubeflow.org/v2beta1"),
        ("    Worker:   # how many\n      replicas: 2\n", "    Worker:\n"),
    ],
)
def test_it_comes_out_again_to_the_byte(change: tuple[str, str]) -> None:
    text = ELASTIC.replace(*change)
    assert text != ELASTIC
    made = lawful(text)
    policy = replicas(text)[1].get("restartPolicy")
    if "v2beta1" in text or policy is not None:
        assert replicas(made)[1].get("restartPolicy") == policy


def test_what_hands_make_of_the_policy_is_theirs() -> None:
    made = injected(ELASTIC).text.replace("restartPolicy: ExitCode", "restartPolicy: OnFailure")
    assert "restartPolicy: OnFailure" in removed(made)


@pytest.mark.parametrize(
    ("line", "slots", "bounds"),
    [
        (["horovodrun", "-np", "4", "--max-np", "9"], 4, ("1", "2")),
        (["horovodrun", "-np=9", "--min-np=5", "--max-np=16"], 4, ("2", "4")),
        (["sh", "-c", "cd /x && exec /opt/horovodrun --min-np 2 --max-np 3 python t.py"], 1, "23"),
    ],
)
def test_the_bounds_are_those_of_horovodrun_in_nodes(
    line: list[str], slots: int, bounds: tuple[str, str]
) -> None:
    (job,) = loaded(ELASTIC)
    job["spec"]["slotsPerWorker"] = slots
    horovod_container(job["spec"]["mpiReplicaSpecs"]["Launcher"])["command"] = line
    for sidecar in sidecars(injected(json.dumps(job), **NO_SIZE).text):
        said = variables(sidecar)
        assert (said["MUSTER_MIN"], said["MUSTER_MAX"]) == tuple(bounds)
        assert said["MUSTER_SLOTS"] == str(slots)


def test_a_pair_without_any_operator_is_told_which_is_which() -> None:
    line = ["horovodrun", "--min-np", "2", "--max-np", "4", "python", "t.py"]
    said = told(manifest("Job", command=line), role="launcher", min_nodes=None, max_nodes=None)
    assert (said["MUSTER_ROLE"], said["MUSTER_MIN"], said["MUSTER_MAX"]) == ("launcher", "2", "4")
    (worker,) = loaded(lawful(manifest("StatefulSet"), role="worker"))
    (one,) = worker["spec"]["template"]["spec"]["containers"]
    assert one["command"] == [f"{BIN}/muster-run", "--", f"{BIN}/muster-exec", "--"]


def test_what_cannot_be_is_refused() -> None:
    assert "leave --no-wrap out" in refused(ELASTIC, wrap="false")[0]
    without = ELASTIC[: ELASTIC.index("              command:")] + (
        "              args: [a]\n" + ELASTIC[ELASTIC.index("              resources:") :]
    )
    assert "give the command with horovodrun in it" in refused(without)[0]


ON_HOST = ELASTIC.replace(
    "          containers:", "          hostNetwork: true\n          containers:"
)


def test_the_tunnels_port_on_the_network_of_a_node_is_the_jobs_own() -> None:
    ports = set()
    for job in ("one", "other"):
        flags = {**NO_SIZE, "job": job}
        made = [variables(sidecar) for sidecar in sidecars(lawful(ON_HOST, **flags))]
        (port,) = {str(one["MUSTER_TUNNEL_PORT"]) for one in made}
        assert port not in {one["MUSTER_HTTP_PORT"] for one in made}
        notes = [note for note in injected(ON_HOST, **flags).notes if "hostNetwork" in note]
        assert [port in note for note in notes] == [False, True]
        ports.add(port)
    assert len({*ports, "9401"}) == 3


def test_a_port_that_the_tunnel_needs_is_refused_to_others() -> None:
    (health,) = refused(ELASTIC, **NO_SIZE, http_port="9401")
    assert "--http-port (MUSTER_HTTP_PORT) is 9401" in health
    name = "            - name: mpi-worker\n"
    with_port = ELASTIC.replace(name, f"{name}              ports: [{{containerPort: 9401}}]\n")
    (declared,) = refused(with_port, **NO_SIZE)
    assert "container mpi-worker has port 9401" in declared
