# SPDX-License-Identifier: Apache-2.0
"""The cluster, once a session: made if it is not there, and then ended again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.kubelab import UNFIT, Kubelab
from tests.e2e.kubelab_claim import claimed
from tests.e2e.sidecar_image import IMAGE, sidecar_archive

START_TIMEOUT_S = 900.0
"""The first time, Kubernetes is built."""


@pytest.fixture(scope="session")
def kubelab() -> Iterator[Kubelab]:
    """The cluster of ``scripts/kubelab``; a test without it is skipped where a machine cannot."""
    lab = Kubelab()
    _go_through(lab, "prepare")
    with claimed(lab):
        _go_through(lab, "up")
        yield lab


def _go_through(lab: Kubelab, command: str) -> None:
    """Run a command that goes on where it failed before: one failure would fail every test here."""
    said = []
    for _ in range(2):
        done = lab.run(command, timeout_s=START_TIMEOUT_S)
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
