# SPDX-License-Identifier: Apache-2.0
"""Real etcd members for a benchmark; each can be killed and restarted."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from rdzv.errors import StoreError
from rdzv.store import StoreStatus
from rdzv.store.etcd.client import EtcdStore
from tests.support.ports import free_ports
from tests.support.store.etcd_cluster import find_etcd

START_TIMEOUT_S = 20.0
LOOK_S = 0.005
"""Poll interval of the leader."""


class EtcdMembers:
    """The members of one etcd cluster."""

    def __init__(
        self, binary: str, directory: Path, count: int, arguments: Sequence[str] = ()
    ) -> None:
        self._binary = binary
        self._arguments = arguments
        self._directory = directory
        self._clients, self._peers = free_ports(count), free_ports(count)
        self._processes: dict[int, asyncio.subprocess.Process] = {}

    @property
    def endpoints(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self._clients]

    @property
    def pids(self) -> dict[int, int]:
        return {member: process.pid for member, process in self._processes.items()}

    async def start(self, member: int) -> None:
        """Start a member, on its own data if it has any."""
        client = f"http://127.0.0.1:{self._clients[member]}"
        peer = f"http://127.0.0.1:{self._peers[member]}"
        cluster = (f"m{n}=http://127.0.0.1:{port}" for n, port in enumerate(self._peers))
        self._processes[member] = await asyncio.create_subprocess_exec(
            self._binary,
            f"--name=m{member}",
            f"--data-dir={self._directory / f'm{member}'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={','.join(cluster)}",
            "--log-level=fatal",
            *self._arguments,
        )

    async def kill(self, member: int) -> None:
        """Kill a member with SIGKILL."""
        process = self._processes.pop(member)
        # Ctrl-C ends it too.
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def leader(self, other_than: int | None = None) -> int:
        """Wait until all running members agree on a leader that is not ``other_than``."""
        stores = {member: EtcdStore([self.endpoints[member]]) for member in self._processes}
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while True:
                    found = await asyncio.gather(*map(_status, stores.values()))
                    leaders = {status.leader_id for status in found if status}
                    if None not in found and len(leaders) == 1:
                        for member, status in zip(stores, found, strict=True):
                            if status and {status.member_id} == leaders and member != other_than:
                                return member
                    await asyncio.sleep(LOOK_S)
        finally:
            for store in stores.values():
                await store.close()


@asynccontextmanager
async def etcd_members(count: int, arguments: Sequence[str] = ()) -> AsyncIterator[EtcdMembers]:
    """Run ``count`` members until the end of the block; they sync every write to disk.

    ``arguments`` are added to etcd's command line.
    """
    binary = await asyncio.to_thread(find_etcd)
    directory = await asyncio.to_thread(tempfile.mkdtemp, prefix="muster-bench-etcd-")
    members = EtcdMembers(str(binary), Path(directory), count, arguments)
    try:
        for member in range(count):
            await members.start(member)
        await members.leader()
        yield members
    finally:
        for member in tuple(members.pids):
            await members.kill(member)
        await asyncio.to_thread(shutil.rmtree, directory)


@asynccontextmanager
async def etcd_server() -> AsyncIterator[str]:
    """Run one member until the end of the block; yields its ``host:port``."""
    async with etcd_members(1) as members:
        yield members.endpoints[0]


def free_port() -> int:
    """Return a port that is free now; another process may still take it."""
    return free_ports(1)[0]


async def _status(store: EtcdStore) -> StoreStatus | None:
    """Return a member's status; None if it does not answer or has no leader."""
    try:
        status = await store.status(timeout_s=0.5)
    except StoreError:
        return None
    return status if status.leader_id else None
