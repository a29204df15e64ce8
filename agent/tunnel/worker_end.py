# SPDX-License-Identifier: Apache-2.0
"""The worker's end of the tunnel: takes a launcher's commands over TLS, for the agent beside it."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from agent.tunnel.connections import (
    ABSENCE_LOOK_S,
    ABSENT_S,
    READ_SIZE,
    Absence,
    Connections,
    Ends,
    HandshakeError,
    OpeningError,
    answer_peer,
    notice_lost_path,
    read_opening,
    relay,
    unacknowledged_for_long,
)
from agent.tunnel.identity import NoPeer, TunnelIdentity, calling_peers, is_present
from launcher_shim.rundir.exec_frames import (
    ABANDON,
    GONE,
    HOLD,
    Attaching,
    encode,
    encode_attaching,
)
from rdzv.errors import ConfigError
from rdzv.job import JobClient
from rdzv.records.job import Member
from rdzv.sentences import named

log = logging.getLogger(__name__)

PERIOD_S = 60.0
LINES = 10
"""Lines logged in each period; further refusals are only counted."""

BACKLOG = 128
UNKNOWN_MAX = 64
"""Bound on the connections whose other end has not proved who it is."""
AGENT_TIMEOUT_S = 5.0
"""Time that a container which has just started may take until its agent listens, in seconds."""
AGENT_INTERVAL_S = 0.1
DETACHED_MAX_S = 50.0
"""Time beyond the lease TTL for which a command without a connection is remembered, in seconds; by
then its agent has ended it."""
ANSWER_TIMEOUT_S = 5.0
"""Time limit for an agent to end a command, in seconds; one that is stopped ends it later."""
HOLD_INTERVAL_S = 2.0
"""Interval at which the agent gets the order to hold its commands while the store is away, and poll
interval for that, in seconds: no event tells that the store has become unreachable."""
FIRST_INTERVAL_S = 0.3
"""Poll interval for an agent that has never listened, in seconds: its image may still be pulled."""
ACCEPT_PAUSE_S = 0.5
"""Pause after a connection that could not be accepted, as without a free file descriptor, in
seconds."""


class Refusals:
    """The log of refusals, written to ``log``; ``clock`` is monotonic, in seconds."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._since_s = float("-inf")
        self._count = 0

    def tell(self, address: str, why: str) -> None:
        """Log, or only count, the refusal of a connection from ``address``."""
        if self._clock() - self._since_s >= PERIOD_S:
            more = self._count - LINES
            if more > 0:
                self._warn("%d more connections to the tunnel were refused before that", more)
            self._since_s, self._count = self._clock(), 0
        self._count += 1
        if self._count <= LINES:
            self._warn("a connection from %s to the tunnel is refused: %s", address, why)

    def _warn(self, sentence: str, *values: object) -> None:
        self._log.warning(sentence, *values, extra={"event": "tunnel_refused"})


