# SPDX-License-Identifier: Apache-2.0
"""Incidents that need no torchrun: ``muster status`` says what is wrong, the doctor what to do."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from launcher_shim.c10d.rounds.records import Round, Seat
from rdzv.keys import JobKeys
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.records.troubles import Bypass
from rdzv.store import Put
from rdzv.store.memory.client import MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.records import member
from tests.support.sidecars.processes import Ended, impatient_muster, muster

KEYS = JobKeys("default", "digits")
LIVE = KEYS.in_generation(1)


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer() as running:
        yield running


async def looked_at(server: EmbeddedServer, *puts: Put, full: bool = False) -> tuple[Ended, Ended]:
    """Return what ``status`` and ``doctor`` make of a job of two pods."""
    members = [Put(LIVE.member(name), member(name).to_json()) for name in "ab"]
    await MemoryStore(server.engine).txn([], [*members, *puts])
    server.engine.full = full
    environ = {"MUSTER_ETCD_ENDPOINTS": server.endpoint, "MUSTER_JOB": "digits"}
    return await muster("status", **environ), await muster("doctor", **environ)


def the_one_thing(doctor: Ended) -> str:
    last = doctor.out.splitlines()[-1]
    assert last.startswith("do first: ")
    return last


async def test_a_store_that_is_away_says_what_it_means_and_what_to_check() -> None:
    words = ("--job", "digits", "--etcd-endpoints", "127.0.0.1:1")
    status, doctor = (
        await impatient_muster("status", *words),
        await impatient_muster("doctor", *words),
    )
    assert (status.status, doctor.status) == (69, 69)
    assert "worlds that train go on; no pod joins or leaves until it answers" in status.err
    assert doctor.out.startswith("fault    endpoint    127.0.0.1:1 does not answer")
    assert "see that this member of the store runs and can be reached" in the_one_thing(doctor)


async def test_a_store_that_is_full_says_how_to_make_room(server: EmbeddedServer) -> None:
    trains = Round(1, True, frozen=(Seat("a", "n", 1), Seat("b", "n", 1)))
    puts = (
        Put(KEYS.job, Job(JobPolicy(1, 4)).to_json()),
        Put(LIVE.run("digits").round, trains.to_json()),
    )
    status, doctor = await looked_at(server, *puts, full=True)
    assert status.out.startswith("digits is training: a world of 2 nodes\n")
    assert "the store takes no writes (NOSPACE): worlds that have formed train on" in status.out
    assert doctor.status == 1
    assert "NOSPACE" in doctor.out.splitlines()[0]
    assert "etcdctl alarm disarm" in the_one_thing(doctor)


async def test_min_that_is_never_met_says_how_many_are_there(server: EmbeddedServer) -> None:
    status, doctor = await looked_at(server, Put(KEYS.job, Job(JobPolicy(3, 4)).to_json()))
    assert status.out.startswith("digits is below min: 2 of at least 3 pods can train\n→ see why")
    assert "warning  members     digits is below min: 2 of at least 3 pods can train" in doctor.out
    assert the_one_thing(doctor).endswith("to train with fewer: muster set digits --min 2")


async def test_a_training_container_that_never_starts_is_named(server: EmbeddedServer) -> None:
    unseen = Bypass("unseen", "it has been ready 60 s and nothing is known of a torchrun in it")
    puts = (Put(KEYS.job, Job(JobPolicy(1, 4)).to_json()), Put(LIVE.bypass("b"), unseen.to_json()))
    status, doctor = await looked_at(server, *puts)
    assert status.out.startswith("digits is starting: b: it has been ready 60 s and nothing is")
    assert "see whether its training container runs" in the_one_thing(doctor)
    assert "kubectl describe pod b" in the_one_thing(doctor)
