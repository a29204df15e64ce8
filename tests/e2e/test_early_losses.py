# SPDX-License-Identifier: Apache-2.0
"""Real torchruns whose nodes are lost: the others go on long before any lease ends."""

from __future__ import annotations

import json

import pytest

from tests.support.training.job import Job, RunJob
from tests.support.training.pods import Node

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

LEASE_S = 600.0
"""No lease ends while the test lasts: whoever is lost was evicted."""


def losses(job: Job) -> list[tuple[str, bool]]:
    """Who was lost, and whether by an eviction, by the history."""
    found = [json.loads(line) for line in job.muster("history", "--json").splitlines()]
    return [
        (one["member"], one["details"].get("early", False))
        for one in found
        if one["what"] == "lost"
    ]


def test_i11_a_node_that_is_killed_is_evicted_once_its_world_has_failed(
    run_job: RunJob, embedded: list[str]
) -> None:
    with run_job(embedded, least=2, most=4, lease_s=LEASE_S) as job:
        nodes: list[Node] = job.add(4)
        world = job.world_of(nodes)
        lost, *others = nodes
        job.kill_node(lost)
        job.goes_on(job.world_of(others, not_=world))
        job.never_two_worlds()
        assert losses(job) == [(lost.name, True)]


def test_i5_a_sidecar_that_is_killed_alone_costs_no_world(
    run_job: RunJob, embedded: list[str]
) -> None:
    with run_job(embedded, least=2, most=3, lease_s=LEASE_S, wrapped=True) as job:
        nodes: list[Node] = job.add(3)
        world = job.world_of(nodes)
        job.kill_sidecar(nodes[1])
        job.goes_on(world, 200)
        job.start_again(nodes[1])
        job.undisturbed(world)
        assert losses(job) == []
