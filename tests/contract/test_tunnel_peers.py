# SPDX-License-Identifier: Apache-2.0
"""Who gets through the tunnel and who does not: real TLS on loopback, members in a memory store."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from agent.parts import member_parts, tunnel_of
from agent.surroundings import MemberSettings, Sockets
from agent.tunnel import connections, worker_end
from agent.tunnel.certificate import make_pem
from agent.tunnel.connections import Ends, HandshakeError, call_peer, encode_hello
from agent.tunnel.identity import TunnelIdentity, read_identity
from launcher_shim.hosts import token_of
from launcher_shim.rundir.exec_frames import (
    ABANDON,
    ATTACHED,
    GONE,
    Attaching,
    Decoder,
    Frame,
    encode,
    encode_attaching,
    read_attaching,
)
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.members.registrar import Registrar
from rdzv.members.registration import Identity
from rdzv.records.job import Member, Role
from rdzv.records.policy import JobPolicy
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.ports import free_ports
from tests.support.sidecars.jobs import KEYS, begin_next_life, loaded, surroundings
from tests.support.sidecars.processes import until

TTL_S = 60.0
SESSION = "0123456789abcdef" * 2


@cache
def key(number: int) -> TunnelIdentity:
    """One of a few keys; what is made of them is forgotten with each test."""
    made = read_identity(make_pem())
    assert made is not None
    return made


class Pod:
    """A member with its end of the tunnel, and a launcher's side or an agent that echoes."""

    def __init__(self, registrar: Registrar, client: JobClient, run_dir: Path) -> None:
        self.registrar = registrar
        self.client = client
        self.run_dir = run_dir
        self.host = token_of(registrar.identity.member, registrar.identity.pod_uid)
        self.opened: list[Attaching] = []
        self.abandoned: set[str] = set()
        self.registration: asyncio.Task[None]

    async def leave(self) -> None:
        """Leave the job; the end of the tunnel stays."""
        self.registration.cancel()
        await asyncio.gather(self.registration, return_exceptions=True)
        await self.registrar.leave(5.0)

    async def open(self, host: str, session: str = SESSION) -> Ends:
        """Connect as ``kubexec.sh`` does."""
        ends = Ends(*await asyncio.open_unix_connection(self.run_dir / "tunnel.sock"))
        ends.writer.write(encode_attaching(Attaching(host, session, 1)))
        return ends

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Be the agent: tell that it is attached, and echo. To an ABANDON, say nothing."""
        decoder = Decoder()
        opening, *_ = decoder.feed(await reader.read(65536))
        if opening.kind == ABANDON:
            self.abandoned.add(read_attaching(opening).session)
            await reader.read()
            writer.close()
            return
        self.opened.append(read_attaching(opening))
        writer.write(encode(ATTACHED))
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()


@asynccontextmanager
async def pod(
    engine: MemoryEngine,
    directory: Path,
    name: str,
    number: int,
    role: Role = "worker",
    keys: JobKeys = KEYS,
) -> AsyncIterator[Pod]:
    """A registered member, and its end of the tunnel."""
    (port,) = free_ports(1)
    run_dir = directory / f"{keys.job_name}-{name}"
    await asyncio.to_thread(run_dir.mkdir)
    store = MemoryStore(engine)
    client = JobClient.of(store, keys, clock=asyncio.get_running_loop().time)
    who = Identity(name, f"uid-{name}", "127.0.0.1", "host", "worker", 1, JobPolicy(1, 4))
    who = replace(who, role=role, tunnel_port=port, pin=key(number).pin)
    around = surroundings(store, name)
    settings = MemberSettings(keys=keys, identity=who, lease_ttl_s=TTL_S)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(loaded(client))
        parts = member_parts(around, settings, client)
        made = Pod(parts.registrar, client, run_dir)
        sockets = Sockets(
            tunnel=key(number), tunnel_path=run_dir / "tunnel.sock", exec_path=run_dir / "exec.sock"
        )
        agent = await asyncio.start_unix_server(made.answer, run_dir / "exec.sock")
        stack.callback(agent.close)
        tunnel = tunnel_of(around, parts, sockets, TTL_S)
        tasks = [asyncio.create_task(work) for work in (parts.registrar.run(), tunnel.run())]

        made.registration = tasks[0]

        async def end() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        stack.push_async_callback(end)
        async with asyncio.timeout(150):
            await parts.registrar.registered.wait()
            await tunnel.listening.wait()
        yield made


@pytest.fixture(autouse=True)
def watched_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is given up soon after a gap in the watch, and each of these has just begun."""
    monkeypatch.setattr(connections, "RETURN_S", 0.0)


@pytest.fixture
async def job(tmp_path: Path) -> AsyncIterator[tuple[Pod, Pod]]:
    """A launcher and a worker of one job."""
    engine = MemoryEngine()
    async with (
        pod(engine, tmp_path, "launcher", 0, "launcher") as launcher,
        pod(engine, tmp_path, "node-0", 1) as worker,
    ):
        await see(launcher.client, "node-0")
        await see(worker.client, "launcher")
        yield launcher, worker


