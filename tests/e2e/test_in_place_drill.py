# SPDX-License-Identifier: Apache-2.0
"""A job lives through changes of every kind, in place: real torchruns, sidecars and etcd."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from older_torch import SETUP_TIMEOUT_S, python_with_torch
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.training.in_place_drill import FEWEST, MOST, SCRIPT, Drill, plan
from tests.support.training.job import RunJob

pytestmark = [pytest.mark.torch, pytest.mark.etcd]

NEAR = 1e-5


@pytest.fixture(scope="module")
def etcd() -> Iterator[list[str]]:
    with EtcdCluster(1) as cluster:
        yield cluster.endpoints


def drill(
    run_job: RunJob,
    etcd: list[str],
    changes: list[tuple[str, bool]],
    python: str = sys.executable,
    step_s: float = 0.05,
) -> Drill:
    """Run these changes; return the account."""
    with run_job(
        etcd,
        wrapped=True,
        proxied=True,
        lease_s=8.0,
        python=python,
        least=1,
        most=MOST + 1,
        script=SCRIPT,
        script_environ={"IN_PLACE_STEP_S": str(step_s)},
        sidecar_environ={"MUSTER_GRACE_S": "90"},
    ) as job:
        drill = Drill(job, seed=1)
        drill.begin(3)
        for kind, rank_0 in changes:
            while len(job.nodes) <= FEWEST and kind in ("drain", "node", "two", "stop"):
                drill.change("join", rank_0=False)
            while len(job.nodes) >= MOST and kind in ("join",):
                drill.change("drain", rank_0=False)
            drill.change(kind, rank_0=rank_0)
        assert len(drill.folders()) == 1, "keys of earlier worlds are left"
        job.stop_training()
        assert set(job.launchers_end()) == {0}
        drill.check()
        (job.directory / "drill.txt").write_text(drill.report())
        losses = drill.losses()
        alone = drill.undisturbed(len(losses))
        apart = [abs(one - other) for one, other in zip(losses, alone, strict=True)]
        assert max(apart) < NEAR
        return drill


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_fifty_changes_of_every_kind(run_job: RunJob, etcd: list[str]) -> None:
    changes = int(os.environ.get("MUSTER_TEST_CHANGES", "50"))
    done = drill(run_job, etcd, plan(changes, seed=1))
    in_place = [one for one in done.outcomes if not one.fell_back]
    assert len(in_place) >= 0.9 * len(done.outcomes)
    assert not [one for one in in_place if one.restarted]
    done.flat()


@pytest.mark.timeout(1500)
def test_changes_that_fall_into_a_form(run_job: RunJob, etcd: list[str]) -> None:
    """Those of the fifty that ``test_in_place.py`` has none of."""
    kinds = ("torchrun", "store in a form", "two", "sidecar in a form")
    # The pod that stands still is one that has joined: no torchrun starts its ranks again.
    changes = [*((kind, True) for kind in kinds), ("stop", False)]
    done = drill(run_job, etcd, changes, step_s=0.25)  # most of the CPU goes into steps
    assert not [one for one in done.outcomes if one.fell_back or one.restarted]


@pytest.mark.long
@pytest.mark.timeout(SETUP_TIMEOUT_S + 900)
@pytest.mark.parametrize("version", ["2.6.0", "2.9.1"])
def test_changes_on_an_older_torch(run_job: RunJob, etcd: list[str], version: str) -> None:
    kinds = ("drain", "join", "node", "join", "worker", "torchrun")
    changes = [(kind, True) for kind in kinds]
    done = drill(run_job, etcd, changes, python_with_torch(version))
    assert not [one for one in done.outcomes if one.fell_back or one.restarted]
