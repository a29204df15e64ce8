# SPDX-License-Identifier: Apache-2.0
"""The tunnel while the store is away; its rules, none of which can be left out; its key."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from agent.tunnel import worker_end
from agent.tunnel.certificate import make_pem
from agent.tunnel.connections import Ends, call_peer
from agent.tunnel.identity import TunnelIdentity, make_identity, read_identity
from agent.tunnel.tunnel import UNREACHED_S, LauncherEnd
from agent.tunnel.worker_end import WorkerEnd
from launcher_shim.hosts import token_of
from launcher_shim.rundir.exec_frames import (
    ABANDON,
    ACK,
    ATTACHED,
    GONE,
    HOLD,
    Attaching,
    Decoder,
    encode,
    encode_attaching,
    read_attaching,
)
from rdzv.job import JobClient
from rdzv.records.job import Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.store import Put
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.ports import free_ports
from tests.support.records import member
from tests.support.sidecars.jobs import KEYS, loaded
from tests.support.sidecars.processes import until
from tests.support.tasks import beside
from tests.support.waiting import DEADLINE_S

LEASE_TTL_S = 10.0
UNREACHED_MAX_S = LEASE_TTL_S + UNREACHED_S
HOST = token_of("node-0", "uid-node-0")
SESSION = "0123456789abcdef" * 2
IN_GENERATION = KEYS.in_generation(1)


def fast_clock() -> float:
    return 200.0 * asyncio.get_running_loop().time()


def key() -> TunnelIdentity:
    made = read_identity(make_pem())
    assert made is not None
    return made


class Pods:
    """A launcher's and a worker's pod of one job, whose store comes and goes."""

    def __init__(self, directory: Path, port: int) -> None:
        self._engine = MemoryEngine()
        self._directory = directory
        self._store = MemoryStore(self._engine)
        self.launcher_key, self.worker_key = key(), key()
        self._port = port
        self.launcher_client, self.worker_client = self._client(), self._client()
        self.generation: int | None = None
        self.held = 0
        self.abandoned: list[str] = []

    def _client(self) -> JobClient:
        return JobClient.of(MemoryStore(self._engine), KEYS, clock=fast_clock)

    async def begin(self) -> None:
        launcher = member("launcher", role="launcher", tunnel_port=1, pin=self.launcher_key.pin)
        await self._write(KEYS.job, Job(JobPolicy(1, 4), generation=1))
        await self._write(IN_GENERATION.member("launcher"), launcher)

    async def register(self, pin: str) -> None:
        """Write the worker's record, as its sidecar would that has this key."""
        await self._write(IN_GENERATION.member("node-0"), self.member(pin))

    def member(self, pin: str) -> Member:
        """The worker's record with this key."""
        return member("node-0", 2, address="127.0.0.1", tunnel_port=self._port, pin=pin)

    async def _write(self, at: str, record: Job | Member) -> None:
        assert (await self._store.txn([], [Put(at, record.to_json())])).succeeded

    def has_held_since(self, before: int) -> bool:
        """Whether the agent was told to hold its commands more than once since then."""
        return self.held > before + 1

    def launcher_end(self) -> LauncherEnd:
        path = self._directory / "tunnel.sock"
        return LauncherEnd(
            path, self.launcher_key, self.launcher_client, lambda: 1, fast_clock, LEASE_TTL_S
        )

    def worker_end(self) -> WorkerEnd:
        return WorkerEnd(
            ("127.0.0.1", self._port),
            self.worker_key,
            HOST,
            self._directory / "exec.sock",
            self.worker_client,
            lambda: self.generation,
            lambda: False,
            fast_clock,
            LEASE_TTL_S,
        )

    async def open(self) -> Ends:
        """Connect to the launcher's end as ``kubexec.sh`` does."""
        ends = Ends(*await asyncio.open_unix_connection(self._directory / "tunnel.sock"))
        ends.writer.write(encode_attaching(Attaching(HOST, SESSION, 1)))
        return ends

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[None]:
        """An agent that tells that it is attached, and notes what else it is told."""

        async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opening, *_ = Decoder().feed(await reader.read(65536))
            if opening.kind == HOLD:
                self.held += 1
                writer.write(encode(ACK))
            elif opening.kind == ABANDON:
                self.abandoned.append(read_attaching(opening).session)
                writer.write(encode(ACK))
            else:
                writer.write(encode(ATTACHED))
                await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(converse, self._directory / "exec.sock")
        try:
            yield
        finally:
            server.close()


@asynccontextmanager
async def running(end: LauncherEnd | WorkerEnd) -> AsyncIterator[None]:
    """Let an end of the tunnel serve."""
    async with beside(end.run()):
        async with asyncio.timeout(DEADLINE_S):
            await end.listening.wait()
        yield


