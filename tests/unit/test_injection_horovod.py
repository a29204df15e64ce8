# SPDX-License-Identifier: Apache-2.0
"""What ``muster inject`` makes of the pods of a Horovod job, and how it is undone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import (
    again,
    injected,
    loaded,
    manifest,
    refused,
    removed,
    sidecars,
    variables,
)

BIN = "/var/run/muster/bin"
NO_SIZE: dict[str, str | None] = {"min_nodes": None, "max_nodes": None, "job": None}
ELASTIC = CORPUS["elastic-mpi"]


def replicas(text: str) -> tuple[Any, Any]:
    """Launcher and Worker of an MPIJob."""
    (job,) = loaded(text)
    specs = job["spec"]["mpiReplicaSpecs"]
    return specs["Launcher"], specs["Worker"]


def container(replica: Any) -> Any:
    (found,) = replica["template"]["spec"]["containers"]
    return found


def test_an_mpijob_says_all_that_is_needed_by_itself() -> None:
    text = injected(ELASTIC, **NO_SIZE).text
    launcher, worker = replicas(text)
    before, _ = replicas(ELASTIC)
    assert container(launcher)["command"] == [
        f"{BIN}/muster-run",
        "--",
        *container(before)["command"],
    ]
    assert container(worker)["command"] == [
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
    container(job["spec"]["mpiReplicaSpecs"]["Launcher"])["command"] = line
    for sidecar in sidecars(injected(json.dumps(job), **NO_SIZE).text):
        told = variables(sidecar)
        assert (told["MUSTER_MIN"], told["MUSTER_MAX"]) == tuple(bounds)
        assert told["MUSTER_SLOTS"] == str(slots)


def test_a_pair_without_any_operator_is_told_which_is_which() -> None:
    line = ["horovodrun", "--min-np", "2", "--max-np", "4", "python", "t.py"]
    launcher = injected(
        manifest("Job", command=line), horovod="launcher", min_nodes=None, max_nodes=None
    )
    told = variables(sidecars(launcher.text)[0])
    assert (told["MUSTER_ROLE"], told["MUSTER_MIN"], told["MUSTER_MAX"]) == ("launcher", "2", "4")
    worker = injected(manifest("StatefulSet"), horovod="worker")
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