async def see(client: JobClient, *names: str, gone: bool = False) -> None:
    """Wait until the mirror has them, or has them no more."""

    def seen() -> bool:
        return all((name in client.membership.snapshot().members) is not gone for name in names)

    await until(seen)


async def frames_of(ends: Ends, count: int) -> list[Frame]:
    decoder = Decoder()
    frames: list[Frame] = []
    async with asyncio.timeout(150):
        while len(frames) < count and (data := await ends.reader.read(65536)):
            frames += decoder.feed(data)
    return frames


async def test_what_a_launcher_says_reaches_the_agent_and_what_it_answers_comes_back(
    job: tuple[Pod, Pod],
) -> None:
    launcher, worker = job
    ends = await launcher.open(worker.host)
    assert await frames_of(ends, 1) == [Frame(ATTACHED)]
    assert worker.opened == [Attaching(worker.host, SESSION, 1)]
    sent = bytes(range(256)) * 4000

    async def send() -> None:
        ends.writer.write(sent)
        await ends.writer.drain()

    async with asyncio.timeout(150), asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        assert await ends.reader.readexactly(len(sent)) == sent
    ends.writer.close()


@pytest.mark.parametrize("host", ["node-7.00000000", "node-0.00000000"])
async def test_a_host_that_is_no_member_is_gone(job: tuple[Pod, Pod], host: str) -> None:
    ends = await job[0].open(host)
    (frame,) = await frames_of(ends, 1)
    assert (frame.kind, frame.body) == (
        GONE,
        f"host {host} is no present member of the job".encode(),
    )
    ends.writer.close()


async def test_a_worker_that_leaves_is_gone_and_its_connection_is_closed(
    job: tuple[Pod, Pod],
) -> None:
    launcher, worker = job
    ends = await launcher.open(worker.host)
    await frames_of(ends, 1)
    await worker.leave()
    await see(launcher.client, "node-0", gone=True)
    async with asyncio.timeout(150):
        assert await ends.reader.read() == b""
    again = await launcher.open(worker.host)
    (frame,) = await frames_of(again, 1)
    assert frame.kind == GONE
    for one in (ends, again):
        one.writer.close()


async def test_an_agent_that_does_not_answer_keeps_no_other_command_from_its_end(
    job: tuple[Pod, Pod], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_end, "ANSWER_TIMEOUT_S", 0.1)
    launcher, worker = job
    sessions = (SESSION, SESSION[::-1])
    opened = [await launcher.open(worker.host, session) for session in sessions]
    for ends in opened:
        await frames_of(ends, 1)
    await launcher.leave()
    await until(lambda: worker.abandoned == {*sessions})
    for ends in opened:
        ends.writer.close()


# -- an attacker's view


async def ended(port: int, *sent: bytes) -> bytes:
    """Send what nobody should, and return what came back until the connection ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    came = b""
    try:
        with suppress(ConnectionError):
            for data in sent:
                writer.write(data)
                await writer.drain()
            async with asyncio.timeout(150):
                came = await reader.read()
    finally:
        writer.close()
    return came


def port_of(worker: Pod) -> int:
    return worker.registrar.identity.tunnel_port


Attack = Callable[[Pod, Pod], Awaitable[None]]


async def no_hello(launcher: Pod, worker: Pod) -> None:
    assert await ended(port_of(worker), b"GET / HTTP/1.1\r\n\r\n") == b""


async def bare_tls(launcher: Pod, worker: Pod) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", port_of(worker), ssl=context)


async def long_hello(launcher: Pod, worker: Pod) -> None:
    assert await ended(port_of(worker), b"muster/1\xff\xff" + bytes(70_000)) == b""


async def stranger(launcher: Pod, worker: Pod) -> None:
    with pytest.raises(HandshakeError):
        await call_peer(worker_record(launcher), key(7))


async def another_worker(launcher: Pod, worker: Pod) -> None:
    with pytest.raises(HandshakeError):
        await call_peer(worker_record(launcher), key(1))


async def without_the_key(launcher: Pod, worker: Pod) -> None:
    """With the launcher's certificate, which is no secret, and another key."""
    own = key(0)
    began = await asyncio.open_connection("127.0.0.1", port_of(worker))
    began[1].write(encode_hello(own.certificate))
    async with asyncio.timeout(150):
        assert await began[0].readexactly(10)  # it knows the certificate
    began[1].close()
    forged = TunnelIdentity(key(7).pem, own.certificate)
    with suppress(HandshakeError, OSError):
        ends = await call_peer(worker_record(launcher), forged)
        # The client's side of TLS 1.3 is through before its certificate was looked at.
        try:
            ends.writer.write(encode_attaching(Attaching(worker.host, SESSION, 1)))
            assert await ends.reader.read(1) == b""
        finally:
            ends.writer.close()
    assert worker.opened == []


