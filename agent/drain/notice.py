# SPDX-License-Identifier: Apache-2.0
"""The notice that this pod will end: its line, the socket that takes it, and the record kept of it.

A client sends one line of JSON and gets a line for each phase, until the drain is over. Deadlines
are sent as seconds left: wall clocks are never compared. Notices come in any order and number and
are idempotent: they make one drain, in which the earliest deadline counts. Its record is for a
sidecar that starts again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast, get_args

from agent.rundir.channels import PodSocket
from launcher_shim.pod.hold import reserve_s
from launcher_shim.rundir import layout
from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.reconcile import first_of
from rdzv.records.codec import Seconds, decode, encode, load_record, take_seconds
from rdzv.records.drain import CONTROLLER, ENDING_SOURCES, SIGNS, Drain, Outcome

log = logging.getLogger(__name__)

Source = Literal["prestop", "sigterm", "hold", "control"]
"""The source of a notice: the sidecar's own preStop hook, ``muster-run`` that got a SIGTERM,
``muster-hold`` as the training container's preStop hook, or any other program in the pod."""

REASON_LENGTH = 200
LINE_LENGTH = 4096

CONNECTIONS_MAX = 64
LINE_TIMEOUT_S = 5.0

SAME_DEADLINE_S = 1.0
"""Tolerance between equal deadlines, in seconds: a repeated notice differs by its own delay."""

OUTLIVED_S = 5.0
"""Time past its deadline after which a pod that lives on was not being ended after all, in
seconds."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice; ``seconds_left`` until the pod is killed, or None if the source cannot know."""

    source: Source
    reason: str
    seconds_left: float | None


def read_notice(line: bytes) -> Notice:
    """Decode the line of a client; raise ``RecordError`` with what is wrong with it."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"a notice that is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RecordError("a notice is a JSON object")
    source, reason, left = (fields.get(name) for name in ("notice", "reason", "seconds_left"))
    if source not in get_args(Source):
        raise RecordError(f"'notice' is {source!r}: expected one of {', '.join(get_args(Source))}")
    if not isinstance(reason, str):
        raise RecordError(f"'reason' is {reason!r}: expected text")
    if left is not None:
        left = take_seconds("a notice", fields, "seconds_left")
    printable = "".join(c if c.isprintable() else " " for c in reason)[:REASON_LENGTH]
    return Notice(cast(Source, source), printable, left)


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

    A client sends one line and gets a line for each phase, until the drain is over. If it loses
    the connection, it connects and sends the line again: notices are idempotent.
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


@dataclass(frozen=True, slots=True)
class OwnDrainRecord:
    """The notes on this pod's drain. Times are of the boot clock, None if there is none.

    ``sources`` are those of all notices. ``generation`` is the one in whose store keys the drain
    was last seen, 0 for none, and ``revision`` that of its record then. ``outcome`` and ``step``
    are those that it had, so that a store that has lost them does not decide once more.
    """

    pod_uid: str
    sources: tuple[str, ...]
    reason: str
    deadline_boot_s: Seconds | None
    reserve_s: Seconds
    generation: int = 0
    revision: int = 0
    outcome: Outcome = ""
    step: int | None = None

    @classmethod
    def of_notice(
        cls, pod_uid: str, notice: Notice, now_boot_s: float, grace_s: float
    ) -> OwnDrainRecord:
        """Build the notes of a first notice; ``grace_s`` is the pod's, for one without a time."""
        left_s = grace_s if notice.seconds_left is None else notice.seconds_left
        return cls(pod_uid, (notice.source,), notice.reason, now_boot_s + left_s, reserve_s(left_s))

    @classmethod
    def of_drain(cls, drain: Drain, now_boot_s: float) -> OwnDrainRecord:
        """Build the notes of a drain that another process stored: its time counts from now on."""
        left_s = drain.seconds_left
        deadline_s = None if left_s is None else now_boot_s + left_s
        return cls(drain.pod_uid, (drain.source,), drain.reason, deadline_s, drain.reserve_s)

    def joined(self, other: OwnDrainRecord) -> OwnDrainRecord:
        """Return these notes with the sources of ``other``, and its deadline if it is earlier.

        Those are of another notice, or of a drain just stored by another process, which may leave
        it less time, or make it an order.
        """
        both = replace(self, sources=tuple(dict.fromkeys((*self.sources, *other.sources))))
        ours_s = math.inf if self.deadline_boot_s is None else self.deadline_boot_s
        if other.deadline_boot_s is None or other.deadline_boot_s > ours_s - SAME_DEADLINE_S:
            return both
        return replace(both, deadline_boot_s=other.deadline_boot_s, reserve_s=other.reserve_s)

    @property
    def ending(self) -> bool:
        """Whether a hook or signal of the pod itself gave notice."""
        return not ENDING_SOURCES.isdisjoint(self.sources)

    @property
    def other_source(self) -> str:
        """The first source but the controller, which withdraws its own requests alone; or empty."""
        return next((source for source in self.sources if source != CONTROLLER), "")

    @property
    def outlived_boot_s(self) -> float | None:
        """The moment after which a pod that still lives was not being ended; None for none.

        There is none for an order. The end of a pod runs the preStop hook of the sidecar, and stops
        the training container: both notices together are no mistake.
        """
        certain = "prestop" in self.sources and not {"sigterm", "hold"}.isdisjoint(self.sources)
        if self.deadline_boot_s is None or certain or not SIGNS.issuperset(self.sources):
            return None
        return self.deadline_boot_s + OUTLIVED_S

    def after_cancellation(self) -> OwnDrainRecord | None:
        """Return the notes without what was cancelled; None if the pod is not being ended.

        A drain of a pod that is being ended cannot be cancelled: such a notice came later.
        """
        left = tuple(source for source in self.sources if source in ENDING_SOURCES)
        return replace(self, sources=left, generation=0, outcome="", step=None) if left else None

    def record(self, member: str, now_boot_s: float) -> Drain:
        """Build the drain record as of ``now_boot_s``."""
        left_s = self.deadline_boot_s
        return Drain(
            pod_uid=self.pod_uid,
            member=member,
            reason=self.reason,
            source=self.sources[0],
            seconds_left=None if left_s is None else max(0.0, left_s - now_boot_s),
            reserve_s=self.reserve_s,
            requested_by=member,
            ending=self.ending,
            outcome=self.outcome,
            step=self.step,
        )

    def to_json(self) -> bytes:
        """Encode the notes for the run directory."""
        return encode(self)

    @classmethod
    def from_json(cls, content: bytes) -> OwnDrainRecord:
        """Decode the notes; raise ``RecordError`` if they are malformed."""
        fields = load_record(layout.DRAIN, content)
        notes = decode(cls, layout.DRAIN, fields, ("generation", "revision"))
        if not notes.sources:
            raise RecordError(f"{layout.DRAIN}: 'sources' is empty, expected who gave notice")
        return notes
