# SPDX-License-Identifier: Apache-2.0
"""What ``muster inject`` says where it will not do what a user may think, and what pages show."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from agent.rundir.programs import PROGRAMS, program
from injection import cautions
from injection.cautions import NO_STORAGE
from injection.injection import Request, inject
from injection.settings import TABLE
from injection.sidecar import RUN_DIR_SIZE
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import (
    FLAGS,
    ON_LAUNCHES,
    SENTENCES,
    injected,
    manifest,
    of_sentences,
)
from tests.support.sources import ROOT
from tests.support.waiting import DEADLINE_S

PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
CAUTIONS = {*vars(cautions)} & {*SENTENCES} - {*ON_LAUNCHES, "NO_STORAGE"}


def said(text: str, /, **flags: str | None) -> list[str]:
    """The cautions, without the object that each begins with."""
    return [*of_sentences(text, CAUTIONS, **flags)]


@pytest.mark.parametrize("name", sorted({*SENTENCES} - {"NEEDS_SSHD", "LACKS_LASTING"}))
def test_the_page_has_every_sentence(name: str) -> None:
    words = SENTENCES[name].replace("{status}", "143")
    sentence = re.sub(r"{(\w+)}", lambda found: found[1].upper(), words)
    assert sentence in " ".join(PAGE.split())


LAUNCHER = cautions.LAUNCHER.format(name="launcher")
WORKERS = cautions.WORKERS.format(name="worker")
LASTING = (
    "spec.mpiReplicaSpecs.Worker.restartPolicy: ExitCode is added: without it the operator ends the"
    " whole job with the first worker that fails"
)
NEVER = (
    "spec.mpiReplicaSpecs.Worker.restartPolicy is Never: kept, and with it the operator ends the"
    " whole job with the first worker that fails: make it ExitCode"
)


def launched(command: str) -> str:
    lasting: str = CORPUS["mpi"].replace("replicas: 2", "restartPolicy: ExitCode")
    return lasting.replace("[horovodrun, python, train.py]", command)


def past_ours(word: str) -> list[str]:
    return [LAUNCHER, cautions.PAST_OURS.format(name="launcher", word=word, path=cautions.OURS)]


MPI_ALONE = [cautions.MPI_ALONE.format(name="launcher", program="mpirun")]
"""Without the word that a horovodrun gets a host list: there is none."""
LAUNCHES: list[tuple[str, list[str]]] = [
    ("[mpirun, -np, '2', python, train.py]", MPI_ALONE),
    ("[sh, -c, '/usr/bin/mpirun -np 2 python train.py']", MPI_ALONE),
    ("[sh, -c, 'horovodrun -np 2 python train.py']", [LAUNCHER]),
    ("[/opt/conda/bin/horovodrun, python, train.py]", [LAUNCHER]),
    (f"[sh, -c, '. /opt/conda/bin/activate; {cautions.OURS} -np 2 python train.py']", [LAUNCHER]),
    (
        "[bash, -c, 'source /opt/conda/bin/activate && horovodrun -np 2 python train.py']",
        past_ours("/opt/conda/bin/activate"),
    ),
    ("[bash, -c, 'conda activate && horovodrun -np 2 python train.py']", past_ours("activate")),
    (
        "[sh, -c, 'cd /x; /opt/conda/bin/horovodrun -np 2 python train.py']",
        past_ours("/opt/conda/bin/horovodrun"),
    ),
]


def not_run(kind: str, version: str) -> str:
    return cautions.NOT_RUN.format(kind=kind, version=version)


MASTER = (
    "spec.pytorchReplicaSpecs.Master: the whole job ends with its Master,"
    " wherever the others are: make it one more Worker"
)
SHARED = (
    "spec.template.spec.shareProcessNamespace: a container that runs as root, or as the"
    " sidecar's user, can read the Secret etcd-client through the sidecar's /proc: leave it out"
)
TLS: dict[str, str | None] = {"etcd_endpoints": "https://e:1", "etcd_secret": "etcd-client"}
SHARING = manifest(command=["torchrun"], pod={"shareProcessNamespace": True})
OWN = {
    "PET_RDZV_ENDPOINT": "head:29400",
    "PET_MAX_RESTARTS": "3",
    "PET_RDZV_CONF": "join_timeout=900",
    "PET_NPROC_PER_NODE": "2",
}
OWN_VARIABLES = manifest(
    command=["torchrun"], env=[{"name": name, "value": value} for name, value in OWN.items()]
)
OVERRULED = [
    "container c sets PET_RDZV_ENDPOINT: muster-run overrules it",
    "container c sets PET_MAX_RESTARTS: kept; the death of a node may use a restart of each"
    " torchrun",
    "container c sets PET_RDZV_CONF: muster-run overrules the keys that Muster needs, and keeps"
    " the others",
]


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        (CORPUS["elastic-pytorch-job"], {}, []),
        (CORPUS["mpi"], {}, [LAUNCHER, WORKERS, LASTING]),
        (
            CORPUS["mpi"].replace("replicas: 2", "restartPolicy: Never"),
            {},
            [LAUNCHER, WORKERS, NEVER],
        ),
        (CORPUS["mpi"].replace("replicas: 2", "restartPolicy: ExitCode"), {}, [LAUNCHER, WORKERS]),
        *((launched(command), {}, [*said, WORKERS]) for command, said in LAUNCHES),
        (
            CORPUS["mpi"].replace("kubeflow.org/v1", "kubeflow.org/v2beta1"),
            {},
            [not_run("MPIJob", "kubeflow.org/v2beta1"), LAUNCHER, WORKERS],
        ),
        (
            CORPUS["training-job"],
            {},
            # Once, though there are two templates.
            [
                not_run("TrainingJob", "kai.alibabacloud.com/v1alpha1"),
                cautions.LAUNCHER.format(name="l"),
                cautions.WORKERS.format(name="w"),
            ],
        ),
        (CORPUS["anchors"], {}, [MASTER]),
        (SHARING, TLS, [SHARED]),
        (SHARING, {}, []),
        (manifest(command=["torchrun"]), TLS, []),
        (OWN_VARIABLES, {}, OVERRULED),
        (OWN_VARIABLES, {"wrap": "false"}, []),
    ],
)
def test_what_will_not_work_is_said(
    text: str, flags: dict[str, str | None], expected: list[str]
) -> None:
    assert said(text, **flags) == expected


def warned(text: str) -> bool:
    levels = [note.level for note in injected(text).notes if "no volume that outlives" in note]
    assert set(levels) <= {"warning"}
    return bool(levels)


def mounting(**volume: Any) -> str:
    mount = {"name": "v", "mountPath": "/v"}
    return manifest(
        command=["torchrun"], volumeMounts=[mount], pod={"volumes": [{"name": "v", **volume}]}
    )


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (manifest(command=["torchrun", "t.py"]), True),
        (mounting(emptyDir={"medium": "Memory"}), True),
        (mounting(ephemeral={"volumeClaimTemplate": {}}), True),
        (mounting(configMap={"name": "c"}), True),
        (mounting(csi={"driver": "secrets-store.csi.k8s.io"}), True),
        (mounting(hostPath={"path": "/dev/shm"}), True),
        # A StatefulSet's own claim: no other pod has it.
        (manifest("StatefulSet", command=["a"], volumeMounts=[{"name": "claimed"}]), True),
        (manifest(command=["a"], pod={"volumes": [{"name": "v", "nfs": {}}]}), True),
        (mounting(persistentVolumeClaim={"claimName": "c"}), False),
        (mounting(nfs={"server": "s"}), False),
        (mounting(csi={"driver": "gcsfuse.csi.storage.gke.io"}), False),
        (mounting(hostPath={"path": "/mnt/lustre"}), False),
        (manifest(command=["sh", "-c", "torchrun t.py --to s3://bucket/x"]), False),
        (manifest(command=["a"], env=[{"name": "TO", "value": "gs://bucket"}]), False),
        (manifest(command=["a"], env=[{"name": "PROXY", "value": "http://p"}]), True),
        # Horovod's commits are in memory.
        (CORPUS["elastic-mpi"], False),
    ],
)
def test_a_checkpoint_that_goes_with_its_pod_is_warned_of(text: str, lost: bool) -> None:
    assert warned(text) == lost
    if lost:
        assert any(NO_STORAGE.format(name="c") in note for note in injected(text).notes)


EXAMPLES = ROOT / "examples" / "kubernetes"


def test_the_page_leads_to_each_example() -> None:
    names = [path.name for path in EXAMPLES.glob("*.yaml")]
    assert names
    assert [name for name in names if f"(../examples/kubernetes/{name})" not in PAGE] == []


def test_the_page_leads_to_the_mpijob_which_is_taken_as_it_is() -> None:
    text = (EXAMPLES / "horovod" / "mpijob.yaml").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "horovod.md").read_text(encoding="utf-8")
    assert "(../examples/kubernetes/horovod/mpijob.yaml)" in page
    assert injected(text, job=None, min_nodes=None, max_nodes=None).text != text


def test_the_pair_on_the_page_is_taken_as_it_says() -> None:
    text = (EXAMPLES / "horovod" / "pair.yaml").read_text(encoding="utf-8")
    sizes = {"min_nodes": "1", "max_nodes": "3"}
    for name, role in (
        ("Job/digits-launcher", "launcher"),
        ("StatefulSet/digits-worker", "worker"),
    ):
        flags = {**FLAGS, **sizes, "role": role}
        text = inject(text, Request(flags, {}, objects=(name,))).text
    assert text.count('value: "9401"') == 2


def test_the_sidecar_on_the_page_is_the_one_that_is_made() -> None:
    text = (EXAMPLES / "deployment.yaml").read_text(encoding="utf-8")
    made = injected(text, job=None).text
    part = made[made.index("      initContainers:") : made.index("      containers:")]
    assert indent(dedent(part), "    ") in PAGE


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_an_image_must_have_is_on_the_page(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(program(name))
    assert program(name) == path.read_bytes(), "the same each time"
    path.chmod(0o755)
    done = subprocess.run(
        [path, "--", "true"],
        env={"PATH": "/none"},
        timeout=DEADLINE_S,
        check=False,
        capture_output=True,
    )
    assert b"no python3 in the PATH" in done.stderr
    (row,) = [line for line in PAGE.splitlines() if "no `python3`" in line]
    assert f"with {done.returncode} where there is no Python" in row
    assert f"`{name}`" in row
    assert "`/bin/sh`" in row


def test_every_option_on_the_page_is_there() -> None:
    known = {setting.flag for setting in TABLE.values()}
    known |= {"--no-wrap", "--object", "--template-path", "--diff", "--remove"}
    lines = [
        line
        for line in PAGE.splitlines()
        if "inject " in line and not re.search("kubectl drain|accelerate launch", line)
    ]
    named = set(re.findall(r"(?<!\S)--[a-z-]+", " ".join(lines)))
    assert named
    assert named <= known
    assert RUN_DIR_SIZE.replace("Mi", " MiB") in PAGE
