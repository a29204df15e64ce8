# SPDX-License-Identifier: Apache-2.0
"""The tunnel's rules: who is admitted, what counts once, which command has a slot, what 0 means."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from agent.tunnel import identity
from launcher_shim.exit_status import EXIT_TERMINATED, EXIT_UNKNOWN
from launcher_shim.horovod.exec import client
from launcher_shim.horovod.exec.command import WarmStarts
from launcher_shim.horovod.exec.server import ExecServer
from launcher_shim.horovod.exec.session import CommandSession, Worker
from launcher_shim.hosts import token_of
from launcher_shim.rundir import exec_frames as lease
from launcher_shim.rundir import layout
from launcher_shim.rundir.exec_frames import (
    ATTACHED,
    EXIT,
    GONE,
    START,
    STDOUT,
    Attaching,
    Decoder,
    ExecFrameError,
    Frame,
    Stream,
    encode,
    encode_attaching,
)
from rdzv.records.job import Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import Snapshot
from tests.support.records import member

HOST = "node-0.1a2b3c4d"
PATIENCE_S = 150.0
PINS = {"l": "aa", "a": "bb", "b": "cc"}


@pytest.fixture(autouse=True)
def _no_blocking_call() -> None:
    """The agent is a program of its own, which may wait for the disk in its event loop."""


async def test_i8_who_is_admitted() -> None:
    """A launcher calls present workers, of this generation, by their pins; nobody else does."""
    there = _membership("lab")
    launcher, worker = there.members["l"], there.members["a"]
    assert identity.calling_peers(there, 1, "aa") == launcher
    assert identity.called_peer(there, 1, _host(worker)) == worker
    no_peer: Sequence[Callable[[], object]] = (
        lambda: identity.calling_peers(there, 1, "dd"),  # a stranger's certificate
        lambda: identity.calling_peers(there, 1, ""),  # as a member without a tunnel has
        lambda: identity.calling_peers(there, 1, "bb"),  # a worker's
        lambda: identity.calling_peers(there, 2, "aa"),  # the launcher of a former generation
        lambda: identity.calling_peers(there, None, "aa"),
        lambda: identity.calling_peers(_membership("ab"), 1, "aa"),  # it has left
        lambda: identity.called_peer(there, 2, _host(worker)),
        lambda: identity.called_peer(there, 1, token_of("a", "uid-before")),
        lambda: identity.called_peer(_membership("lb"), 1, _host(worker)),
    )
    for number, asked in enumerate(no_peer):
        with suppress(identity.NoPeer):
            found = asked()
            raise AssertionError(f"case {number}: {found} is admitted")
    stays = (
        (there, 1, worker, True),
        (there, 2, worker, False),
        (_membership("lb"), 1, worker, False),
        (_membership("lab", uid="uid-next"), 1, worker, False),
        (_membership("lab", pin="ee"), 1, worker, False),  # its sidecar has been started again
    )
    for snapshot, generation, peer, present in stays:
        assert identity.is_present(snapshot, generation, peer) is present


def test_i8_frames_come_once_and_in_order() -> None:
    """Whatever connections are cut, each frame counts once, and those before it first."""
    random = Random(17)
    for _ in range(50):
        sender, receiver, heard = Stream(), Stream(), []
        on_way: list[bytes] = []
        for number in range(30):
            on_way.append(sender.send(STDOUT, b"%d" % number))
            if random.random() < 0.3:  # cut: some of it has come, and perhaps an acknowledgement
                heard += _heard(receiver, on_way[: random.randrange(len(on_way) + 1)])
                if random.random() < 0.5:
                    sender.acknowledge(receiver.received)
                told = receiver.received if random.random() < 0.7 else sender.acknowledged
                on_way = sender.resume(told)
        heard += _heard(receiver, on_way)
        assert heard == [b"%d" % number for number in range(30)]
        sender.acknowledge(receiver.received)
        assert sender.all_acknowledged
        assert sender.kept_bytes == 0


async def test_i8_one_command_for_each_slot() -> None:
    """A new one ends its predecessor first, and that has not succeeded: it was told to end."""
    async with _agent() as agent:
        out = agent.run_dir / "out"
        # It takes SIGTERM for a reason to end well.
        first = await _Session.start(agent, 1, f"trap 'echo first >>{out}; exit 0' TERM; echo up")
        await first.until(STDOUT)
        second = await _Session.start(agent, 2, f"echo second >>{out}", lasts=False)
        assert (await second.until(EXIT)).body == b"0"
        assert out.read_text().split() == ["first", "second"]
        assert (await first.until(EXIT)).body == b"%d" % EXIT_TERMINATED


async def test_i8_a_late_connection_takes_no_place() -> None:
    """One that comes again, as recorded, or was delayed on the way does not get the command."""
    async with _agent() as agent:
        go = agent.run_dir / "go"
        does = f"echo up; until [ -e {go} ]; do sleep 0.05; done; exit 5"
        session = await _Session.start(agent, 1, does, attempt=2, lasts=False)
        await session.until(STDOUT)
        for attempt in (1, 2):
            late = await _Session.attach(agent, 1, attempt)
            said = b"connection %d of it has been here before" % attempt
            assert await late.until(GONE, ATTACHED) == Frame(GONE, said)
        go.touch()
        assert (await session.until(EXIT)).body == b"5"


def test_i8_what_is_unknown_is_255() -> None:
    """A host that is gone, a way that is gone, a command that nobody knows: never 0."""
    attached = encode(ATTACHED, b"", 1)
    ended = attached + encode(EXIT, b"7", 1)
    for answers, status in (
        ([ended], 7),
        ([attached, b""], EXIT_UNKNOWN),  # cut, and nothing listens any more
        ([attached, encode(GONE, b"it is gone")], EXIT_UNKNOWN),
        ([attached + encode(GONE, b"its host is gone")], EXIT_UNKNOWN),
        ([attached + encode(EXIT, b"0", 2)], EXIT_UNKNOWN),  # a frame is missing
        ([attached + encode(EXIT, b"256", 1)], EXIT_UNKNOWN),
        ([], EXIT_UNKNOWN),
    ):
        found = _hook(answers)
        assert found == status, f"{found} after {answers}"


# -- rules that are left out


def _present_without(rule: str) -> Callable[[Snapshot, int | None, Member], bool]:
    def is_present(snapshot: Snapshot, generation: int | None, peer: Member) -> bool:
        job, there = snapshot.job, snapshot.members.get(peer.name)
        holds = {
            "presence": there is not None,
            "generation": job is not None and job.generation == generation,
            "pod": there is None or there.pod_uid == peer.pod_uid,
            "pin": there is None or there.pin == peer.pin,
        }
        return all(held for name, held in holds.items() if name != rule)

    return is_present


def _status_of(worker: Worker) -> int:
    worker.terminating = False
    return _finish(worker)


def _attach_again(session: CommandSession, writer: Any, attaching: Attaching) -> None:
    _attach(session, writer, attaching._replace(attempt=session._attempt + 1))


_finish, _attach = Worker.finish, CommandSession.attach
PLANTED: dict[str, tuple[Any, str, object]] = {
    **{
        f"the {rule} of a peer does not count": (identity, "is_present", _present_without(rule))
        for rule in ("presence", "generation", "pod", "pin")
    },
    "a worker that was told to end succeeds": (Worker, "finish", _status_of),
    "any connection takes the place": (CommandSession, "attach", _attach_again),
}
SCENARIOS: dict[Any, Callable[[], Coroutine[Any, Any, None]]] = {
    identity: test_i8_who_is_admitted,
    Worker: test_i8_one_command_for_each_slot,
    CommandSession: test_i8_a_late_connection_takes_no_place,
}
"""What finds a bug in each."""


@pytest.mark.parametrize("rule", PLANTED)
async def test_i8_a_planted_bug_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[rule])
    with pytest.raises(AssertionError):
        await SCENARIOS[PLANTED[rule][0]]()


# -- what the scenarios are made of


def _membership(names: str, uid: str = "", pin: str = "") -> Snapshot:
    """A launcher ``l`` and workers; ``uid`` and ``pin`` are those of ``a`` instead of its own."""
    made: dict[str, Member] = {}
    for age, name in enumerate(names, 1):
        made[name] = member(
            name,
            age,
            uid=uid if name == "a" else "",
            role="launcher" if name == "l" else "worker",
            tunnel_port=9401,
            pin=pin if pin and name == "a" else PINS[name],
        )
    made["old"] = member("old", 9, role="worker")  # of a version without tunnels
    return Snapshot(90, Job(JobPolicy(1, 4), mod_revision=7), made)


def _host(one: Member) -> str:
    return token_of(one.name, one.pod_uid)


def _heard(receiver: Stream, sent: Sequence[bytes]) -> list[bytes]:
    frames = Decoder().feed(b"".join(sent))
    try:
        counting = [receiver.receive(frame) for frame in frames]
    except ExecFrameError as error:
        raise AssertionError(str(error)) from error
    return [frame.body for frame in counting if frame is not None]


@dataclass(frozen=True)
class _Agent:
    """One that runs, and the connections to it."""

    run_dir: Path
    writers: list[asyncio.StreamWriter]


@asynccontextmanager
async def _agent() -> AsyncIterator[_Agent]:
    # Otherwise a busy machine would kill the worker before it has received the request to end.
    patient = patch.object(Worker.end, "__defaults__", (PATIENCE_S,))
    with patient, tempfile.TemporaryDirectory(prefix="agent-") as directory:
        run_dir, stop = Path(directory), asyncio.Event()
        serving = asyncio.create_task(ExecServer(HOST, os.environ, run_dir, WarmStarts()).run(stop))
        while not (run_dir / layout.EXEC_SOCKET).exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        made = _Agent(run_dir, [])
        try:
            yield made
        finally:
            for writer in made.writers:
                writer.close()
            stop.set()
            await serving


class _Session:
    """The launcher's side of one command, one connection of it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = Decoder()
        self._frames: list[Frame] = []

    @classmethod
    async def attach(cls, agent: _Agent, number: int, attempt: int = 1) -> _Session:
        path = agent.run_dir / layout.EXEC_SOCKET
        made = cls(*await asyncio.open_unix_connection(path))
        agent.writers.append(made._writer)
        made._writer.write(encode_attaching(Attaching(HOST, f"{number:032x}", attempt)))
        return made

    @classmethod
    async def start(
        cls, agent: _Agent, number: int, does: str, *, attempt: int = 1, lasts: bool = True
    ) -> _Session:
        made = await cls.attach(agent, number, attempt)
        told = f"env HOROVOD_HOSTNAME={HOST} HOROVOD_LOCAL_RANK=0"
        then = "; while :; do sleep 0.05; done" if lasts else ""
        (agent.run_dir / f"{number}.sh").write_text(does + then)
        text = f"cd / > /dev/null 2>&1 ; {told} sh {agent.run_dir}/{number}.sh"
        made._writer.write(encode(START, text.encode(), 1))
        return made

    async def until(self, *kinds: int) -> Frame:
        """The next frame of one of these kinds."""
        while True:
            while self._frames:
                frame = self._frames.pop(0)
                if frame.kind in kinds:
                    return frame
            data = await self._reader.read(65536)
            assert data, "the agent has closed the connection"
            self._frames += self._decoder.feed(data)


def _hook(answers: Sequence[bytes]) -> int:
    """How the launcher's side ends; each of its connections gets one answer, and is closed."""
    with tempfile.TemporaryDirectory(prefix="hook-") as directory:
        listener = socket.socket(socket.AF_UNIX)
        path = os.path.join(directory, layout.TUNNEL_SOCKET)
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            with closing(listener):
                for answer in answers:
                    connection, _ = listener.accept()
                    with closing(connection):
                        connection.recv(65536)
                        connection.sendall(answer)
            os.unlink(path)

        serving = threading.Thread(target=serve)
        serving.start()
        quick = patch.multiple(lease, LEASE_TTL_S=0, MARGIN_S=1)
        with quick, patch.dict(os.environ, {"MUSTER_RUN_DIR": directory}):
            status = client.main([HOST, "cd / > /dev/null 2>&1 ; env true"])
        # One that has its status does not come again.
        with suppress(OSError), closing(socket.socket(socket.AF_UNIX)) as rest:
            while serving.is_alive():
                rest.connect(path)
        serving.join(PATIENCE_S)
        return status
