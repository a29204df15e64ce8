# SPDX-License-Identifier: Apache-2.0
"""One sidecar's end of the tunnel, the launcher's above all, and the effect of membership changes.

The launcher's end takes commands at a unix socket, and connects to their hosts. It keeps nothing of
what goes through it: the two ends repeat what a connection has lost. If the launcher's side of a
command ends before the command, it tells the host.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from agent.rundir.channels import listening_at
from agent.tunnel.connections import (
    ABSENT_S,
    READ_SIZE,
    Absence,
    Connections,
    Ends,
    HandshakeError,
    OpeningError,
    UnknownSidecar,
    call_peer,
    read_opening,
    relay,
)
from agent.tunnel.identity import NoPeer, TunnelIdentity, called_peer, is_present
from agent.tunnel.worker_end import WorkerEnd
from launcher_shim.rundir.exec_frames import (
    ABANDON,
    GONE,
    Attaching,
    encode,
    encode_attaching,
    patience_s,
)
from rdzv.job import JobClient
from rdzv.members.registrar import Registrar
from rdzv.reconcile import Loop, Outlook, first_of
from rdzv.records.job import Member

log = logging.getLogger(__name__)

LAST_WORD_S = 0.5
"""Longest wait for the host's side to end after the launcher's, in seconds: it may still get a last
acknowledgement."""
RETRY_S = 0.2
RETRY_MAX_S = 2.0
"""Retry interval, first and longest, for a sidecar that does not answer while its member is
present, in seconds."""
UNREACHED_S = 50.0
"""Time beyond the lease TTL for which such a sidecar is called, in seconds: by then its side has
noticed that the path is gone, and its agent has ended the command. A sidecar that answers without
knowing this one while the store is away is called until the store is back: it has its agent hold
the command."""


class LauncherEnd:
    """The launcher's end, at the socket ``path``.

    ``generation`` returns the one that this sidecar is registered in, or None. ``clock`` is
    monotonic, in seconds; ``lease_ttl_s`` is that of all sidecars of the job.
    """

    def __init__(
        self,
        path: Path,
        own: TunnelIdentity,
        client: JobClient,
        generation: Callable[[], int | None],
        clock: Callable[[], float],
        lease_ttl_s: float,
    ) -> None:
        self.listening = asyncio.Event()
        self.connections = Connections()
        self._path = path
        self._own = own
        self._client = client
        self._generation = generation
        self._clock = clock
        self._unreached_s = lease_ttl_s + UNREACHED_S
        # Twice the time after which an agent ends a command that it hears nothing of.
        self._abandon_timeout_s = 2.0 * patience_s(math.ceil(lease_ttl_s))

    @property
    def carrying(self) -> int:
        """The number of commands that go through it."""
        return self.connections.carrying

    async def run(self) -> None:
        """Serve until cancelled; raise ``ConfigError`` if the path is too long for a socket."""
        try:
            async with listening_at(self._path, self._serve, READ_SIZE):
                self.listening.set()
                await asyncio.Event().wait()
        finally:
            await self.connections.end()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A launcher that has disconnected needs no answer. asyncio's server would report a
        # cancelled task as an error.
        with self.connections.kept(writer), suppress(OSError, asyncio.CancelledError):
            await self._carry(Ends(reader, writer))

    async def _carry(self, local: Ends) -> None:
        try:
            opening = await read_opening(local.reader)
            # Nothing more comes before the answer: what is read is the end of the launcher's side.
            reached = await first_of(
                self._reach(opening.attaching.host), _until_ended(local.reader)
            )
        except (OpeningError, NoPeer) as error:
            log.warning("cannot carry a command: %s", error, extra={"event": "tunnel_not_carried"})
            local.writer.write(encode(GONE, str(error).encode()))
            await local.writer.drain()
            return
        if reached is not None:
            member, remote = reached
            with self.connections.to(member, remote.writer):
                remote.writer.write(opening.frame)
                if await relay(local, remote, LAST_WORD_S):
                    return
        if not opening.abandons:
            await self._abandon(opening.attaching)

    async def _abandon(self, attaching: Attaching) -> None:
        """Have the host end the command: no process here waits for its result any more."""
        # Repeat it until the host answers, is gone, or has ended the command by itself, which it
        # does not while the store is away.
        since_s = self._clock()
        with suppress(NoPeer):
            while (left_s := since_s + self._abandon_timeout_s - self._clock()) > 0:
                with suppress(OSError):  # of which TimeoutError is one
                    async with asyncio.timeout(left_s):
                        member, remote = await self._reach(attaching.host)
                        with self.connections.to(member, remote.writer):
                            remote.writer.write(encode_attaching(attaching, ABANDON))
                            if await remote.reader.read(1):
                                return
                if not self._client.mirror.healthy(self._clock()):
                    since_s = self._clock()
                await asyncio.sleep(RETRY_S)

    async def _reach(self, host: str) -> tuple[Member, Ends]:
        """Connect to the host for as long as it is a member; raise ``NoPeer`` if it is none.

        Raises it also for a member that was not reached for the lease TTL and ``UNREACHED_S``.
        """
        pause_s, said, called_s = RETRY_S, "", self._clock()
        absence = Absence(ABSENT_S)
        while True:
            snapshot, generation = self._client.membership.snapshot(), self._generation()
            try:
                if generation is None:
                    # Until it is registered, neither its generation nor the members of that are
                    # known.
                    raise HandshakeError("this sidecar is not registered")
                member = called_peer(snapshot, generation, host)
                absence.over()
                remote = await call_peer(member, self._own)
                now = self._client.membership.snapshot()
                if is_present(now, self._generation(), member):
                    return member, remote
                remote.writer.close()
            except NoPeer:
                if absence.lasts(self._clock(), self._client.mirror.healthy_for_s(self._clock())):
                    raise
            except HandshakeError as error:
                if said != str(error):
                    log.warning(
                        "cannot reach host %s, retrying: %s",
                        *(host, said := str(error)),
                        extra={"event": "tunnel_unreachable"},
                    )
                there = isinstance(error, UnknownSidecar)
                if generation is None or (there and not self._client.mirror.healthy(self._clock())):
                    called_s = self._clock()
                elif self._clock() - called_s >= self._unreached_s:
                    raise NoPeer(
                        f"the sidecar of host {host} was not reached for"
                        f" {self._unreached_s:g} s: {error}"
                    ) from error
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._client.membership.changed_from(snapshot)
            pause_s = min(2 * pause_s, RETRY_MAX_S)


async def _until_ended(reader: asyncio.StreamReader) -> None:
    await reader.read(1)


class Tunnel(Loop):
    """The server of ``end``, which closes its connections to pods that are no longer members.

    None: this pod has no tunnel.
    """

    def __init__(
        self, client: JobClient, registrar: Registrar, end: LauncherEnd | WorkerEnd | None
    ) -> None:
        super().__init__()
        self._client = client
        self._registrar = registrar
        self._end = end
        self._nothing_to_await = asyncio.Event()
        self._nothing_to_await.set()

    @property
    def listening(self) -> asyncio.Event:
        """The event that is set once it listens; always set if there is no end."""
        return self._nothing_to_await if self._end is None else self._end.listening

    @property
    def carrying(self) -> int:
        """The number of commands that go through it now."""
        return 0 if self._end is None else self._end.carrying

    @property
    def serves(self) -> bool:
        """Whether this pod takes commands."""
        return isinstance(self._end, WorkerEnd)

    async def until_agent(self) -> None:
        """Wait until a command could be started here; return at once if this pod takes none."""
        if isinstance(self._end, WorkerEnd):
            await self._end.until_agent()

    async def run(self) -> None:
        """Serve until cancelled; raise ``ConfigError`` if it cannot listen."""
        if self._end is None:
            await asyncio.Event().wait()
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._end.run(), name="tunnel-end")
            tasks.create_task(super().run(), name="tunnel-peers")

    async def step(self) -> Outlook:
        """Close the connections of those that are no longer members."""
        snapshot, generation = self._client.membership.snapshot(), self._registrar.generation
        # An unregistered sidecar knows nothing newer.
        if self._end is not None and generation is not None:
            present = partial(is_present, snapshot, generation)
            for member in self._end.connections.close_unless(present):
                log.warning(
                    "closed a connection of the tunnel: %s is no longer a member",
                    member.name,
                    extra={"event": "tunnel_closed"},
                )
        return Outlook(partial(self._client.membership.changed_from, snapshot))
