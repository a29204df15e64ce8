# SPDX-License-Identifier: Apache-2.0
"""However long a job lives, its store stays as large as it was: pods, rounds and renewals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import pytest

from rdzv.members.gone import KEPT_MIN
from rdzv.records.job import HISTORY_LENGTH
from rdzv.store import Store
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.load.bounds import Job, change_membership, form_rounds, job_on, renew
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.patient_store import PatientEtcdStore

SETTLED_KEYS = HISTORY_LENGTH + KEPT_MIN + 20
"""The present members, the job, and what else does not come with each change."""
ROUND_KEYS = 20
"""What two torchruns have stored for two rounds."""
IN_USE_BYTES, ON_DISK_BYTES = 1_000_000, 6_000_000
"""Of the database: compacted, and between two compactions. Names and history of 10,000 changes
alone would be more than the former."""
IN_MOTION_KEYS = 300
"""What pods have left that went since the last sweep."""


async def test_pods_that_come_and_go_leave_a_bounded_number_of_keys() -> None:
    async with job_on(MemoryStore()) as job:
        await change_membership(job, 700, 7, SETTLED_KEYS)
        assert job.samples[-1].keys <= SETTLED_KEYS, job.samples
        assert job.samples[-1].revision > 700


async def test_rounds_that_form_and_end_leave_the_keys_of_two() -> None:
    engine = MemoryEngine()
    async with job_on(MemoryStore(engine)) as job:
        # Each round is one entry of the history, until that is full.
        most = 24 + 4
        await form_rounds(
            job, lambda: MemoryStore(engine), 24, samples=6, per_connection=8, growth_keys=most
        )
        growth = [sample.keys - job.samples[1].keys for sample in job.samples[1:]]
        assert max(growth) <= most, job.samples


async def test_renewals_leave_nothing() -> None:
    async with job_on(MemoryStore()) as job:
        await renew(job, 640, samples=4)
        assert len({(one.keys, one.revision) for one in job.samples}) == 1, job.samples


@pytest.fixture
def compacting() -> Iterator[EtcdCluster]:
    """Compacted as docs/operations.md says, but every 5 s: a long life passes within minutes."""
    compaction = ("--auto-compaction-mode=periodic", "--auto-compaction-retention=5s")
    with EtcdCluster(1, arguments=compaction) as cluster:
        yield cluster


@pytest.mark.etcd
@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("load", ["membership changes", "rounds", "lease renewals"])
async def test_a_long_life_leaves_the_store_flat(compacting: EtcdCluster, load: str) -> None:
    def connect() -> Store:
        return PatientEtcdStore(compacting.endpoints)

    loads: dict[str, Callable[[Job], Awaitable[None]]] = {
        "membership changes": lambda job: change_membership(job, 10_000, 50, SETTLED_KEYS),
        "rounds": lambda job: form_rounds(
            job, connect, 1_000, samples=50, per_connection=20, growth_keys=IN_MOTION_KEYS
        ),
        "lease renewals": lambda job: renew(job, 100_000, samples=25),
    }
    store = connect()
    try:
        async with job_on(store) as job:
            await loads[load](job)
            rest = await job.compacted(job.samples[-1].done, IN_USE_BYTES)
    finally:
        await store.close()
    print(*job.samples, rest, sep="\n")  # noqa: T201 - what docs/scale.md is made of
    assert rest.keys <= SETTLED_KEYS + ROUND_KEYS, rest
    assert rest.in_use <= IN_USE_BYTES, rest
    assert max(one.keys for one in job.samples) <= SETTLED_KEYS + IN_MOTION_KEYS, job.samples
    assert max(one.on_disk for one in job.samples) <= ON_DISK_BYTES, job.samples
