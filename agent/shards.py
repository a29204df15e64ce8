# SPDX-License-Identifier: Apache-2.0
"""Dynamic shards in the sidecar: the requests of this pod's ranks, and the answers.

A rank sends one line to ``shards.sock`` for each request. Each answer is decided by what the mirror
shows and written with compares; if they fail, it is decided again. A rank repeats a request whose
answer it did not get, which is harmless.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Self

from agent.drain.decisions import RoundSource
from agent.rundir.channels import PodSocket
from rdzv import shard_requests
from rdzv.dataclass import dataclass
from rdzv.drain.inputs import LiveRound
from rdzv.errors import LeaseLost, RecordError, StoreError
from rdzv.job import JobClient
from rdzv.members.registrar import Registrar
from rdzv.records.codec import take
from rdzv.records.shards import Intervals, Plan, Saved, places_of, saves_of
from rdzv.sentences import Diary
from rdzv.shard_ledger import ShardLedger, ShardProgress, ShardView, progress, progress_warning
from rdzv.shard_requests import Answer, Ask, answer_transaction
from rdzv.snapshot import Snapshot
from rdzv.store import Compare

log = logging.getLogger(__name__)

LINE_BYTES_MAX = 1 << 20
"""Bound on a line: a rank whose loop takes pieces from many places at once stays far below."""

PLACES_MAX = 1 << 62
NAME_LENGTH_MAX = 80
WHERE = "a request for shards"

ANSWER_S = 5.0
"""Deadline of one answer, in seconds: a rank in a collective loop waits no longer for it."""

PAUSE_PER_POD_S = 0.002
"""Longest backoff after a lost race, for each pod of the world, in seconds: all begin at the same
moment."""

BATCH_S = 2.0
BATCH_PER_POD_S = 0.03
"""Seconds of work that a rank asks for at once: ``BATCH_S``, or ``BATCH_PER_POD_S`` for each pod if
that is more. The pods of a world make about 33 requests a second together, as with reports of
saves. A shorter batch: less is trained twice after a kill, and less is left to the slowest at the
end."""

SEE_S = 2.0
"""Longest wait for the watch to show what a transaction wrote or found, in seconds."""

CONNECTIONS_MAX = 256
"""The ranks of one pod, and some to spare; a connection beyond them is closed, and retried."""


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """The request of a rank; the fields are those that ``rdzv.shard_requests.Ask`` explains.

    ``name`` is the data set's. ``master`` names the rank's round of torchrun, and is empty for one
    that names its ``world`` itself.
    """

    name: str
    master: str
    world: str
    ranks: int
    local_rank: int
    plan: Plan
    start: int
    epoch: int
    left: Intervals
    used: Intervals
    saves: tuple[Saved, ...]
    want: int
    confirmed: int = 0

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Parse one line; raise ``RecordError`` if it is malformed."""
        try:
            fields = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{WHERE} is no JSON ({error})") from error
        if not isinstance(fields, dict):
            raise RecordError(f"{WHERE} is {type(fields).__name__}, expected an object")
        seed = fields.get("seed")
        plan = Plan(
            _number(fields, "size", 1),
            _number(fields, "shard_size", 1),
            None if seed is None else take(WHERE, fields, "seed", int),
        )
        name = take(WHERE, fields, "name", str)
        if not 0 < len(name) <= NAME_LENGTH_MAX:
            raise RecordError(f"{WHERE}: a name has 1 to {NAME_LENGTH_MAX} characters")
        return cls(
            name=name,
            master=take(WHERE, fields, "master", str, ""),
            world=take(WHERE, fields, "world", str, ""),
            ranks=_number(fields, "ranks", 1),
            local_rank=_number(fields, "local_rank", 0),
            plan=plan,
            start=_number(fields, "start", 0),
            epoch=_number(fields, "epoch", 0),
            left=places_of(WHERE, fields.get("left", [])),
            used=places_of(WHERE, fields.get("used", [])),
            saves=saves_of(WHERE, fields.get("saves", [])),
            want=_number(fields, "want", 0),
            confirmed=_number(fields, "confirmed", 0),
        )


