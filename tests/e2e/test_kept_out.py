# SPDX-License-Identifier: Apache-2.0
"""A real torchrun that ends one world after the other is kept out, and the others train."""

from __future__ import annotations

import pytest

from rdzv.records.quarantine import TERMS, Quarantine
from tests.support.training.drain_job import draining_job
from tests.support.training.job import FORM_TIMEOUT_S, RunJob

pytestmark = [pytest.mark.torch, pytest.mark.timeout(3600)]


LONGEST_TERM_S = TERMS.hold_s(TERMS.worlds)


@pytest.mark.parametrize(
    "before", [TERMS.worlds - 1, pytest.param(0, marks=pytest.mark.long)], ids=["the last", "all"]
)
def test_a_node_that_ends_every_world_is_kept_out_for_good_and_named_and_the_others_train(
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
            known = Quarantine(bad.name, pod_uid, 1, "before", fruitless=before)
            job.witness.put(job.keys.in_generation(1).quarantine(bad.name), known.to_json())
        for _ in range(before, TERMS.worlds):
            job.start_launcher(bad)
            both = job.world_of([healthy, bad], FORM_TIMEOUT_S + LONGEST_TERM_S, not_=calm)
            job.kill_agent_with_workers(bad)
            calm = job.world_of([healthy], not_=both)

        def stays() -> bool:
            record = job.witness.sight.membership.quarantines.get(bad.name)
            return record is not None and record.stays(TERMS)

        job.until(stays, FORM_TIMEOUT_S, "it stays out for good")
        job.start_launcher(bad)
        job.until(lambda: job.state(bad) == "asking", FORM_TIMEOUT_S, "it asks again")
        job.undisturbed(calm, 100)
        said = " ".join(job.muster("status").split())
        assert f"{bad.name} quarantined" in said
        assert f"ended {TERMS.worlds} worlds in a row without progress" in said
        job.never_two_worlds()
