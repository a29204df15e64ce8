# SPDX-License-Identifier: Apache-2.0
"""Clients behind ``muster-run``: their sidecar dies and comes back, or the relay has a defect."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from random import Random

import pytest

from launcher_shim.c10d.state_codec import SENTINEL
from launcher_shim.pod.relay import Relay
from launcher_shim.tcpstore import wire
from launcher_shim.tcpstore.requests import RelayLedger
from rdzv.keys import JobKeys
from rdzv.store.memory.client import MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.ports import free_ports
from tests.support.sidecars.processes import until
from tests.support.sidecars.raw_client import RawClient, connected
from tests.support.sidecars.relayed_pod import RelayedPod, relayed_pod
from tests.support.waiting import DEADLINE_S

PATIENCE_S = 150.0


@pytest.fixture
async def pod(server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[RelayedPod]:
    async with relayed_pod(server.endpoint, tmp_path / "run") as running:
        yield running


async def test_a_client_gets_what_a_sidecar_would_answer(pod: RelayedPod) -> None:
    env = await asyncio.to_thread((pod.run_dir / "env").read_text)
    assert {f"PET_RDZV_ENDPOINT=localhost:{pod.port}", "MUSTER_C10D_PORT=0"} <= {*env.splitlines()}
    async with connected(pod.port) as one, connected(pod.port) as two:
        assert await one.open_rendezvous("digits") == SENTINEL
        await one.ask(wire.Set(b"/a", b"1"))
        assert await two.ask(wire.Get(b"/a")) == b""
        assert await two.open_rendezvous("digits") == SENTINEL
        assert await two.ask(wire.Get(b"/a")) == b"1"
        assert await one.ask(wire.Add(b"/n", 2)) == 2
        two.send(wire.Wait((b"/later",)))
        await one.ask(wire.Set(b"/later", b""))
        assert await two.byte() == wire.STOP_WAITING
        assert await one.ask(wire.Wait((b"/a",))) == wire.STOP_WAITING
        two.send(wire.Wait((b"/never",)))
        assert await two.ask(wire.CancelWait()) == wire.WAIT_CANCELED
        assert await one.ask(wire.DeleteKey(b"/a")) == 1
        assert await one.ask(wire.CompareSet(b"/a", b"", b"new")) == b"new"


async def test_what_no_sidecar_would_read_closes_that_connection_alone(pod: RelayedPod) -> None:
    async with connected(pod.port) as one, connected(pod.port) as two:
        one.send(wire.Wait((b"/never",)))
        one.send(wire.Add(b"/n", 1))
        one._writer.write(b"\xfe")
        assert await one.number() == 1
        assert await one.at_end()
        await two.ask(wire.Set(b"/word", b"word"))
        two.send(wire.Add(b"/word", 1))  # refused by the sidecar, as by torch's own server
        async with asyncio.timeout(PATIENCE_S):
            assert await two.at_end()
    async with connected(pod.port) as three:
        assert await three.ask(wire.Add(b"/n", 1)) == 2
    # The container's log says why, too.
    assert pod.runner is not None
    pod.runner.send_signal(signal.SIGINT)
    _, err = await pod.runner.communicate()
    assert b"the sidecar closed the connection of a launcher: b'word' is not a 64-bit" in err


async def test_a_client_that_sends_more_than_is_taken_is_held_back(pod: RelayedPod) -> None:
    assert pod.sidecar is not None
    assert pod.runner is not None
    value, count = bytes(256 * 1024), 240
    async with connected(pod.port) as one, connected(pod.port) as two:
        pod.sidecar.process.send_signal(signal.SIGSTOP)
        runner = pod.runner.pid
        before = await asyncio.to_thread(resident_kib, runner)

        async def grown() -> bool:
            return await asyncio.to_thread(resident_kib, runner) > before + 8 * 1024

        for n in range(count):
            one.send(wire.Set(b"/large/%d" % n, value))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await one._writer.drain()
        assert not await grown()
        pod.sidecar.process.send_signal(signal.SIGCONT)
        assert await one.ask(wire.NumKeys(), PATIENCE_S) == count
        for _ in range(count):
            one.send(wire.Get(b"/large/0"))  # and does not read
        assert await two.ask(wire.Add(b"/n", 1), PATIENCE_S) == 1
        with pytest.raises(TimeoutError):
            await until(grown, 2)
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(count):
                assert await one.vec() == value


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


async def test_a_wait_outlives_its_sidecar(pod: RelayedPod) -> None:
    async with connected(pod.port) as one, connected(pod.port) as two:
        one.send(wire.Wait((b"/late",)))
        assert await two.ask(wire.Add(b"/n", 1)) == 1
        await pod.kill_sidecar()
        two.send(wire.Set(b"/late", b"1"))
        await pod.start_sidecar()
        async with asyncio.timeout(PATIENCE_S):
            assert await one.byte() == wire.STOP_WAITING
            assert await one.ask(wire.Get(b"/late")) == b"1"


class Worker:
    """One client that does all kinds of things to shared keys, and notes what it was answered."""

    def __init__(self, name: int, client: RawClient, random: Random) -> None:
        self.name = name
        self.client = client
        self.done = 0
        self.popped: list[bytes] = []
        self._random = random
        self._chain = b""

    async def work(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._turn(b"%d.%d" % (self.name, self.done))
            self.done += 1

    async def _turn(self, mark: bytes) -> None:
        ask = self.client.ask
        await ask(wire.Add(b"/n", 1), PATIENCE_S)
        await ask(wire.Append(b"/log", mark + b" "), PATIENCE_S)
        await ask(wire.QueuePush(b"/q", mark), PATIENCE_S)
        own = b"/own/%d" % self.name
        await ask(wire.Set(own, mark), PATIENCE_S)
        assert await ask(wire.Get(own), PATIENCE_S) == mark
        if self._random.random() < 0.5:
            await self._pop()
        while True:
            wanted = self._chain + mark + b" "
            answer = await ask(wire.CompareSet(b"/chain", self._chain, wanted), PATIENCE_S)
            assert isinstance(answer, bytes)
            self._chain = answer
            if answer == wanted:
                return

    async def _pop(self) -> None:
        self.client.send(wire.QueuePop(b"/q"))
        async with asyncio.timeout(PATIENCE_S):
            if await self.client.number():
                self.popped.append(await self.client.vec())

    async def drain_queue(self) -> None:
        before = -1
        while before != len(self.popped):
            before = len(self.popped)
            await self._pop()


async def killed_again_and_again(pod: RelayedPod, kills: int, seed: int) -> None:
    random, stop = Random(seed), asyncio.Event()
    async with AsyncExitStack() as stack:
        workers = [
            Worker(n, await stack.enter_async_context(connected(pod.port)), Random(seed + n))
            for n in range(4)
        ]
        async with asyncio.TaskGroup() as tasks:
            for worker in workers:
                tasks.create_task(worker.work(stop))
            for _ in range(kills):
                goal = sum(worker.done for worker in workers) + random.randint(1, 12)
                await until(partial(moved, workers, goal))
                await asyncio.sleep(random.uniform(0, 0.02))
                await pod.kill_sidecar()
                await pod.start_sidecar()
            stop.set()
        done = sum(worker.done for worker in workers)
        client = workers[0].client
        assert await client.ask(wire.Add(b"/n", 0)) == done
        marks = sorted(b"%d.%d" % (w.name, n) for w in workers for n in range(w.done))
        for key in (b"/log", b"/chain"):
            content = await client.ask(wire.Get(key))
            assert isinstance(content, bytes)
            assert sorted(content.split()) == marks, key
        await workers[0].drain_queue()
        assert sorted(mark for worker in workers for mark in worker.popped) == marks


def moved(workers: Sequence[Worker], goal: int) -> bool:
    return sum(worker.done for worker in workers) >= goal


async def test_kill_9_amid_all_kinds_of_requests_loses_and_doubles_nothing(pod: RelayedPod) -> None:
    await killed_again_and_again(pod, 4, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 8))
async def test_kill_9_at_many_more_moments(pod: RelayedPod, seed: int) -> None:
    await killed_again_and_again(pod, 12, seed)


async def test_what_a_client_set_before_it_ended_is_set_though_the_sidecar_was_away(
    pod: RelayedPod,
) -> None:
    await pod.kill_sidecar()
    async with connected(pod.port) as one:
        for n in range(20):
            one.send(wire.Append(b"/log", b"%d " % n))
        await one._writer.drain()
    await pod.start_sidecar()
    async with connected(pod.port) as two:
        expected = b"".join(b"%d " % n for n in range(20))

        async def there() -> bool:
            return await two.ask(wire.Get(b"/log")) == expected

        await until(there)


@pytest.mark.parametrize("frozen", [False, True], ids=["after", "with"])
async def test_a_client_that_ends_with_its_sidecar_leaves_nothing_on_record(
    server: EmbeddedServer, pod: RelayedPod, frozen: bool
) -> None:
    """``frozen``: the relay hears of both ends at once, and cannot tell which came first."""
    store, keys = MemoryStore(server.engine), JobKeys("default", "digits")

    async def records() -> int:
        result = await store.range(keys.prefix, prefix=True)
        return sum("/ops/" in kv.key for kv in result.kvs)

    assert pod.runner is not None
    async with connected(pod.port) as one:
        await one.ask(wire.Append(b"/log", b"x"))
        assert await one.ask(wire.Get(b"/log")) == b"x"
        assert await records() == 1
        if frozen:
            pod.runner.send_signal(signal.SIGSTOP)
        await pod.kill_sidecar()
    pod.runner.send_signal(signal.SIGCONT)
    await pod.start_sidecar()

    async def gone() -> bool:
        return await records() == 0

    await until(gone)


TERMINATED_WHILE_IT_ASKS = """
import os, signal, socket, sys, time
port, run_dir = int(sys.argv[1]), sys.argv[2]
store = socket.create_connection(("127.0.0.1", port))
store.sendall(bytes.fromhex(sys.argv[3]))
assert len(store.recv(4)) == 4
def end(number, frame):
    open(run_dir + "/handled", "w").close()
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
open(run_dir + "/greeted", "w").close()
while not os.path.exists(run_dir + "/go"):
    time.sleep(0.01)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