@dataclass(frozen=True, slots=True)
class ShardReply:
    """The reply to a rank.

    ``wait``: why there is no answer now, so that the rank asks again. ``lost``: why nothing that it
    does counts any more. ``refused``: its user's mistake. ``batch_s`` is how many seconds of work a
    rank should ask for at once, which limits the rate at which all of them write to the store.
    """

    given: Intervals = ()
    done: bool = False
    wait: str = ""
    lost: str = ""
    refused: str = ""
    batch_s: float = 0.0

    def line(self) -> bytes:
        """Encode the reply as one line of JSON."""
        return (
            json.dumps(
                {
                    "given": self.given,
                    "done": self.done,
                    "wait": self.wait,
                    "lost": self.lost,
                    "refused": self.refused,
                    "batch_s": self.batch_s,
                },
                separators=(",", ":"),
            ).encode()
            + b"\n"
        )


def _number(fields: dict[str, object], name: str, least: int) -> int:
    """Take one number of at least ``least``; one that is counted from 0 may be left out."""
    value = take(WHERE, fields, name, int, None if least else 0)
    if not least <= value <= PLACES_MAX:
        raise RecordError(f"{WHERE}: {name!r} is {value}, expected a number from {least} on")
    return value


class ShardDesk:
    """The desk for the ranks of one pod, which are in ``rounds``."""

    def __init__(
        self,
        client: JobClient,
        registrar: Registrar,
        rounds: RoundSource,
        *,
        random: Random,
    ) -> None:
        self._client = client
        self._registrar = registrar
        self._rounds = rounds
        self._random = random
        self._view = ShardView.following(client.keys, client.mirror)
        self._one_at_a_time = asyncio.Lock()
        self._diary = Diary(log)

    def progress(self) -> dict[str, ShardProgress]:
        """Return the progress of the job with each data set that has been handed out."""
        found = {name: progress(self._view.ledger(name)) for name in self._view.names}
        return {name: one for name, one in found.items() if one is not None}

    def ledgers(self) -> list[ShardLedger]:
        """Return the ledger of each data set that has been handed out."""
        return [self._view.ledger(name) for name in self._view.names]

    async def answer(self, request: ShardRequest) -> ShardReply:
        """Answer one request within ``ANSWER_S``, after which the reply is to ask again."""
        trouble = "other requests of this pod come first"
        try:
            async with asyncio.timeout(ANSWER_S), self._one_at_a_time:
                while not isinstance(reply := await self._try(request), ShardReply):
                    trouble = reply
                    pods = len(self._view.ledger(request.name).pods)
                    most_s = PAUSE_PER_POD_S * (1 + pods)
                    await asyncio.sleep(self._random.uniform(0.0, most_s))
                return reply
        except TimeoutError:
            return ShardReply(wait=trouble)

    async def _try(self, request: ShardRequest) -> ShardReply | str:
        """Decide and write an answer once; return it, or a sentence why to try again at once."""
        membership, generation = self._client.membership.snapshot(), self._registrar.generation
        if generation is None or membership.job is None:
            return ShardReply(wait="this pod is not registered in the store")
        round = None
        if not request.world:
            round = self._round_of(request.master)
            if round is None:
                return ShardReply(
                    wait=f"the round {request.master} of this rank is not the live one"
                )
        ledger = self._view.ledger(request.name)
        answer = shard_requests.decide(ledger, _present(membership), self._ask(request, round))
        if answer.refused or answer.lost:
            self._diary.say(f"no shards of {request.name}: {answer.reason}")
            return ShardReply(lost=answer.lost, refused=answer.refused)
        written = await self._write(request.name, membership, ledger, answer, round)
        if written:
            return written
        if answer.begins:
            self._tell_begin(request.name, answer)
            return answer.reason
        batch_s = max(BATCH_S, BATCH_PER_POD_S * len(answer.ledger.pods))
        return ShardReply(given=answer.given, done=answer.done, batch_s=batch_s)

    def _round_of(self, master: str) -> LiveRound | None:
        rounds = self._rounds.live_rounds()
        for round in (rounds.own, rounds.counts):
            if round is not None and round.live and round.master == master:
                return round
        return None

    def _ask(self, request: ShardRequest, round: LiveRound | None) -> Ask:
        me = self._registrar.identity
        return Ask(
            member=me.member,
            pod_uid=me.pod_uid,
            world=request.world if round is None else f"{round.run} {round.number}",
            ranks=request.ranks,
            local_rank=request.local_rank,
            plan=request.plan,
            start=request.start,
            epoch=request.epoch,
            run="" if round is None else round.run,
            round=0 if round is None else round.number,
            left=request.left,
            used=request.used,
            saves=request.saves,
            want=request.want,
            confirmed=request.confirmed,
        )

    async def _write(
        self,
        name: str,
        membership: Snapshot,
        before: ShardLedger,
        answer: Answer,
        round: LiveRound | None,
    ) -> str:
        """Write what the answer changes; return why that is not certain, or empty text if it is."""
        revision = self._client.mirror.certain_revision
        keys, generation = self._client.keys, self._registrar.generation
        assert generation is not None
        compares, operations = answer_transaction(
            keys, name, revision, membership, before, answer.ledger
        )
        if not operations:
            return ""
        if round is not None:
            # Require that the world of this rank is still the one that trains.
            key = keys.in_generation(generation).run(round.run).round
            compares.append(Compare(key, "mod", "=", round.mod_revision))
        try:
            compares.append(self._registrar.guard(generation).holds())
            result = await self._client.commit(compares, operations, see_s=SEE_S)
        except (StoreError, LeaseLost) as error:
            await asyncio.sleep(self._random.uniform(0.05, 0.2))
            return f"the store does not take it: {error}"
        if self._client.mirror.revision < result.revision:
            return "the watch of the store is behind"
        return "" if result.succeeded else "another pod came first"

    def _tell_begin(self, name: str, answer: Answer) -> None:
        world = answer.ledger.world
        assert world is not None
        unknown = progress_warning(name, answer.ledger)
        if unknown:
            log.warning("%s", unknown, extra={"event": "shards_unknown", "data_set": name})
        again = sum(high - low for low, high in answer.ledger.open.again)
        log.info(
            "shards of %s: a world of %d ranks goes on from step %d; %d places below the frontier"
            " are open again",
            name,
            world.ranks,
            world.start,
            again,
            extra={"event": "shards", "data_set": name, "start": world.start, "open_again": again},
        )


def _present(membership: Snapshot) -> dict[str, str]:
    return {name: member.pod_uid for name, member in membership.members.items()}


class ShardSocket:
    """A server on the socket ``path``; None: do not listen. ``answer`` answers one request."""

    def __init__(
        self, path: Path | None, answer: Callable[[ShardRequest], Awaitable[ShardReply]]
    ) -> None:
        self.answer = answer
        self._socket = PodSocket(
            path, self._serve, limit=LINE_BYTES_MAX, connections_max=CONNECTIONS_MAX
        )

    async def run(self) -> None:
        """Serve until cancelled; raise ``ConfigError`` if the path is too long for a socket."""
        await self._socket.run()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A client that disconnects loses nothing: its next request says everything again.
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                reply = await self._reply(reader)
                writer.write(reply.line())
                await writer.drain()

    async def _reply(self, reader: asyncio.StreamReader) -> ShardReply:
        try:
            request = ShardRequest.from_line(await reader.readuntil(b"\n"))
        except asyncio.LimitOverrunError as error:
            raise ConnectionAbortedError(f"a request without end: {error}") from error
        except RecordError as error:
            log.warning("a request is refused: %s", error, extra={"event": "shards_refused"})
            return ShardReply(refused=str(error))
        return await self.answer(request)