class WorkerEnd:
    """The worker's end, at ``address``, an IP and a port; ``host`` is this pod's name as a host.

    ``agent_path`` is the socket of the agent beside this sidecar. ``generation`` returns the one
    that this sidecar is registered in, or None; ``fenced`` whether that is so because another pod
    has its name. ``clock`` is monotonic, in seconds, ``lease_ttl_s`` that of all sidecars of the
    job.
    """

    def __init__(
        self,
        address: tuple[str, int],
        own: TunnelIdentity,
        host: str,
        agent_path: Path,
        client: JobClient,
        generation: Callable[[], int | None],
        fenced: Callable[[], bool],
        clock: Callable[[], float],
        lease_ttl_s: float,
    ) -> None:
        self.listening = asyncio.Event()
        self.connections = Connections()
        self._address, self._port = address
        self._own = own
        self._host = host
        self._agent_path = agent_path
        self._client = client
        self._generation = generation
        self._fenced = fenced
        self._clock = clock
        self._detached_max_s = lease_ttl_s + DETACHED_MAX_S
        self._unknown: dict[asyncio.Task[None], str] = {}
        self._refusals = Refusals(log, clock)
        self._path_lost = False
        self._detached: dict[str, tuple[Member, Absence, float]] = {}
        self._detaching = asyncio.Event()

    @property
    def carrying(self) -> int:
        """The number of commands that go through it, or may again in a moment."""
        return self.connections.carrying + len(self._detached)

    async def run(self) -> None:
        """Serve until cancelled; raise ``ConfigError`` if the port cannot be bound."""
        listener = self._listen()
        self.listening.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_absences(), name="tunnel-absences")
                tasks.create_task(self._hold_while_unsure(), name="tunnel-hold")
                while True:
                    connection = await self._accept(listener)
                    address = _address_of(connection)
                    task = tasks.create_task(self._serve(connection, address))
                    self._unknown[task] = address
                    task.add_done_callback(lambda ended: self._unknown.pop(ended, None))
                    self._make_room()
        finally:
            listener.close()

    async def until_agent(self) -> None:
        """Wait until the agent of this pod's container has begun to listen."""
        # The standard library has no notification of a new file: poll.
        while not await asyncio.to_thread(self._agent_path.exists):  # noqa: ASYNC110
            await asyncio.sleep(FIRST_INTERVAL_S)

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._address, self._port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            taken = error.errno == errno.EADDRINUSE
            raise ConfigError(
                f"{named('--tunnel-port')}: port {self._port} of {self._address}"
                f" {'is taken' if taken else f'cannot be had ({error.strerror})'}: choose another"
            ) from error
        listener.setblocking(False)
        return listener

    async def _accept(self, listener: socket.socket) -> socket.socket:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                self._refusals.tell("?", f"it cannot be taken: {error.strerror}")
                await asyncio.sleep(ACCEPT_PAUSE_S)
            else:
                notice_lost_path(connection)
                return connection

    def _make_room(self) -> None:
        """Cancel the oldest unproven connection of the address with most, if there are too many."""
        if len(self._unknown) > UNKNOWN_MAX:
            (most, _), *_ = Counter(self._unknown.values()).most_common(1)
            oldest = next(task for task, address in self._unknown.items() if address == most)
            del self._unknown[oldest]
            oldest.cancel()
            self._refusals.tell(most, f"{UNKNOWN_MAX} others have not said yet either who they are")

    async def _serve(self, connection: socket.socket, address: str) -> None:
        with self.connections.kept(), suppress(OSError):  # a connection that breaks has ended
            try:
                ends, member = await answer_peer(connection, self._own, self._known)
            except (HandshakeError, NoPeer) as error:
                self._refusals.tell(address, str(error))
                return
            except asyncio.CancelledError:
                return  # cancelled for others, or the sidecar ends
            task = asyncio.current_task()
            assert task is not None
            self._unknown.pop(task, None)
            with self.connections.to(member, ends.writer):
                if not is_present(self._client.membership.snapshot(), self._generation(), member):
                    self._refusals.tell(address, f"{member.name} is no longer a member")
                    return
                self._path_lost = False
                watch = asyncio.create_task(self._close_when_lost(connection, ends.writer))
                try:
                    await self._carry(ends, member)
                finally:
                    watch.cancel()
                    await asyncio.gather(watch, return_exceptions=True)

    async def _close_when_lost(
        self, connection: socket.socket, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):  # it has ended
            await unacknowledged_for_long(connection)
            self._path_lost = True
            writer.transport.abort()

    def _known(self, pin: str) -> Member:
        return calling_peers(self._client.membership.snapshot(), self._generation(), pin)

    async def _carry(self, remote: Ends, member: Member) -> None:
        try:
            opening = await read_opening(remote.reader)
            if opening.attaching.host != self._host:
                raise OpeningError(f"this is host {self._host}, not {opening.attaching.host}")
            local = await self._reach_agent()
        except (OpeningError, OSError) as error:
            log.warning(
                "cannot carry a command of %s: %s",
                *(member.name, error),
                extra={"event": "tunnel_not_carried"},
            )
            remote.writer.write(encode(GONE, str(error).encode()))
            await remote.writer.drain()
            return
        session = opening.attaching.session
        self._detached.pop(session, None)
        local.writer.write(opening.frame)
        agent_has_ended = await relay(remote, local)
        # The kernel's keep-alive ends a connection with this error.
        self._path_lost |= isinstance(remote.reader.exception(), TimeoutError)
        if not agent_has_ended and not opening.abandons:
            self._detached[session] = member, Absence(ABSENT_S), self._clock()
            self._detaching.set()

    # -- commands whose launcher is away

    async def _follow_absences(self) -> None:
        """End the commands of launchers that are no longer members."""
        while True:
            while not self._detached:
                self._detaching.clear()
                await self._detaching.wait()
            snapshot = self._client.membership.snapshot()
            now = self._clock()
            healthy_for_s = self._client.mirror.healthy_for_s(now)
            for session, (member, absence, since_s) in tuple(self._detached.items()):
                there = snapshot.members.get(member.name)
                if session not in self._detached:
                    continue  # it goes on, since the loop began
                if self._unsure:
                    absence.over()
                    self._detached[session] = member, absence, now  # the agent holds it
                elif self._fenced() or (there is not None and there.pod_uid == member.pod_uid):
                    absence.over()
                    if now - since_s > self._detached_max_s:
                        del self._detached[session]
                elif absence.lasts(now, healthy_for_s):
                    del self._detached[session]
                    log.warning(
                        "ending a command of %s, which is no longer a member",
                        member.name,
                        extra={"event": "tunnel_abandoned"},
                    )
                    await self._abandon(Attaching(self._host, session))
            with suppress(TimeoutError):
                async with asyncio.timeout(ABSENCE_LOOK_S):
                    await self._client.membership.changed_from(snapshot)

    async def _hold_while_unsure(self) -> None:
        """Have the agent keep its commands while it cannot be known whether launchers are there.

        A sidecar that starts while the store is away, at either end, connects the two no more until
        it is back.
        """
        while True:
            if self._unsure:
                await self._tell_agent(encode(HOLD))
            await asyncio.sleep(HOLD_INTERVAL_S)

    @property
    def _unsure(self) -> bool:
        """Whether what keeps this sidecar from the store may keep the launcher's from it, too.

        If the path to the launcher was lost as well, this node is more likely cut off from both,
        and others may have taken its place.
        """
        if self._path_lost:
            return False
        if not self._client.mirror.healthy(self._clock()):
            return True
        return self._generation() is None and not self._fenced()

    async def _abandon(self, attaching: Attaching) -> None:
        await self._tell_agent(encode_attaching(attaching, ABANDON))

    async def _tell_agent(self, opening: bytes) -> None:
        # An agent that is not there has no command.
        with suppress(OSError, TimeoutError):
            agent = await self._reach_agent()
            try:
                agent.writer.write(opening)
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await agent.reader.read(1)
            finally:
                agent.writer.close()

    async def _reach_agent(self) -> Ends:
        deadline_s = asyncio.get_running_loop().time() + AGENT_TIMEOUT_S
        while True:
            try:
                return Ends(*await asyncio.open_unix_connection(self._agent_path, limit=READ_SIZE))
            except OSError as error:
                if asyncio.get_running_loop().time() > deadline_s:
                    raise OSError(
                        f"no agent of its container listens at {self._agent_path}"
                        f" ({error.strerror})"
                    ) from error
            await asyncio.sleep(AGENT_INTERVAL_S)


def _address_of(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "?"