store.sendall(bytes.fromhex(sys.argv[4]))
open(run_dir + "/asks", "w").close()
store.recv(1)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
time.sleep(600)
"""
"""Asks as torch's client does: until the answer is there, no signal is handled."""


@pytest.mark.parametrize(
    "request_", [wire.Get(b"/a"), wire.Wait((b"/never",))], ids=lambda r: type(r).__name__
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
async def test_a_launcher_that_waits_for_a_sidecar_that_is_away_ends_by_a_sigterm_all_the_same(
    server: EmbeddedServer, tmp_path: Path, number: signal.Signals, request_: wire.Request
) -> None:
    run_dir = tmp_path / "run"
    hello = wire.HANDSHAKE + wire.encode(wire.Ping(7))
    (port,) = free_ports(1)
    asking = (sys.executable, "-c", TERMINATED_WHILE_IT_ASKS, str(port), str(run_dir))
    command = (*asking, hello.hex(), wire.encode(request_).hex())

    async def there(name: str) -> bool:
        return await asyncio.to_thread((run_dir / name).exists)

    async with relayed_pod(
        server.endpoint, run_dir, *command, port=port, MUSTER_GRACE_S="3"
    ) as pod:
        assert pod.sidecar is not None
        assert pod.runner is not None
        await until(lambda: there("greeted"))
        pod.sidecar.process.send_signal(number)
        await asyncio.to_thread((run_dir / "go").touch)
        await until(lambda: there("asks"))
        pod.runner.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await pod.runner.wait() == 143
        assert await there("handled")
        if number == signal.SIGSTOP:
            pod.sidecar.process.send_signal(signal.SIGCONT)


async def test_a_relaying_that_fails_closes_its_connection_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(ledger: RelayLedger) -> bytes:
        raise RuntimeError("a planted defect")

    monkeypatch.setattr(RelayLedger, "begin", fail)
    path, (port,) = str(tmp_path / "c10d.sock"), free_ports(1)
    relay = Relay(port, path)
    async with await asyncio.start_unix_server(lambda reader, writer: writer.close(), path):
        await relay.listen()
        try:
            async with connected(port) as client, asyncio.timeout(DEADLINE_S):
                assert await client.at_end()
        finally:
            await relay.close()
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.name == "launcher_shim.pod.relay"
    assert "a planted defect" in str(record.exc_info)
