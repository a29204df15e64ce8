# SPDX-License-Identifier: Apache-2.0
"""The etcd drivers against three real members that are killed, frozen, and cut off.

The driver ``etcd3`` is the default one on other endpoints, so it goes through the faults in which
what an endpoint does by itself is broken. A member that is killed: its connection is made anew. One
that freezes, and a line that passes nothing: a call that blocks a thread, and a stream that another
one reads, end in time all the same. A history that is compacted meanwhile: the package throws away
that a watch was cancelled. The fifth is tokens and certificates, which it never renews, in
``test_fault_matrix``. What else breaks is met by code that both share, or by the contract suite.

The bar: no event lost, doubled or out of order in any case, and a client that leaves what is broken
while it is; in the full proof, one that adds next to nothing to what an election costs.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from rdzv.errors import Compacted, StoreError
from rdzv.store import Put, WatchBatch
from rdzv.store.etcd.client import EtcdStore
from rdzv.store.etcd3.driver import Etcd3Store
from tests.support.load.store import StoreLoad, gap_s
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.etcd_leader import leader_of
from tests.support.store.patient_store import PatientEtcdStore
from tests.support.store.tcp_proxy import TcpProxy

pytestmark = pytest.mark.etcd

CLIENT_DELAY_S = 1.5
"""What the client may add to the writer's own gap, which is the election's."""

ONE_ENDPOINT_S = 2.0
"""What one dead endpoint may add to the gap of a writer that does not use it: an attempt of 1 s and
what leads up to it, which is less than what a watch needs to find out by itself."""

_numbers = itertools.count(1)

Driver = type[EtcdStore]

in_seconds_too = pytest.param(EtcdStore, marks=pytest.mark.long, id="EtcdStore-in-seconds")

both_drivers = pytest.mark.parametrize(
    "driver",
    [
        EtcdStore,
        Etcd3Store,
        in_seconds_too,
        pytest.param(Etcd3Store, marks=pytest.mark.long, id="Etcd3Store-in-seconds"),
    ],
)
default_driver = pytest.mark.parametrize("driver", [EtcdStore, in_seconds_too])
"""Both ways in the full proof, which holds the bounds in seconds, too."""


@pytest.fixture
def ttl_s(in_seconds: bool) -> int:
    """Of leases that outlast the fault: on a busy machine renewals come late."""
    return 10 if in_seconds else 30


@pytest.fixture
def soon_s(in_seconds: bool) -> float:
    """For a client to find its way back."""
    return 5.0 if in_seconds else 60.0


@asynccontextmanager
async def load(
    cluster: EtcdCluster,
    driver: Driver,
    *,
    ttl_s: int,
    leases: int = 4,
    endpoints: Sequence[str] = (),
    writes_to: int = 0,
) -> AsyncIterator[StoreLoad]:
    """Run the load, whose writer uses the member ``writes_to``."""
    number = next(_numbers)
    first = PatientEtcdStore(cluster.endpoints)
    writer = EtcdStore(cluster.endpoints, first=writes_to)
    client = driver(endpoints or cluster.endpoints)
    lease_ids = [(number << 40) + index + 1 for index in range(leases)]
    running = StoreLoad(
        first, writer, client, f"/chaos/{number}/", lease_ids=lease_ids, ttl_s=ttl_s
    )
    try:
        async with running.running():
            await running.settle()
            yield running
            await running.settle()
    finally:
        await client.close()
        await writer.close()
        await first.close()


async def drain(batches: AsyncIterator[WatchBatch]) -> None:
    async for batch in batches:
        assert not batch.events


async def pass_time(load: StoreLoad, fault_s: float) -> None:
    """Let the fault last; a lease that is lost ends the test at once."""
    deadline_s = time.monotonic() + fault_s
    while time.monotonic() < deadline_s:
        await asyncio.sleep(0.1)
        assert not load.leases_lost


@both_drivers
async def test_leader_killed(
    cluster: EtcdCluster, driver: Driver, ttl_s: int, in_seconds: bool
) -> None:
    leader = await leader_of(cluster.access())
    async with load(cluster, driver, ttl_s=ttl_s) as job:
        cluster.kill(leader)
        await job.outlast(4)
        await asyncio.to_thread(cluster.start, leader)
    job.assert_exact()
    assert job.leases_lost == []
    if in_seconds:
        assert gap_s(job.events_at_s) < gap_s(job.written_at_s) + CLIENT_DELAY_S
        assert gap_s(job.swapped_at_s) < gap_s(job.written_at_s) + CLIENT_DELAY_S + 1


@pytest.mark.parametrize(
    ("driver", "frozen_s", "lease_s"),
    [
        (EtcdStore, 14, 12),
        pytest.param(EtcdStore, 8, 6, marks=pytest.mark.long),
        pytest.param(EtcdStore, 14, 8, marks=pytest.mark.long),
    ],
)
async def test_leader_frozen_for_longer_than_a_lease(
    cluster: EtcdCluster, driver: Driver, frozen_s: float, lease_s: int, in_seconds: bool
) -> None:
    leader = await leader_of(cluster.access())
    async with load(cluster, driver, ttl_s=lease_s, leases=10) as job:
        cluster.freeze(leader)
        # Until it wakes up; then etcd itself (3.6.16) may revoke what others have renewed.
        await job.outlast(frozen_s)
        cluster.resume(leader)
    job.assert_exact()
    if in_seconds:
        assert gap_s(job.events_at_s) < gap_s(job.written_at_s) + CLIENT_DELAY_S


@both_drivers
async def test_follower_frozen_under_the_client(
    cluster: EtcdCluster, driver: Driver, ttl_s: int, in_seconds: bool
) -> None:
    leader = await leader_of(cluster.access())
    follower = (leader + 1) % len(cluster)
    endpoints = cluster.endpoints[follower:] + cluster.endpoints[:follower]
    async with load(cluster, driver, ttl_s=ttl_s, endpoints=endpoints, writes_to=leader) as job:
        cluster.freeze(follower)
        await job.outlast(5)
        cluster.resume(follower)
    job.assert_exact()
    assert job.leases_lost == []
    if in_seconds:
        assert gap_s(job.events_at_s) < gap_s(job.written_at_s) + ONE_ENDPOINT_S
        assert gap_s(job.swapped_at_s) < gap_s(job.written_at_s) + ONE_ENDPOINT_S


@default_driver
async def test_every_member_killed_and_back(
    cluster: EtcdCluster, driver: Driver, ttl_s: int, in_seconds: bool
) -> None:
    async with load(cluster, driver, ttl_s=ttl_s) as job:
        started_s = time.monotonic()
        for member in range(len(cluster)):
            cluster.kill(member)
        await pass_time(job, 5)
        await asyncio.to_thread(cluster.restore)
        outage_s = time.monotonic() - started_s
    job.assert_exact()
    assert job.leases_lost == []
    if in_seconds:
        assert gap_s(job.events_at_s) < outage_s + 2
        assert gap_s(job.swapped_at_s) < outage_s + 2


@default_driver
async def test_quorum_lost(cluster: EtcdCluster, driver: Driver, ttl_s: int) -> None:
    leader = await leader_of(cluster.access())
    others = [member for member in range(len(cluster)) if member != leader]
    async with load(cluster, driver, ttl_s=ttl_s) as job:
        for member in others:
            cluster.freeze(member)
        await pass_time(job, 6)
        # Nobody can prove anything, so nobody says that all is well.
        assert time.monotonic() - job.heard_at_s[-1] > 2
        for member in others:
            cluster.resume(member)
    job.assert_exact()
    assert job.leases_lost == []


@both_drivers
async def test_black_hole_to_one_endpoint(
    cluster: EtcdCluster, driver: Driver, ttl_s: int, in_seconds: bool
) -> None:
    async with TcpProxy(cluster.endpoints[0]) as proxy:
        endpoints = [proxy.endpoint, *cluster.endpoints[1:]]
        async with load(cluster, driver, ttl_s=ttl_s, endpoints=endpoints) as job:
            proxy.hold()
            await job.outlast(5)
            proxy.mend()
        job.assert_exact()
        assert job.leases_lost == []
        if in_seconds:
            assert gap_s(job.events_at_s) < gap_s(job.written_at_s) + ONE_ENDPOINT_S
            assert gap_s(job.swapped_at_s) < gap_s(job.written_at_s) + ONE_ENDPOINT_S


@default_driver
async def test_one_name_for_all_members_when_one_of_them_freezes(
    cluster: EtcdCluster, driver: Driver, ttl_s: int, in_seconds: bool
) -> None:
    async with TcpProxy(cluster.endpoints[0]) as service:
        async with load(cluster, driver, ttl_s=ttl_s, endpoints=[service.endpoint]) as job:
            service.strand(cluster.endpoints[1])
            await pass_time(job, 3)
        job.assert_exact()
        assert job.leases_lost == []
        if in_seconds:
            assert gap_s(job.events_at_s) < gap_s(job.written_at_s) + ONE_ENDPOINT_S
            assert gap_s(job.swapped_at_s) < gap_s(job.written_at_s) + ONE_ENDPOINT_S


@default_driver
async def test_black_hole_to_every_endpoint(
    cluster: EtcdCluster, driver: Driver, ttl_s: int, in_seconds: bool
) -> None:
    async with AsyncExitStack() as stack:
        proxies = [
            await stack.enter_async_context(TcpProxy(endpoint)) for endpoint in cluster.endpoints
        ]
        endpoints = [proxy.endpoint for proxy in proxies]
        async with load(cluster, driver, ttl_s=ttl_s, endpoints=endpoints) as job:
            for proxy in proxies:
                proxy.hold()
            await pass_time(job, 5)
            for proxy in proxies:
                proxy.mend()
            mended_s = time.monotonic()
            await job.settle()
            if in_seconds:
                first_s = min(moment for moment in job.events_at_s if moment > mended_s)
                written_at_s = [moment for moment in job.written_at_s if moment > mended_s]
                assert first_s - mended_s < gap_s([mended_s, *written_at_s]) + 2
        job.assert_exact()
        assert job.leases_lost == []


@both_drivers
async def test_cut_off_while_the_history_is_compacted(
    cluster: EtcdCluster, driver: Driver, soon_s: float
) -> None:
    async with AsyncExitStack() as stack:
        proxies = [
            await stack.enter_async_context(TcpProxy(endpoint)) for endpoint in cluster.endpoints
        ]
        writer = PatientEtcdStore(cluster.endpoints)
        client = driver([proxy.endpoint for proxy in proxies])
        stack.push_async_callback(writer.close)
        stack.push_async_callback(client.close)
        start = (await writer.range("/cut")).revision + 1
        batches = client.watch("/cut", start)
        await writer.txn([], [Put("/cut", b"0")])
        assert [event.kv.value for event in (await anext(batches)).events] == [b"0"]
        for proxy in proxies:
            proxy.cut()
        for number in range(50):
            last = await writer.txn([], [Put("/cut", b"%d" % number)])
        await writer.compact(last.revision - 1)
        with pytest.raises(StoreError):
            await client.range("/cut", timeout_s=0.5)
        for proxy in proxies:
            proxy.mend()
        async with asyncio.timeout(soon_s):
            with pytest.raises(Compacted) as gone:
                await drain(batches)
        assert gone.value.compact_revision == last.revision - 1
        listed = await client.range("/cut", prefix=True, timeout_s=soon_s)
        assert [kv.value for kv in listed.kvs] == [b"49"]


@pytest.fixture
def member() -> Iterator[EtcdCluster]:
    with EtcdCluster(1) as cluster:
        yield cluster


@default_driver
async def test_a_store_that_was_emptied_is_noticed(
    member: EtcdCluster, driver: Driver, soon_s: float
) -> None:
    writer = PatientEtcdStore(member.endpoints)
    for _ in range(20):
        last = await writer.txn([], [Put("/emptied", b"")])
    await writer.close()
    store = driver(member.endpoints)
    batches = store.watch("/emptied", last.revision + 1)
    await anext(batches)
    await asyncio.to_thread(member.empty)
    async with asyncio.timeout(soon_s):
        with pytest.raises(Compacted, match="emptied or restored"):
            await drain(batches)
        assert (await store.range("/emptied", timeout_s=soon_s)).kvs == ()
    await store.close()


@pytest.mark.parametrize("soon_s", [60.0, pytest.param(5.0, marks=pytest.mark.long)])
async def test_client_frozen_for_longer_than_its_lease(cluster: EtcdCluster, soon_s: float) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "tests/support/store/frozen_client.py")]
    client = await asyncio.create_subprocess_exec(
        *command, *cluster.endpoints, stdout=asyncio.subprocess.PIPE, env={"PYTHONPATH": str(root)}
    )
    assert client.stdout is not None
    writer = PatientEtcdStore(cluster.endpoints)
    try:
        async with asyncio.timeout(120):
            assert await client.stdout.readline() == b"ready\n"
            # Before it is stopped: on a busy machine its lease ends amid the writes.
            start = (await writer.range("/frozen-lease")).revision + 1
            client.send_signal(signal.SIGSTOP)
            for number in range(20):
                await writer.txn([], [Put(f"/frozen/{number}", b"")])
            async for batch in writer.watch("/frozen-lease", start):
                if batch.events:
                    break
            client.send_signal(signal.SIGCONT)
            async with asyncio.timeout(soon_s):
                assert await client.stdout.readline() == b"lease lost\n"
                assert await client.stdout.readline() == b"20 events in order\n"
            assert await client.wait() == 0
    finally:
        await writer.close()
        if client.returncode is None:
            client.kill()
            await client.wait()
