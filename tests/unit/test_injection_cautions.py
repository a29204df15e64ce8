# SPDX-License-Identifier: Apache-2.0
"""What ``muster inject`` says where it will not do what a user expects, in words that stay."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from injection import cautions
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import injected, manifest

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
SENTENCES = [
    cautions.LAUNCHER,
    cautions.WORKERS,
    cautions.MPI_ALONE,
    cautions.PAST_OURS,
    cautions.LASTING,
    cautions.NOT_LASTING,
    cautions.NOT_RUN,
    cautions.MASTER,
    cautions.SHARED_PROCESSES,
    cautions.OVERRULED,
    cautions.RESTARTS_KEPT,
    cautions.OPTIONS_MERGED,
]
PATTERNS = [re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(text))) for text in SENTENCES]


def said(text: str, /, **flags: str | None) -> list[str]:
    """The cautions, without the object that each begins with."""
    notes = [note.partition(": ")[2] for note in injected(text, **flags).notes]
    return [note for note in notes if any(pattern.fullmatch(note) for pattern in PATTERNS)]


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


def test_the_page_has_every_sentence() -> None:
    page = " ".join(PAGE.read_text().split())
    for sentence in SENTENCES:
        assert re.sub(r"{(\w+)}", lambda found: found[1].upper(), sentence) in page
