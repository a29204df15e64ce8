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
    again,
    edited,
    injected,
    loaded,
    manifest,
    pods,
    refused,
    removed,
    sidecars,
    variables,
)

ENV = "          env:\n"
SOURCE = "{name: PYTHONPATH, value: /src}"
RESTARTS = '{name: PET_MAX_RESTARTS, value: "3"}'
BY_HAND = f"{ENV}            - {SOURCE}\n            - {RESTARTS}\n"
SET = edited(POD, "kind: Deployment", "kind: StatefulSet")


def container(text: str, name: str = "trainer") -> Any:
    (pod,) = pods(loaded(text))
    return next(c for c in pod["containers"] if c["name"] == name)


def settled(text: str) -> str:
    """Injected once more; a third time changes nothing."""
    result = again(text)
    assert again(result) == result
    return result


@pytest.mark.parametrize("wrap", ["true", "false"])
def test_variables_written_later_stay_with_and_without_the_sidecar(wrap: str) -> None:
    by_hand = edited(injected(POD, wrap=wrap).text, ENV, BY_HAND)
    env = container(settled(by_hand))["env"]
    assert {"name": "PYTHONPATH", "value": "/src"} in env
    assert {"name": "PET_MAX_RESTARTS", "value": "3"} in env
    assert [v["name"] for v in env].count("PYTHONPATH") == 1
    for text in (by_hand, settled(by_hand)):
        assert removed(text) == edited(POD, ENV, BY_HAND)


def test_a_container_that_was_renamed_later_is_found_and_keeps_its_name() -> None:
    by_hand = edited(injected(POD).text, "name: trainer", "name: learner")
    assert container(settled(by_hand), "learner")["command"][0].endswith("/muster-run")
    for text in (by_hand, settled(by_hand)):
        assert removed(text) == edited(POD, "name: trainer", "name: learner")


HOOK = '["/var/run/muster/bin/muster-hold"]'
MOUNT = "{name: muster-run, mountPath: /logs/muster}"


@pytest.mark.parametrize(
    ("old", "new", "key", "kept"),
    [
        (
            '{name: PET_MAX_RESTARTS, value: "10"}',
            RESTARTS,
            "env",
            {"name": "PET_MAX_RESTARTS", "value": "3"},
        ),
        (HOOK, '["sh"]', "lifecycle", {"preStop": {"exec": {"command": ["sh"]}}}),
    ],
)
def test_what_was_changed_later_stays(old: str, new: str, key: str, kept: Any) -> None:
    by_hand = edited(injected(POD, wrap="false").text, old, new)
    for text in (settled(by_hand), removed(by_hand)):
        found = container(text)[key]
        assert kept in (found if isinstance(found, list) else [found])


def test_a_mount_of_the_run_directory_elsewhere_stays() -> None:
    by_hand = edited(injected(POD).text, "volumeMounts: [", f"volumeMounts: [{MOUNT}, ")
    kept = container(settled(by_hand))["volumeMounts"]
    assert {"name": "muster-run", "mountPath": "/logs/muster"} in kept


def test_what_a_server_adds_to_a_variable_is_no_change_of_it() -> None:
    made = injected(POD, wrap="false").text
    live = made.replace("{fieldPath: status.podIP}", "{apiVersion: v1, fieldPath: status.podIP}")
    assert live != made
    assert removed(live) == POD


MOUNTS_BY_HAND = """\
          env:
            - {name: PYTHONPATH, value: /log}
          volumeMounts:
            - {name: muster-run, mountPath: /var/run/muster, readOnly: true}
"""


@pytest.mark.parametrize("wrap", ["true", "false"])
def test_another_container_is_left_alone(wrap: str) -> None:
    cat = "          command: [cat]\n"
    two = f"{POD}        - name: log\n          image: l\n{cat}"
    by_hand = edited(injected(two, wrap=wrap, container="trainer").text, cat, MOUNTS_BY_HAND)
    for text in (settled(by_hand), removed(by_hand)):
        assert container(text, "log") == container(by_hand, "log")


def test_labels_and_annotations_of_others_stay() -> None:
    made = injected(POD).text
    by_hand = edited(made, "labels: {", "labels: {muster.dev/team: vision, ")
    note = '        muster.dev/ticket: "7"\n'
    by_hand = edited(by_hand, "annotations:\n", f"annotations:\n{note}")
    for text in (settled(by_hand), removed(by_hand)):
        metadata = loaded(text)[0]["spec"]["template"]["metadata"]
        assert metadata["labels"]["muster.dev/team"] == "vision"
        assert metadata["annotations"]["muster.dev/ticket"] == "7"


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


