# SPDX-License-Identifier: Apache-2.0
"""The launcher's end of the tunnel: takes commands at a unix socket, and connects to their hosts.

It keeps nothing of what goes through it: what a connection has lost is for the two who speak by it
to repeat. Where the launcher's side of a command ends before the command, it tells the host.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path

from agent.rundir.pod_socket import listening_at
from agent.tunnel.absence import ABSENT_S, Absence
from agent.tunnel.connections import Connections
from agent.tunnel.handshake import HandshakeError, call
from agent.tunnel.identity import TunnelIdentity
from agent.tunnel.opening import OpeningError, read_opening
from agent.tunnel.peers import NoPeer, called, is_present
from agent.tunnel.relay import READ_SIZE, Ends, relay
from launcher_shim.horovod.exec.attaching import Attaching, encode_attaching
from launcher_shim.horovod.exec.frames import ABANDON, GONE, encode
from launcher_shim.horovod.exec.lease import patience_s
from rdzv.job import JobClient
from rdzv.records.job import Member

log = logging.getLogger(__name__)

LAST_WORD_S = 0.5
"""For a host to end its side once the launcher's has: it may still get a last acknowledgement."""
RETRY_S = 0.2
RETRY_MAX_S = 2.0
"""Between two calls of a sidecar that does not answer, while its member is there."""
UNREACHED_S = 50.0
"""How long such a sidecar is called beyond the lease: by then its side of the path has been noticed
to be gone, and its agent has ended the command."""


class LauncherEnd:
    """Listens at ``path``. ``generation`` is what this sidecar is registered in, or None.

    ``clock`` is monotonic, in seconds; ``lease_ttl_s`` is that of all sidecars of the job.
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
        # Twice as long as an agent lets a command live of which it hears nothing.
        self._abandon_timeout_s = 2.0 * patience_s(math.ceil(lease_ttl_s))

    @property
    def carrying(self) -> int:
        """How many commands go through it."""
        return self.connections.carrying

    async def run(self) -> None:
        """Serve until cancelled; raises ``ConfigError`` if the path is too long for a socket."""
        try:
            async with listening_at(self._path, self._serve, READ_SIZE):
                self.listening.set()
                await asyncio.Event().wait()
        finally:
            await self.connections.end()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A launcher that has gone away needs no answer. Of a cancelled task, asyncio's server would
        # make an error.
        with self.connections.kept(writer), suppress(OSError, asyncio.CancelledError):
            await self._carry(Ends(reader, writer))

    async def _carry(self, local: Ends) -> None:
        try:
            opening = await read_opening(local.reader)
            reached = await self._unless_ended(local, self._reach(opening.attaching.host))
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

    async def _unless_ended(
        self, local: Ends, reaching: Coroutine[None, None, tuple[Member, Ends]]
    ) -> tuple[Member, Ends] | None:
        """What ``reaching`` returns or raises; None if the launcher's side ends before."""
        reach = asyncio.create_task(reaching)
        # Nothing may come before the answer, so what is read here is the end.
        ended = asyncio.create_task(local.reader.read(1))
        try:
            await asyncio.wait((reach, ended), return_when=asyncio.FIRST_COMPLETED)
            return reach.result() if reach.done() else None
        finally:
            for task in (reach, ended):
                task.cancel()
            await asyncio.gather(reach, ended, return_exceptions=True)

    async def _abandon(self, attaching: Attaching) -> None:
        """Have the command ended: nobody is here any more who would hear how it ends."""
        # Asked for again and again until the host answers, is gone, or has ended it by itself.
        with suppress(NoPeer, OSError, TimeoutError):
            async with asyncio.timeout(self._abandon_timeout_s):
                while True:
                    member, remote = await self._reach(attaching.host)
                    with self.connections.to(member, remote.writer):
                        remote.writer.write(encode_attaching(attaching, ABANDON))
                        if await remote.reader.read(1):
                            return
                    await asyncio.sleep(RETRY_S)

    async def _reach(self, host: str) -> tuple[Member, Ends]:
        """Connect to the host for as long as it is a member; raises ``NoPeer``.

        One that is a member and is not reached for long is given up, too.
        """
        pause_s, said, called_s = RETRY_S, "", self._clock()
        absence = Absence(ABSENT_S)
        while True:
            snapshot, generation = self._client.membership.snapshot(), self._generation()
            try:
                if generation is None:
                    # What it will be registered in is not known yet, nor then who is there.
                    raise HandshakeError("this sidecar is not registered")
                member = called(snapshot, generation, host)
                absence.over()
                remote = await call(member, self._own)
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
                if generation is None:
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
