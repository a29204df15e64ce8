# SPDX-License-Identifier: Apache-2.0
"""The cluster, once a session: made if it is not there, and then ended again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.e2e.kubelab import PROGRAM, UNFIT, Kubelab
from tests.e2e.sidecar_image import IMAGE, sidecar_archive

START_TIMEOUT_S = 900.0
"""The first time, Kubernetes is built."""


@pytest.fixture(scope="session")
def kubelab() -> Iterator[Kubelab]:
    """The cluster of ``scripts/kubelab``; a test without it is skipped where a machine cannot."""
    lab = Kubelab()
    was_there, unfit = lab.is_there(), False
    try:
        done = subprocess.run(
            [str(PROGRAM), "up"],
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
        unfit = done.returncode == UNFIT
        if unfit:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        yield lab
    finally:
        # Also of one that was made in part only. Not of one of which a node was lost before.
        if not (was_there or unfit):
            lab.command("down", timeout_s=300)
    if not was_there:
        assert lab.left_behind() == []


@pytest.fixture(scope="session")
def sidecar_in_lab(kubelab: Kubelab) -> str:
    """The sidecar's image of the present working tree, loaded into both nodes; its name."""
    kubelab.command("load", str(sidecar_archive()), timeout_s=300)
    return IMAGE
