# SPDX-License-Identifier: Apache-2.0
"""The cluster, once a session: made if it is not there, and then ended again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from subprocess import TimeoutExpired

import pytest

from sidecar_image.engine import CACHE
from sidecar_image.image import IMAGE, sidecar_archive
from tests.support.cluster.claim import claimed
from tests.support.cluster.lab import ROOT, UNFIT, KubectlFailed, Kubelab
from tests.support.programs import ran

PREPARE_TIMEOUT_S = 900.0
"""The first time, Kubernetes is built."""
UP_TIMEOUT_S = 600.0
OPERATOR_TIMEOUT_S = 1500.0
"""The first time, the training-operator is built."""


@pytest.fixture(scope="session")
def kubelab() -> Iterator[Kubelab]:
    """The cluster of ``scripts/kubelab``; a test without it is skipped where a machine cannot."""
    lab = Kubelab()
    with ExitStack() as until_the_end:
        with _time_of_its_own():
            _go_through(lab, "prepare", PREPARE_TIMEOUT_S)
            until_the_end.enter_context(claimed(lab))
            _go_through(lab, "up", UP_TIMEOUT_S)
        yield lab


@contextmanager
def _time_of_its_own() -> Iterator[None]:
    """Take none of the time of whichever test came first: what is done here has its own limits."""
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s)


def _go_through(lab: Kubelab, command: str, timeout_s: float) -> None:
    """Run a command that goes on where it failed before: one failure would fail every test here."""
    said = []
    for _ in range(2):
        try:
            done = lab.run(command, timeout_s=timeout_s)
        except TimeoutExpired:
            said.append(f"scripts/kubelab {command} has not ended within {timeout_s:g} s")
            continue
        if done.returncode == UNFIT:
            pytest.skip(done.stderr.strip())
        if done.returncode == 0:
            return
        said.append(f"scripts/kubelab {command} ended with {done.returncode}: {done.stderr}")
    pytest.fail("\n".join(said), pytrace=False)


@pytest.fixture(scope="session")
def sidecar_in_lab(kubelab: Kubelab) -> str:
    """The sidecar's image of the present working tree, loaded into both nodes; its name."""
    kubelab.command("load", str(sidecar_archive()), timeout_s=300)
    return IMAGE


@pytest.fixture(scope="session")
def operator(kubelab: Kubelab) -> Kubelab:
    """The cluster with Kubeflow's training-operator in it."""
    ready = ("rollout", "status", "deployment/training-operator", "--timeout=5s")
    with _time_of_its_own():
        try:
            kubelab.kubectl("-n", "kubeflow", *ready)
        except KubectlFailed:
            kubelab.command("operator", timeout_s=OPERATOR_TIMEOUT_S)
    return kubelab


@pytest.fixture(scope="session")
def monitoring(kubelab: Kubelab) -> Iterator[Kubelab]:
    """The cluster with the Prometheus Operator's CRDs in it; no operator runs."""
    program = ROOT / "scripts" / "toolchain" / "kubelab-programs"
    with _time_of_its_own():
        made = ran(program, "monitoring", timeout_s=OPERATOR_TIMEOUT_S, MUSTER_CACHE=str(CACHE))
    assert made.returncode == 0, made.stderr
    folder = made.stdout.strip()
    kubelab.kubectl("apply", "--server-side", "-f", folder)
    kubelab.kubectl("wait", "--for=condition=Established", "-f", folder, "--timeout=50s")
    yield kubelab
    kubelab.kubectl("delete", "-f", folder)