@pytest.fixture
async def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pods:
    monkeypatch.setattr(worker_end, "HOLD_INTERVAL_S", 0.05)
    (port,) = free_ports(1)
    made = Pods(tmp_path, port)
    await made.begin()
    return made


async def kind_of_answer(ends: Ends) -> tuple[int, bytes]:
    async with asyncio.timeout(DEADLINE_S):
        frame, *_ = Decoder().feed(await ends.reader.read(65536))
    return frame.kind, frame.body


async def pass_s(fast_s: float) -> None:
    """Wait for so long by the fast clock."""
    until_s = fast_clock() + fast_s
    await until(lambda: fast_clock() >= until_s)


@asynccontextmanager
async def only_the_workers_sidecar_is_new(pods: Pods) -> AsyncIterator[None]:
    """The launcher's has seen the former one; the store has gone away, and the new one came."""
    await pods.register("pin of the former one")
    async with loaded(pods.launcher_client):
        await until(lambda: "node-0" in pods.launcher_client.membership.snapshot().members)
    async with pods.agent(), running(pods.launcher_end()), running(pods.worker_end()):
        yield


@asynccontextmanager
async def the_store_is_back(pods: Pods) -> AsyncIterator[None]:
    await pods.register(pods.worker_key.pin)
    async with loaded(pods.launcher_client), loaded(pods.worker_client):
        pods.generation = 1
        yield


async def test_i5_a_new_sidecar_of_a_worker_is_called_until_the_store_knows_it(pods: Pods) -> None:
    async with only_the_workers_sidecar_is_new(pods):
        ends = await pods.open()
        await pass_s(3 * UNREACHED_MAX_S)
        assert pods.held  # the agent keeps the command meanwhile
        async with the_store_is_back(pods):
            assert await kind_of_answer(ends) == (ATTACHED, b"")
        ends.writer.close()


async def test_a_worker_at_whose_address_nobody_is_counts_as_gone_whether_or_not_the_store_is_there(
    pods: Pods,
) -> None:
    await pods.register("pin of one that is gone")
    async with loaded(pods.launcher_client):
        await until(lambda: "node-0" in pods.launcher_client.membership.snapshot().members)
    async with running(pods.launcher_end()):
        ends = await pods.open()
        kind, why = await kind_of_answer(ends)
        assert (kind, f"was not reached for {UNREACHED_MAX_S:g} s" in why.decode()) == (GONE, True)
        ends.writer.close()


async def test_a_command_that_its_launcher_has_given_up_in_an_outage_is_ended_after_it(
    pods: Pods,
) -> None:
    async with only_the_workers_sidecar_is_new(pods):
        ends = await pods.open()
        await until(lambda: pods.held > 0)
        ends.writer.close()  # horovodrun has ended its kubexec.sh
        await pass_s(3 * UNREACHED_MAX_S)
        assert not pods.abandoned
        async with the_store_is_back(pods):
            await until(lambda: pods.abandoned == [SESSION])


async def test_a_node_that_has_lost_its_launcher_and_the_store_holds_no_command(
    pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is more likely cut off from both, and others may have taken its place."""
    lost = asyncio.Event()

    async def until_lost(connection: object) -> None:
        await lost.wait()

    monkeypatch.setattr(worker_end, "unacknowledged_for_long", until_lost)
    pods.generation = 1
    await pods.register(pods.worker_key.pin)
    async with loaded(pods.worker_client), pods.agent(), running(pods.worker_end()):
        for attempt in (1, 2):
            ends = await call_peer(pods.member(pods.worker_key.pin), pods.launcher_key)
            ends.writer.write(encode_attaching(Attaching(HOST, SESSION, attempt)))
            assert await kind_of_answer(ends) == (ATTACHED, b"")
            before = pods.held
            await until(partial(pods.has_held_since, before))
            lost.set()
            async with asyncio.timeout(DEADLINE_S):
                assert await ends.reader.read() == b""
            lost.clear()
            ends.writer.close()
            await asyncio.sleep(4 * worker_end.HOLD_INTERVAL_S)  # one may be under way
            before = pods.held
            await asyncio.sleep(10 * worker_end.HOLD_INTERVAL_S)
            assert pods.held == before


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the process number of a Python that makes no key and does not end."""
    python, started = tmp_path / "python", tmp_path / "pid"
    lines = ("#!/bin/sh", f"echo $$ > {started}.new", f"mv {started}.new {started}")
    python.write_text("\n".join([*lines, "exec sleep 600", ""]))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return started


async def test_a_sidecar_that_is_stopped_while_its_key_is_made_leaves_no_process(
    started: Path,
) -> None:
    making = asyncio.create_task(make_identity())
    await until(lambda: asyncio.to_thread(started.exists))
    making.cancel()
    await asyncio.wait((making,))
    pid = int(await asyncio.to_thread(started.read_text))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
