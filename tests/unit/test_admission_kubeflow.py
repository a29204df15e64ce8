# SPDX-License-Identifier: Apache-2.0
"""Kinds of objects are rows: pods of Kubeflow's operators and others that ask for a sidecar."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from console.remote.scaled_owner import scaled_owner
from controller.admission.decision import WITHOUT, Verdict, decide
from controller.cluster import paths
from controller.owner_kinds import owner_of, replicas_of
from injection import kinds
from injection.counts import of_replicas
from injection.injection import Request, inject
from injection.kinds import Kind, PodSigns, Scaling
from rdzv.errors import ConfigError
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import FLAGS, environ, loaded
from tests.support.injection.owners import defaulted, pods_of
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
        assert f"Job {name} is not its launcher" in refusal(made, mpijob(HOROVODRUN))
    made = worker()
    del made["metadata"]["labels"][LABEL + "job-role"]
    assert "whether it is launcher or worker" in refusal(made, mpijob(HOROVODRUN))


@pytest.mark.parametrize("kind", ["TFJob", "XGBoostJob", "PaddleJob", "JAXJob"])
def test_kinds_that_muster_does_not_know_stay_without_it(kind: str) -> None:
    made = pod(kind, "a", {LABEL + "replica-type": "worker"}, ["python", "t.py"])
    assert refusal(made).startswith(f"a {kind} of kubeflow.org does not train through Muster")


# --- A job of several parts is injected whole, or not at all. ---

ASKS = "muster.dev/inject"
GUIDE = loaded(CORPUS["elastic-mpi"])[0]
UNSIZED = {name: text for name, text in UNNAMED.items() if name not in ("min_nodes", "max_nodes")}


def elastic(change: Any = None, labels: tuple[Any, Any] = ("true", "true")) -> Any:
    """An MPIJob of the training-operator, as a guide has it, with a label on its templates."""
    made = copy.deepcopy(GUIDE)
    for role, label in zip(("Launcher", "Worker"), labels, strict=True):
        template = made["spec"]["mpiReplicaSpecs"][role]["template"]
        template["metadata"] = {"labels": {} if label is None else {ASKS: label}}
    if change is not None:
        change(made["spec"]["mpiReplicaSpecs"])
    return made


def verdicts(made: Any, flags: dict[str, str], *, read: bool = True) -> dict[str, Verdict]:
    """The verdict on a pod of each part."""
    return {
        path.split(".")[-2]: decide(
            one, "team", owner_of(one), seen if read else None, environ(flags)
        )
        for path, one, seen in pods_of(made)
    }


def test_the_guides_mpijob_is_injected_with_the_label_alone() -> None:
    found = verdicts(elastic(), UNSIZED)
    assert {part: one.injected for part, one in found.items()} == {"Launcher": True, "Worker": True}


def annotated(specs: Any, role: str) -> None:
    notes = {"muster.dev/min": "1", "muster.dev/max": "3"}
    specs[role]["template"]["metadata"]["annotations"] = notes


def without_size(specs: Any) -> None:
    """Only the launcher is told how many there are."""
    (container,) = specs["Launcher"]["template"]["spec"]["containers"]
    container["command"] = ["horovodrun", "python", "t.py"]
    annotated(specs, "Launcher")


def with_taken_port(specs: Any) -> None:
    (container,) = specs["Worker"]["template"]["spec"]["containers"]
    container["ports"] = [{"containerPort": 9401}]


def with_deepspeed(specs: Any) -> None:
    (container,) = specs["Launcher"]["template"]["spec"]["containers"]
    container["command"] = ["deepspeed", "t.py"]
    for role in specs:
        annotated(specs, role)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            elastic(without_size),
            "Worker of MPIJob mnist-elastic cannot be injected, and a job is injected whole or not"
            " at all: the annotation muster.dev/min is missing",
        ),
        (elastic(with_taken_port), "Worker of MPIJob mnist-elastic cannot be injected"),
        (elastic(with_deepspeed), "Launcher of MPIJob mnist-elastic cannot be injected"),
        (elastic(labels=("true", None)), "do not agree on the label muster.dev/inject: give both"),
        (elastic(labels=(None, "false")), "do not agree on the label muster.dev/inject: give both"),
    ],
)
def test_a_job_of_which_a_part_cannot_be_injected_is_admitted_whole_without_muster(
    made: Any, said: str
) -> None:
    found = verdicts(made, UNSIZED)
    assert not any(one.injected for one in found.values())
    assert any(said in one.reason for one in found.values())
    assert all(one.warnings for one in found.values())


def test_a_launcher_is_not_injected_if_its_workers_cannot_learn_the_size() -> None:
    for one in verdicts(elastic(), UNSIZED, read=False).values():
        assert not one.injected
    launcher = verdicts(elastic(), UNSIZED, read=False)["Launcher"]
    assert "MPIJob mnist-elastic cannot be read" in launcher.reason
    assert "give muster.dev/min and muster.dev/max to both of its templates" in launcher.reason

    def both(specs: Any) -> None:
        for role in specs:
            annotated(specs, role)

    for flags, made in ((UNSIZED, elastic(both)), (UNNAMED, elastic())):
        assert all(one.injected for one in verdicts(made, flags, read=False).values())


def test_a_part_that_has_its_sidecar_from_the_command_does_not_hold_up_the_other() -> None:
    made = elastic()
    text = inject(json.dumps(made), Request(UNNAMED, {})).text
    (injected,) = loaded(text)
    worker = injected["spec"]["mpiReplicaSpecs"]["Worker"]
    made["spec"]["mpiReplicaSpecs"]["Worker"] = worker
    found = verdicts(made, UNSIZED)
    assert found["Launcher"].injected
    assert found["Worker"].reason == "it has its sidecar"


def test_a_master_and_its_workers_are_one_job() -> None:
    made = loaded(CORPUS["anchors"])[0]
    specs = made["spec"]["pytorchReplicaSpecs"]
    specs["Master"] = copy.deepcopy(specs["Master"])
    assert all(one.injected for one in verdicts(made, UNNAMED).values())
    del made["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0][
        "command"
    ]
    assert not any(one.injected for one in verdicts(made, UNNAMED).values())


ROOT = Path(__file__).resolve().parents[2]
VERSION = "fleet.example.org/v1"
CREW = "fleet.example.org/crew"
FLEET = Kind(
    ("spec.crews.*.template",),
    plural="fleets",
    shown=(
        PodSigns(path="spec.crews.{part}.template", parts=("fleet.example.org/crew",), read=True),
    ),
    counts=of_replicas("spec.crews.*"),
    scaled=Scaling(("spec.crews.rowers.replicas",), index=re.compile(r"-(\d+)\Z")),
)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kinds.KINDS, ("fleet.example.org", "Fleet"), FLEET)


def template() -> dict[str, Any]:
    container = {"name": "c", "image": "i", "command": ["torchrun", "--nnodes=1:4", "t.py"]}
    return {"metadata": {}, "spec": {"containers": [container]}}


def fleet() -> dict[str, Any]:
    crews = {"rowers": {"replicas": 3, "template": template()}}
    metadata = {"name": "f", "uid": "u"}
    return {"apiVersion": VERSION, "kind": "Fleet", "metadata": metadata, "spec": {"crews": crews}}


def kinds_pod() -> dict[str, Any]:
    owner = {"apiVersion": VERSION, "kind": "Fleet", "name": "f", "uid": "u", "controller": True}
    labels = {CREW: "rowers"}
    return {
        "metadata": {"name": "f-rowers-0", "labels": labels, "ownerReferences": [owner]},
        "spec": template()["spec"],
    }


def test_a_row_injects() -> None:
    injected = inject(json.dumps(fleet()), Request(FLAGS, {}))
    assert '"name": "muster"' in json.dumps(loaded(injected.text))


def test_a_row_admits() -> None:
    owner = owner_of(kinds_pod())
    assert owner is not None
    assert (owner.path, owner.obstacle) == ("spec.crews.rowers.template", None)
    verdict = decide(kinds_pod(), "team", owner, fleet(), environ(FLAGS))
    assert verdict.injected, verdict.reason


def test_a_row_counts_and_is_read() -> None:
    assert replicas_of(fleet()) == 3
    assert paths.owner(VERSION, "Fleet", "team", "f") == (
        "/apis/fleet.example.org/v1/namespaces/team/fleets/f"
    )


def test_a_row_scales() -> None:
    owner = scaled_owner(owner_of(kinds_pod()), "/f", fleet())
    assert owner.count == 3
    assert owner.change(4) == ("/f", {"spec": {"crews": {"rowers": {"replicas": 4}}}})


def test_without_a_row_nothing_is_read_or_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(kinds.KINDS, ("fleet.example.org", "Fleet"))
    assert paths.owner(VERSION, "Fleet", "team", "f") is None
    with pytest.raises(ConfigError, match="kubectl edit fleet/f"):
        scaled_owner(owner_of(kinds_pod()), None, fleet())


def test_the_chart_gives_the_rights_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(kinds.KINDS, ("fleet.example.org", "Fleet"))
    script = [sys.executable, "scripts/generate-chart-docs", "--print-kinds"]
    made = subprocess.run(script, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert (ROOT / "charts" / "muster" / "files" / "kinds.yaml").read_text() == made
    assert "pytorchjobs" in made