def worker_record(launcher: Pod) -> Member:
    return launcher.client.membership.snapshot().members["node-0"]


async def replayed(launcher: Pod, worker: Pod) -> None:
    """Everything that a real launcher sent, as somebody on the way may have recorded it."""
    recorded: list[bytes] = []

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port_of(worker))

        async def forth() -> None:
            while data := await reader.read(65536):
                recorded.append(data)
                there[1].write(data)

        forwarding = asyncio.create_task(forth())
        with suppress(ConnectionError):
            while data := await there[0].read(65536):
                writer.write(data)
        forwarding.cancel()
        for one in (there[1], writer):
            one.close()

    server = await asyncio.start_server(record, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    ends = await call_peer(replace(worker_record(launcher), tunnel_port=port), key(0))
    ends.writer.write(encode_attaching(Attaching(worker.host, SESSION, 1)))
    assert await frames_of(ends, 1) == [Frame(ATTACHED)]
    before = len(worker.opened)
    ends.writer.close()
    server.close()
    hello, *rest = recorded
    await ended(port_of(worker), hello, *rest)
    assert len(worker.opened) == before


async def removed(launcher: Pod, worker: Pod) -> None:
    record = worker_record(launcher)
    await launcher.leave()
    await see(worker.client, "launcher", gone=True)
    with pytest.raises(HandshakeError):
        await call_peer(record, key(0))


async def former_generation(launcher: Pod, worker: Pod) -> None:
    """The store has begun another life of the job, to which the worker has gone over."""
    record = worker_record(launcher)
    seen = worker.client.membership.snapshot().job
    assert seen is not None
    # The launcher does not follow.
    launcher.registration.cancel()
    await asyncio.gather(launcher.registration, return_exceptions=True)
    await begin_next_life(worker.client.store, KEYS, seen)
    await until(lambda: worker.registrar.generation == 2)
    with pytest.raises(HandshakeError):
        await call_peer(record, key(0))


UNKNOWN = "its certificate is that of no present member of this job"


@pytest.mark.parametrize(
    ("attack", "sentence"),
    [
        (no_hello, "it began with no certificate"),
        (bare_tls, "it began with no certificate"),
        (long_hello, "it began with a certificate of 65535 bytes"),
        (stranger, UNKNOWN),
        (another_worker, "node-0 is no launcher, and only a launcher starts commands"),
        (without_the_key, "it does not hold the key of its certificate"),
        (replayed, "it does not hold the key of its certificate"),
        (removed, UNKNOWN),
        (former_generation, UNKNOWN),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
async def test_i8_who_is_no_launcher_of_this_job_is_refused_and_logged(
    job: tuple[Pod, Pod], caplog: pytest.LogCaptureFixture, attack: Attack, sentence: str
) -> None:
    launcher, worker = job
    async with asyncio.timeout(120):
        await attack(launcher, worker)

        def refused() -> bool:
            return any(
                getattr(record, "event", "") == "tunnel_refused" and sentence in record.getMessage()
                for record in caplog.records
            )

        await until(refused)
    assert all(one == Attaching(worker.host, SESSION, 1) for one in worker.opened)


async def test_i8_the_launcher_of_another_job_is_refused(tmp_path: Path) -> None:
    engine = MemoryEngine()
    async with (
        pod(engine, tmp_path, "launcher", 0, "launcher", JobKeys("team", "other")),
        pod(engine, tmp_path, "node-0", 1) as worker,
    ):
        record = worker.client.membership.snapshot().members["node-0"]
        with pytest.raises(HandshakeError):
            await call_peer(record, key(0))
        assert worker.opened == []


async def test_i8_at_a_workers_address_somebody_else_gets_no_command(job: tuple[Pod, Pod]) -> None:
    """Another pod may have the address by now."""
    launcher, _ = job
    came = bytearray()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(encode_hello(key(7).certificate))
        came.extend(await reader.read())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(HandshakeError, match="at its address is not the sidecar of node-0"):
        await call_peer(replace(worker_record(launcher), tunnel_port=port), key(0))
    server.close()
    assert bytes(came) == b""


async def test_i8_who_says_nothing_is_waited_for_no_longer_than_a_while(
    job: tuple[Pod, Pod], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_TIMEOUT_S", 0.2)
    assert await ended(port_of(job[1])) == b""


async def test_i8_however_many_say_nothing_a_launcher_gets_through(
    job: tuple[Pod, Pod], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, worker = job
    monkeypatch.setattr(worker_end, "UNKNOWN_MAX", 4)
    silent = [await asyncio.open_connection("127.0.0.1", port_of(worker)) for _ in range(12)]
    ends = await launcher.open(worker.host)
    assert await frames_of(ends, 1) == [Frame(ATTACHED)]
    for one in (*silent, ends):
        one[1].close()