def test_a_number_of_a_pod_that_is_gone_leaves_nothing_behind() -> None:
    made = edited(injected(SET).text, "kind: StatefulSet", "kind: Deployment")
    assert "MUSTER_INDEX" in made
    assert "MUSTER_INDEX" not in settled(made)


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
    told = inject(by_hand, Request({}, {}))
    assert told.text == made
    news = [note for note in told.notes if note not in injected(POD).notes]
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


def below_min(text: str) -> Any:
    return variables(sidecars(text)[0]).get("MUSTER_BELOW_MIN")


def test_what_hands_say_of_too_few_nodes_stays() -> None:
    by_hand = injected(POD).text.replace(
        "- {name: MUSTER_MIN,",
        "- {name: MUSTER_BELOW_MIN, value: commit}\n" + 12 * " " + "- {name: MUSTER_MIN,",
    )
    assert below_min(settled(by_hand)) == "commit"
    held = edited(
        injected(SET).text, "MUSTER_BELOW_MIN, value: commit", "MUSTER_BELOW_MIN, value: hold"
    )
    assert below_min(settled(held)) == "hold"


def test_what_a_kind_says_of_too_few_nodes_goes_with_the_kind() -> None:
    made = injected(SET).text
    assert below_min(settled(made)) == "commit"
    assert below_min(settled(edited(made, "kind: StatefulSet", "kind: Deployment"))) is None


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
    told = [variables(sidecar) for sidecar in sidecars(text)]
    for one, role in zip(told, ("launcher", None), strict=True):
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
    made = injected(text).text
    assert removed(made) == text
    assert again(made) == made
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
        told = variables(sidecar)
        assert (told["MUSTER_MIN"], told["MUSTER_MAX"]) == tuple(bounds)
        assert told["MUSTER_SLOTS"] == str(slots)


def test_a_pair_without_any_operator_is_told_which_is_which() -> None:
    line = ["horovodrun", "--min-np", "2", "--max-np", "4", "python", "t.py"]
    launcher = injected(
        manifest("Job", command=line), role="launcher", min_nodes=None, max_nodes=None
    )
    told = variables(sidecars(launcher.text)[0])
    assert (told["MUSTER_ROLE"], told["MUSTER_MIN"], told["MUSTER_MAX"]) == ("launcher", "2", "4")
    worker = injected(manifest("StatefulSet"), role="worker")
    (pod,) = loaded(worker.text)
    (one,) = pod["spec"]["template"]["spec"]["containers"]
    assert one["command"] == [f"{BIN}/muster-run", "--", f"{BIN}/muster-exec", "--"]
    assert removed(worker.text) == manifest("StatefulSet")
    assert again(worker.text) == worker.text


def test_what_cannot_be_is_refused() -> None:
    assert "leave --no-wrap out" in refused(ELASTIC, wrap="false")[0]
    without = ELASTIC[: ELASTIC.index("              command:")] + (
        "              args: [a]\n" + ELASTIC[ELASTIC.index("              resources:") :]
    )
    assert "give the command with horovodrun in it" in refused(without)[0]


ON_HOST = ELASTIC.replace(
    "          containers:", "          hostNetwork: true\n          containers:"
)


def tunnel_port(text: str, **settings: str | None) -> str:
    """The port that both roles of the job are told."""
    told = [variables(sidecar) for sidecar in sidecars(injected(text, **settings).text)]
    (port,) = {str(one["MUSTER_TUNNEL_PORT"]) for one in told}
    return port


def test_the_tunnels_port_on_the_network_of_a_node_is_the_jobs_own() -> None:
    one, other = (tunnel_port(ON_HOST, **{**NO_SIZE, "job": job}) for job in ("one", "other"))
    assert len({one, other, "9401"}) == 3
    result = injected(ON_HOST, **{**NO_SIZE, "job": "one"})
    told = [note for note in result.notes if "hostNetwork" in note]
    assert [one in note for note in told] == [False, True]
    assert {variables(sidecar)["MUSTER_HTTP_PORT"] for sidecar in sidecars(result.text)} != {one}
    assert removed(result.text) == ON_HOST


def test_a_port_that_the_tunnel_needs_is_refused_to_others() -> None:
    (health,) = refused(ELASTIC, **NO_SIZE, http_port="9401")
    assert "--http-port (MUSTER_HTTP_PORT) is 9401" in health
    name = "            - name: mpi-worker\n"
    with_port = ELASTIC.replace(name, f"{name}              ports: [{{containerPort: 9401}}]\n")
    (declared,) = refused(with_port, **NO_SIZE)
    assert "container mpi-worker has port 9401" in declared
