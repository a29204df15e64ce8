# SPDX-License-Identifier: Apache-2.0
"""The c10d endpoint of one pod: its server, and the rendezvous that its launchers take part in.

The server listens on both loopback addresses, as torch's client may try either first, and on a
unix socket, for the relay of ``muster-run``; it serves no other client. Sessions give the keys
their meaning.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Collection, Sequence
from functools import partial

from launcher_shim.c10d.agent import TorchAgent
from launcher_shim.c10d.connection import Connection, ConnectionOwner, OpenSession
from launcher_shim.c10d.generation import Generation, Generations, Run
from launcher_shim.c10d.launchers import Launchers, StageStarts
from launcher_shim.c10d.quarantining import Quarantining
from launcher_shim.c10d.request_order import RelayNumbers
from launcher_shim.c10d.rounds.inputs import RoundPolicy
from launcher_shim.c10d.rounds.rendezvous import Rendezvous
from launcher_shim.c10d.rounds.stages import Kept, KeptMasters, KeptStages
from launcher_shim.c10d.session import LauncherSession
from launcher_shim.rundir.layout import (
    PathTooLong,
    bind_loopback,
    nascent_name,
    publish_socket,
    withdraw_socket,
)
from launcher_shim.rundir.rank_reports import StepLine
from rdzv.drain.inputs import LiveRound, LiveRounds
from rdzv.errors import ConfigError
from rdzv.members.registrar import Registrar
from rdzv.reconcile import Kernel, first_of
from rdzv.records.quarantine import TERMS, Terms
from rdzv.sentences import named

_logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 256
"""Maximum number of connections. torch opens one for each agent, and in 2.5 one for each worker."""
HANDSHAKE_TIMEOUT_S = 30.0
LAST_WRITES_TIMEOUT_S = 300.0
"""Total time for retries of writes that a client sent before it disconnected, in seconds. Longer
than the longest store outage of the fault matrix (90 s); bounded, because a fenced sidecar can
never write them."""
HELD_MAX = 64 * 1024 * 1024
"""Bytes that all clients together may hold in requests that are not complete yet."""

_ACCEPT_BACKLOG = 256
_CLOSE_TIMEOUT_S = 2.0


class C10dServer:
    """The listeners on loopback and on a unix socket; one session for each client connection.

    ``open_session`` gets a description of the peer, for logs, and the relay that it comes through
    or None. It is called once the client has shown that it speaks the protocol.

    It listens on both loopback addresses, as torch's client may try either first, and on a unix
    socket, for the relay of ``muster-run``.
    """

    def __init__(
        self,
        open_session: OpenSession,
        *,
        connections_max: int = CONNECTIONS_MAX,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        last_writes_timeout_s: float = LAST_WRITES_TIMEOUT_S,
    ) -> None:
        self._connections_max = connections_max
        self._connections: set[Connection] = set()
        self._closing = False
        self._host = ConnectionOwner(
            open_session,
            self._joined,
            self._left,
            self._shed,
            handshake_timeout_s,
            last_writes_timeout_s,
        )
        self._listeners: list[asyncio.Server] = []
        self._published: tuple[str, int] | None = None

    @property
    def connections(self) -> frozenset[Connection]:
        """The connections that are open now."""
        return frozenset(self._connections)

    async def listen_loopback(self, port: int) -> int:
        """Listen on 127.0.0.1 and, if the machine has it, on ::1; 0 chooses a port.

        Returns the port. Raises ConfigError if it is taken.
        """
        sockets = _bind(port)
        loop = asyncio.get_running_loop()
        # Created and kept without a suspension, so that a cancellation leaves no socket unclosed.
        listeners = [
            await loop.create_server(
                self._connect, sock=bound, backlog=_ACCEPT_BACKLOG, start_serving=False
            )
            for bound in sockets
        ]
        self._listeners += listeners
        for listener in listeners:
            await listener.start_serving()
        return int(sockets[0].getsockname()[1])

    async def listen_unix(self, path: str) -> None:
        """Listen on a unix socket, in the place of an older one at that path.

        Every user of the pod may connect: sidecar and launcher may run as different ones, and
        the pod is one trust domain. Raises ConfigError if the path is too long for a socket.
        """
        try:
            nascent = nascent_name(path)  # event loops unlink the name they bound, at close
        except PathTooLong as error:
            raise ConfigError(f"{named('--run-dir')}: {error}") from error
        loop = asyncio.get_running_loop()
        self._listeners.append(
            await loop.create_unix_server(self._connect, nascent, backlog=_ACCEPT_BACKLOG)
        )
        self._published = path, await asyncio.to_thread(publish_socket, nascent, path, 0o666)

    async def close(self) -> None:
        """Stop listening, cancel requests under way, and close every connection."""
        self._closing = True
        await self._stop_accepting()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self._published is not None:
            await asyncio.to_thread(withdraw_socket, *self._published)
            self._published = None
        connections = list(self._connections)
        for connection in connections:
            connection.give_up()
        if connections:
            _, late = await asyncio.wait(
                [connection.gone for connection in connections], timeout=_CLOSE_TIMEOUT_S
            )
            if late:
                _logger.error("%d c10d sessions did not end when cancelled", len(late))

    async def _stop_accepting(self) -> None:
        """Stop accepting, and wait until each accepted client has a connection, to be closed.

        Otherwise it would never be closed. asyncio accepts in one turn of the loop and makes
        connections in the two turns after it.
        """
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            for listening in listener.sockets:
                loop.remove_reader(listening.fileno())
        for _ in range(2):
            await asyncio.sleep(0)

    def _connect(self) -> Connection:
        return Connection(self._host)

    def _joined(self, connection: Connection) -> None:
        self._connections.add(connection)
        if self._closing:
            # Accepted just before the listener was closed.
            connection.give_up()
        elif len(self._connections) > self._connections_max:
            connection.fail(f"there are already {self._connections_max} connections")

    def _left(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def _shed(self) -> None:
        """Close the connection that holds most bytes, if all clients together hold too many."""
        if sum(connection.held for connection in self._connections) > HELD_MAX:
            largest = max(self._connections, key=lambda connection: connection.held)
            largest.fail(f"all clients together hold {HELD_MAX} bytes of unfinished requests")


def _bind(port: int) -> list[socket.socket]:
    """Bind both loopback addresses; raises ``ConfigError`` if the port is taken."""
    try:
        return bind_loopback(port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        if not port:
            raise ConfigError("no port is free on both 127.0.0.1 and ::1") from error
        raise ConfigError(
            f"port {port} of {error.filename} is taken (a torchrun that was started before the"
            " sidecar takes it unless --rdzv-conf says is_host=0); free it or choose another c10d"
            " port"
        ) from error


COALESCE_S = 0.02
"""Pause after a wake-up by the mirror or a rendezvous, in seconds, so that changes coalesce."""


class Endpoint:
    """The c10d server of one pod: on loopback and, if a path is given, on a unix socket.

    ``kept`` has the files for the next sidecar of this pod; None: there will be none. ``steps``
    reads the steps that the ranks of this pod report, ``failed`` the masters of the worlds in which
    one has reported an error; both may block. ``port``: 0 chooses one, None serves on the unix
    socket alone.
    """

    def __init__(
        self,
        *,
        kernel: Kernel,
        registrar: Registrar,
        port: int | None,
        unix_path: str | None,
        last_call_s: float,
        first_call_s: float = 30.0,
        kept: Kept | None = None,
        terms: Terms = TERMS,
        steps: Callable[[], Sequence[StepLine]] = tuple,
        failed: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.port: int | None = None
        self.listening = asyncio.Event()
        self._kernel = kernel
        self._client = client = kernel.client
        self._registrar = registrar
        self._wanted_port = port
        self._unix_path = unix_path
        self._make_policy = partial(RoundPolicy, last_call_s=last_call_s, first_call_s=first_call_s)
        self._opened = 0
        self._tasks: asyncio.TaskGroup
        self._server = C10dServer(self._open_session)
        self._generations = Generations(client, registrar, self._enter)
        self._quarantining = Quarantining(kernel, registrar.identity, terms=terms, steps=steps)
        self._stages = KeptStages(kept)
        self._masters = KeptMasters(kept)
        self._starts = StageStarts(
            self._generations,
            registrar,
            self._stages,
            restarted=unix_path is not None and registrar.held is not None,
            clock=kernel.clock,
        )
        self.sessions = Launchers(self._generations, registrar, self._starts, self._stages, failed)

    async def run(self) -> None:
        """Serve until cancelled; raises ``ConfigError`` if the port is taken."""
        await self._stages.read()
        await self._masters.read()
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._quarantining.run(), name="quarantine")
            self._tasks.create_task(self._masters.run(), name="masters")
            self.sessions.open(self._tasks)
            try:
                if self._wanted_port is not None:
                    self.port = await self._server.listen_loopback(self._wanted_port)
                if self._unix_path is not None:
                    await self._server.listen_unix(self._unix_path)
                self._starts.listen()
                self.listening.set()
                await self._generations.run()
            finally:
                self._generations.closing = True
                await self._server.close()

    @property
    def connections(self) -> int:
        """Launchers that are connected now."""
        return len(self._server.connections)

    @property
    def outlived(self) -> bool:
        """Whether a torchrun behind a relay would outlive this sidecar."""
        return any(connection.relayed for connection in self._server.connections)

    def launchers(self) -> list[tuple[str, TorchAgent]]:
        """Return the torchruns that are connected now, each with its run id."""
        return self._generations.connected()

    def rendezvous(self) -> dict[str, Rendezvous]:
        """Return the rendezvous that are followed, by run id."""
        return {run_id: run.rendezvous for run_id, run in self._runs().items()}

    @property
    def workers(self) -> int:
        """The workers that a torchrun of this pod started in its present round; 0 if unknown."""
        return max((run.workers() for run in self._runs().values()), default=0)

    @property
    def any_closed(self) -> bool:
        """Whether a run of this generation was closed."""
        current = self._generations.current
        return current is not None and current.rounds.any_closed

    async def caught_up(self) -> None:
        """Wait until the runs are those of the generation that the member is registered in.

        Returns at once if it is not registered: the last known ones still count.
        """
        await self._generations.caught_up()

    def live_rounds(self) -> LiveRounds:
        """Return the round that counts and the one of this pod, as drains see them."""
        current = self._generations.current
        return current.live_rounds() if current is not None else LiveRounds()

    def ranks_at(self, round: LiveRound, step: int) -> bool:
        """Note that this pod's ranks are at ``step``; return whether it is to report the first."""
        run = self._runs().get(round.run)
        return run is not None and run.rendezvous.ranks_at(round.number, step)

    async def forget_shared(self, root: bytes, present: bytes) -> None:
        """Delete what clients that belong to no rendezvous have stored under ``root``.

        That under ``present``, one of the folders there, stays.
        """
        if (current := self._generations.current) is not None:
            await current.shared.forget_others(root, present)

    def trains_in(self, round: LiveRound) -> bool:
        """Return whether a torchrun that is connected here has come into ``round``."""
        if (
            run := self._runs().get(round.run)
        ) is None or run.rendezvous.round.number != round.number:
            return False
        claims = [attachment.agent.claim for attachment in run.attached.values()]
        nonces = {claim.nonce for claim in claims if claim.world is not None}
        return any(seat.nonce in nonces for seat in run.rendezvous.round.frozen)

    async def live_rounds_changed(self, before: LiveRounds) -> LiveRounds:
        """Wait until ``live_rounds`` differ from ``before``; return them."""
        mirror = self._client.mirror
        while (now := self.live_rounds()) == before:
            # The mirror wakes for changes in the store, the rendezvous for changes by time alone.
            news = [run.rendezvous.news() for run in self._runs().values()]
            await first_of(mirror.changed_after(mirror.sequence), *news)
            await asyncio.sleep(COALESCE_S)
        return now

    # -- internals

    def _open_session(self, peer: str, relay: RelayNumbers | None) -> LauncherSession:
        member = self._registrar.identity.member
        if relay is not None:
            return LauncherSession(self.sessions, f"{member}.{relay.session.hex()}", relay)
        self._opened += 1
        return LauncherSession(
            self.sessions, f"{member}.{self._kernel.random.getrandbits(48):012x}.{self._opened}"
        )

    def _runs(self) -> dict[str, Run]:
        current = self._generations.current
        return current.runs if current is not None else {}

    def _enter(self, number: int) -> Generation:
        return Generation(
            number,
            self._kernel,
            registrar=self._registrar,
            quarantining=self._quarantining,
            masters=self._masters,
            make_policy=self._make_policy,
            tasks=self._tasks,
        )
