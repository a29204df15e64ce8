# SPDX-License-Identifier: Apache-2.0
"""Pods of Kubeflow's operators that ask for a sidecar: one job for each, or none and a reason."""

from __future__ import annotations

from typing import Any

import pytest

from controller.admission.decision import WITHOUT, Verdict, decide
from controller.admission.owner import owner_of
from tests.support.injection.injecting import FLAGS, environ
from tests.support.injection.owners import defaulted
from tests.support.injection.patching import patched

LABEL = "training.kubeflow.org/"
OPERATORS = {LABEL + "operator-name": "mpi-operator", LABEL + "job-name": "pi"}
UNNAMED = {name: text for name, text in FLAGS.items() if name != "job"}
HOROVODRUN = [
    "horovodrun",
    "-np",
    "2",
    "--host-discovery-script",
    "/etc/mpi/x.sh",
    "python",
    "t.py",
]


def pod(kind: str, name: str, labels: dict[str, str], command: list[str]) -> dict[str, Any]:
    version = {"Job": "batch/v1", "MPIJob": "kubeflow.org/v2beta1"}.get(kind, "kubeflow.org/v1")
    maker = {"apiVersion": version, "kind": kind, "name": name, "uid": "u", "controller": True}
    made = defaulted({"spec": {"containers": [{"name": "c", "image": "i", "command": command}]}})
    made["metadata"] = {"labels": labels, "ownerReferences": [maker]}
    return made


def launcher(command: list[str]) -> dict[str, Any]:
    labels = {**OPERATORS, LABEL + "job-role": "launcher"}
    return pod("Job", "pi-launcher", labels, command)


def worker() -> dict[str, Any]:
    labels = {**OPERATORS, LABEL + "job-role": "worker", LABEL + "replica-index": "0"}
    return pod("MPIJob", "pi", labels, ["/usr/sbin/sshd", "-De"])


def mpijob(command: list[str]) -> dict[str, Any]:
    specs = {
        role: {"replicas": 1, "template": {"spec": one["spec"]}}
        for role, one in (("Launcher", launcher(command)), ("Worker", worker()))
    }
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": "pi"},
        "spec": {"slotsPerWorker": 1, "mpiReplicaSpecs": specs},
    }


def admitted(made: dict[str, Any], read: Any, flags: dict[str, str]) -> tuple[Verdict, Any]:
    verdict = decide(made, "team", owner_of(made), read, environ(flags))
    return verdict, patched(made, verdict.patch)


def refusal(made: dict[str, Any], read: Any = None) -> str:
    verdict, after = admitted(made, read, UNNAMED)
    assert after == made
    (warning,) = verdict.warnings
    return warning.removeprefix(WITHOUT)


def test_mpi_operators_launcher_and_workers_are_one_job() -> None:
    told = []
    for made in (launcher(HOROVODRUN), worker()):
        # min and max come from the launcher's command, for the workers' pods as well.
        flags = {k: v for k, v in UNNAMED.items() if k != "min_nodes"}
        verdict, after = admitted(made, mpijob(HOROVODRUN), flags)
        assert verdict.injected, verdict.reason
        (sidecar,) = after["spec"]["initContainers"]
        env = {one["name"]: one.get("value") for one in sidecar["env"]}
        told.append([env.get(f"MUSTER_{k}") for k in ("JOB", "ROLE", "MIN", "TUNNEL_PORT")])
    assert told == [["pi", "launcher", "2", "9401"], ["pi", None, "2", "9401"]]


@pytest.mark.parametrize("made", [launcher(["mpirun", "a"]), worker()])
def test_mpirun_that_needs_sshd_stays_without_muster(made: dict[str, Any]) -> None:
    assert "container c runs mpirun, which reaches its workers by sshd" in refusal(
        made, mpijob(["mpirun", "a"])
    )


@pytest.mark.parametrize("made", [launcher(HOROVODRUN), worker()])
def test_mpijob_that_cannot_be_read_stays_without_muster(made: dict[str, Any]) -> None:
    assert "MPIJob pi cannot be read" in refusal(made)


def test_pods_that_only_look_like_a_launcher_stay_without_muster() -> None:
    for name, role in (("other", "launcher"), ("pi-launcher", "worker")):
        made = launcher(HOROVODRUN)
        made["metadata"]["ownerReferences"][0]["name"] = name
        made["metadata"]["labels"][LABEL + "job-role"] = role
        assert f"Job {name} is no launcher of mpi-operator's" in refusal(made, mpijob(HOROVODRUN))
    made = worker()
    del made["metadata"]["labels"][LABEL + "job-role"]
    assert "whether it is launcher or worker" in refusal(made, mpijob(HOROVODRUN))


@pytest.mark.parametrize("kind", ["TFJob", "XGBoostJob", "PaddleJob", "JAXJob"])
def test_kinds_that_muster_does_not_know_stay_without_it(kind: str) -> None:
    made = pod(kind, "a", {LABEL + "replica-type": "worker"}, ["python", "t.py"])
    assert refusal(made).startswith(f"a {kind} of kubeflow.org does not train through Muster")
