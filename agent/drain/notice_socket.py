# SPDX-License-Identifier: Apache-2.0
"""The socket in the run directory that takes notices and answers with the phases of the drain.

A client sends one line and gets a line for each phase, until the drain is over. If it loses the
connection, it connects and sends the line again: notices are idempotent.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from agent.drain.notice import LINE_LENGTH, Notice, read_notice
from agent.rundir.pod_socket import PodSocket
from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.reconcile import first_of

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 64
LINE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Phase:
    """One line to a client: ``name`` is the phase, ``outcome`` is set if it is the last.

    ``step``: the one that all ranks saved for the drain, if they did.
    """

    name: str
    sentence: str
    outcome: str = ""
    step: int | None = None

    @property
    def last(self) -> bool:
        """Whether this is the last line to the client."""
        return self.name in ("released", "cancelled", "refused")

    def line(self) -> bytes:
        """Encode the phase as one line of JSON."""
        fields: dict[str, object] = {"phase": self.name, "sentence": self.sentence}
        if self.outcome:
            fields["outcome"] = self.outcome
        if self.step is not None:
            fields["step"] = self.step
        return json.dumps(fields).encode() + b"\n"


class NoticeSocket:
    """The server of notices on the socket ``path``; None: do not listen.

    ``notify`` takes a notice. ``phase_after`` waits until the phase is not the given one (None:
    any) and returns it.
    """

    def __init__(
        self,
        path: Path | None,
        notify: Callable[[Notice], None],
        phase_after: Callable[[Phase | None], Awaitable[Phase]],
    ) -> None:
        self._notify = notify
        self._phase_after = phase_after
        self._socket = PodSocket(
            path, self._serve, limit=LINE_LENGTH, connections_max=CONNECTIONS_MAX
        )
        self.listening = self._socket.listening

    async def run(self) -> None:
        """Serve until cancelled; raise ``ConfigError`` if the path is too long for a socket."""
        await self._socket.run()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A client that disconnects changes nothing: its notice stays valid.
        with suppress(ConnectionError, TimeoutError):
            await self._converse(reader, writer)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(LINE_TIMEOUT_S):
                notice = read_notice(await reader.readuntil(b"\n"))
        except asyncio.IncompleteReadError:
            return
        except (RecordError, asyncio.LimitOverrunError) as error:
            log.warning("a notice is refused: %s", error, extra={"event": "notice_refused"})
            writer.write(Phase("refused", str(error)).line())
            await writer.drain()
            return
        self._notify(notice)
        phase: Phase | None = None
        while phase is None or not phase.last:
            news = await first_of(self._phase_after(phase), reader.read(1))
            if not isinstance(news, Phase):
                return  # the client has disconnected
            phase = news
            writer.write(phase.line())
            await writer.drain()
