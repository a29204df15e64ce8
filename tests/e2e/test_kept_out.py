# SPDX-License-Identifier: Apache-2.0
"""Real torchruns that end one world after the other: one of them, or all for a while."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rdzv.records.quarantine import TERMS, Quarantine
from tests.support.training.job import FORM_TIMEOUT_S, STEPS_BETWEEN, RunJob, draining_job
from tests.support.training.pods import END_TIMEOUT_S, ROOT

pytestmark = [pytest.mark.torch, pytest.mark.timeout(3600)]

FAILS_ALIKE = ROOT / "tests" / "support" / "scripts" / "fails_alike.py"
HASTY = (sys.executable, "-P", "-m", "tests.support.sidecars.hasty", "agent")
LONGEST_S = 1200.0
"""For all to be let in again, each after a pause and the start of a world."""

long = pytest.mark.long


@pytest.mark.parametrize(
    "before", [TERMS.worlds - 1, pytest.param(0, marks=long)], ids=["the last", "all"]
)
def test_a_node_that_ends_every_world_is_left_out_and_named_and_the_others_train(
    run_job: RunJob, embedded: list[str], before: int
) -> None:
    told = {"MUSTER_RESTART_STEPS": "100000"}
    with draining_job(run_job, embedded, least=1, most=2, sidecar_environ=told) as job:
        (healthy,) = job.add()
        calm = job.world_of([healthy])
        (bad,) = job.add(launch=False)
        job.until_members(healthy, bad)
        if before:
            pod_uid = job.witness.sight.membership.members[bad.name].pod_uid
            known = Quarantine(bad.name, pod_uid, before, "before")
            job.witness.put(job.keys.in_generation(1).quarantine(bad.name), known.to_json())
        for _ in range(before, TERMS.worlds):
            job.start_launcher(bad)
            both = job.world_of([healthy, bad], not_=calm)
            job.kill_agent_with_workers(bad)
            calm = job.world_of([healthy], not_=both)

        def is_out() -> bool:
            record = job.witness.sight.membership.quarantines.get(bad.name)
            return record is not None and record.out

        job.until(is_out, FORM_TIMEOUT_S, "it is left out")
        job.start_launcher(bad)
        job.until(lambda: job.state(bad) == "asking", FORM_TIMEOUT_S, "it asks again")
        job.undisturbed(calm, 100)
        said = " ".join(job.muster("status").split())
        assert f"{bad.name} quarantined" in said
        assert f"its torchrun has died {TERMS.worlds} times" in said
        job.muster("admit", bad.name)
        job.world_of([healthy, bad], not_=calm)
        job.never_two_worlds()


@long
@pytest.mark.parametrize(
    ("nodes", "lives"),
    [pytest.param(3, 4, id="until one is left out"), pytest.param(4, 9, id="for long")],
)
def test_i11_nodes_that_fail_alike_and_are_well_then_all_train_with_no_hand(
    run_job: RunJob,
    embedded: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    lives: int,
) -> None:
    """Daily it is proven in ``tests/world/test_crash_loops.py``."""
    monkeypatch.setattr("tests.support.training.pods.sidecar_command", lambda: HASTY)
    away = tmp_path / "away"
    away.touch()
    with draining_job(
        run_job,
        embedded,
        least=1,
        most=nodes,
        max_restarts=0,
        script=FAILS_ALIKE,
        script_environ={"FAILS_ALIKE": str(away)},
        sidecar_environ={"MUSTER_RESTART_STEPS": f"{TERMS.steps // 10}"},
    ) as job:
        job.add(nodes, launch=False)
        for _ in range(lives):
            for node in job.nodes.values():
                job.start_launcher(node)
            assert 0 not in job.launchers_end()
        assert "quarantine" in job.muster("history")
        away.unlink()
        for node in job.nodes.values():
            job.start_launcher(node)
        world = job.world_of(job.nodes.values(), LONGEST_S)
        job.goes_on(world, STEPS_BETWEEN)
        job.until(
            lambda: not job.witness.sight.membership.quarantines,
            END_TIMEOUT_S,
            "nothing is held against anybody",
        )
        job.undisturbed(world)
        job.never_two_worlds()
