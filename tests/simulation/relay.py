# SPDX-License-Identifier: Apache-2.0
"""What stands between a torchrun and the sidecars of its pod, one after the other.

It plays ``muster-run``'s relay: a request that was sent and not answered is sent again to the next
sidecar, under its old number, and what the sidecar gave to keep is shown to the next one. Bytes on
sockets are not simulated: a request reaches the session as the value that they would be parsed to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from launcher_shim.c10d.request_order import RelayNumbers
from launcher_shim.c10d.session import LauncherSession
from launcher_shim.tcpstore import wire

if TYPE_CHECKING:
    from tests.simulation.nodes import Sidecar
    from tests.support.clocks.virtual import SimulatedLoop


class Connection:
    """One client's connection, for as long as the client lives; one request at a time.

    ``container``: which life of the training container it is of, where anybody tells them apart.
    """

    def __init__(self, loop: SimulatedLoop, number: int, container: int = 0) -> None:
        self._loop = loop
        own = wire.SESSION_BYTES - wire.CONTAINER_BYTES
        self._id = container.to_bytes(wire.CONTAINER_BYTES, "big") + number.to_bytes(own, "big")
        self._note = b""
        self._sent = 0
        self._pending: tuple[int, wire.Request, asyncio.Future[bytes]] | None = None
        self._sidecar: Sidecar | None = None
        self._session: LauncherSession | None = None
        self._relay: RelayNumbers | None = None
        self._closed = False

    def meet(self, sidecar: Sidecar) -> None:
        """Connect to the next sidecar, as soon as it listens."""
        self._sidecar, self._session = sidecar, None
        self._loop.spawn(sidecar.process, self._open(sidecar), "relayed connection")

    async def ask(self, request: wire.Request) -> bytes:
        """Send a request; return the answer, whichever sidecar gives it."""
        self._sent += 1
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._pending = (self._sent, request, answer)
        if self._session is not None:
            self._send(self._session)
        return await answer

    def close(self) -> None:
        """The client is gone."""
        self._closed = True
        sidecar, session = self._sidecar, self._session
        if sidecar is not None and session is not None:
            self._loop.call_soon(session.closed, context=sidecar.process.context)

    async def _open(self, sidecar: Sidecar) -> None:
        await sidecar.endpoint.listening.wait()
        if self._closed or self._sidecar is not sidecar:
            return
        again = () if self._pending is None else (self._pending[0],)
        preface = wire.Preface(self._id, self._sent + 1, again, self._note)
        self._relay = RelayNumbers(preface, self._keep)
        self._session = LauncherSession(
            sidecar.endpoint.sessions, f"{sidecar.name}.{self._id.hex()}", self._relay
        )
        if self._pending is not None:
            self._serve(self._session, self._relay)

    def _send(self, session: LauncherSession) -> None:
        sidecar, relay = self._sidecar, self._relay
        assert sidecar is not None
        assert relay is not None
        self._loop.call_soon(self._serve, session, relay, context=sidecar.process.context)

    def _serve(self, session: LauncherSession, relay: RelayNumbers) -> None:
        if self._pending is None or session is not self._session or self._closed:
            return
        number, request, answer = self._pending
        assert relay.next() == number
        served = session.handle(request)
        if isinstance(served, bytes):
            self._answer(answer, served)
        else:
            task = asyncio.ensure_future(_awaited(served))
            task.add_done_callback(lambda _: self._answered(session, answer, task))

    def _answered(
        self, session: LauncherSession, answer: asyncio.Future[bytes], task: asyncio.Task[bytes]
    ) -> None:
        if session is self._session and not task.cancelled():
            self._answer(answer, task.result())

    def _answer(self, answer: asyncio.Future[bytes], value: bytes) -> None:
        self._pending = None
        if not answer.done():
            answer.set_result(value)

    def _keep(self, note: bytes) -> None:
        self._note = note


async def _awaited(answer: Awaitable[bytes]) -> bytes:
    return await answer
