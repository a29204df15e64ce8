# SPDX-License-Identifier: Apache-2.0
"""Beside a sidecar of 0.1.0, a world goes by what that one knows: else each of the two would break
off what the other has the ranks held for."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agent.parts import endpoint_of, job_client, member_parts
from agent.surroundings import MemberSettings, Sockets
from launcher_shim.c10d.rounds.records import Node, Round, Seat
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.store import Delete, Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.records import by_policy, member
from tests.support.sidecars.jobs import KEYS, identity, surroundings
from tests.support.sidecars.raw_client import DEADLINE_S

HERE = KEYS.in_generation(1)
RUN = HERE.run("digits")
NAMES = ("w-0", "w-1", "old")
WORLD = Round(3, complete=True, frozen=tuple(Seat(name, "n", 1) for name in NAMES))
VERSION = "0.2.0"


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"paused": True}, "pause"),
        ({"max_nodes": 2}, "shrink"),
        ({"sizes": (2,)}, "shrink"),
        ({"unit": 2}, "shrink"),
    ],
)
async def test_i11_what_an_older_sidecar_does_not_know_waits_until_it_has_gone(
    values: dict[str, Any], cause: str
) -> None:
    store, who = MemoryStore(MemoryEngine()), replace(identity("w-0"), version=VERSION)
    nodes = (Node(name, "in", "n", 1, "10.0.0.1", 1, 0, 3) for name in NAMES)
    around = surroundings(store, "w-0")
    client = job_client(around, KEYS)
    settings = MemberSettings(keys=KEYS, identity=who, lease_ttl_s=60)
    parts = member_parts(around, settings, client)
    endpoint = endpoint_of(around, settings, parts, Sockets(c10d_port=0))
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        vital = (client.watching, parts.registrar, endpoint)
        running = [tasks.create_task(part.run()) for part in vital]
        await parts.registrar.registered.wait()
        job = by_policy(Job(JobPolicy(1, 4), template=who.policy.template), **values)
        await store.txn(
            [],
            [
                Put(HERE.member("w-1"), member("w-1", version=VERSION).to_json()),
                Put(HERE.member("old"), member("old").to_json()),
                *(Put(RUN.node(node.member), node.to_json()) for node in nodes),
                Put(RUN.round, WORLD.to_json()),
                Put(KEYS.job, job.to_json()),
            ],
        )
        rounds = endpoint.live_rounds()
        while rounds.counts is None or not rounds.counts.complete:
            rounds = await endpoint.live_rounds_changed(rounds)
        await client.confirm()
        rounds = endpoint.live_rounds()
        assert rounds.counts is not None
        assert rounds.counts.reforms == ""
        # Its torchrun trains on: another sidecar has come in its pod.
        newer = member("old", version=VERSION).to_json()
        await store.txn([], [Delete(HERE.member("old"))])
        await store.txn([], [Put(HERE.member("old"), newer)])
        while not rounds.counts.reforms:
            rounds = await endpoint.live_rounds_changed(rounds)
            assert rounds.counts is not None
        assert rounds.counts.reforms == cause
        for task in running:
            task.cancel()
