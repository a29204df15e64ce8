# SPDX-License-Identifier: Apache-2.0
"""The launchers that are connected to this pod's endpoint, and the stage of one that is to start.

A container passes over only a stage that it would run again. So each member records a digest of its
launch line beside the run's keys, before its torchrun starts, with the container that it starts in,
and keeps that of the container that has a place in the world: it may be started again while the
others are about to end the stage. The list of nodes that ended the stage well names containers,
too: so the lines that count are those that trained, not those that asked last. A node of that world
that died before its workers were done passes over nothing: its work would be left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from launcher_shim.c10d.agent import TorchAgent, connect
from launcher_shim.c10d.clean_up import clean_up
from launcher_shim.c10d.generation import Attachment, Generations
from launcher_shim.c10d.rounds.inputs import RunSnapshot
from launcher_shim.c10d.rounds.records import Note, Seat
from launcher_shim.c10d.rounds.stages import KeptStages, container_of
from launcher_shim.c10d.values.operations import Kv
from launcher_shim.c10d.values.transactions import Stamp
from launcher_shim.tcpstore import wire
from rdzv.members.registrar import Registrar

log = logging.getLogger(__name__)


IDLE_S = 10.0
"""Maximum time for which an answer to a draining pod is held back before it must ask again, in
seconds."""

FAREWELLS_S = 2.0
"""Time within which a relay has reconnected its clients to a new sidecar, or closed them, in
seconds."""


class StageStarts:
    """The answers to torchruns that are about to start in this pod.

    ``restarted``: a sidecar before this one may have left torchruns behind. ``clock`` is
    monotonic, in seconds.
    """

    def __init__(
        self,
        generations: Generations,
        registrar: Registrar,
        stages: KeptStages,
        *,
        restarted: bool,
        clock: Callable[[], float],
    ) -> None:
        self._generations = generations
        self._run = generations.run_of
        self._registrar = registrar
        self._member = registrar.identity.member
        self._stages = stages
        self._restarted = restarted
        self._clock = clock
        self._listening_s = 0.0

    def listen(self) -> None:
        """Note that relays can connect from now on."""
        self._listening_s = self._clock()

    async def meant_for(self, container: str, run_id: str) -> str:
        """Wait until no torchrun of this pod takes part; return the stage of the next one.

        Raises ``WireError`` if one is alive.
        """
        if self._restarted:
            # A torchrun that has outlived the sidecar before this one may not be back yet: its
            # relay comes within moments, and it has its place once the member is registered.
            await self._generations.first()
            await self._farewells()
        await self._generations.vacant()
        name = self._stages.stages.next(container, run_id)
        if container and self._ended_well(name):
            # A torchrun that has ended while there was no sidecar may still have to report that.
            await self._farewells()
            await self._generations.vacant()
            name = self._stages.stages.next(container, run_id)
        return name

    async def begin(
        self, run_id: str, nonce: str | None, line: bytes, stamp: Stamp, *, may_pass: bool
    ) -> tuple[Kv, bytes]:
        """Answer a torchrun that is about to start; return the keys of its stage and the answer.

        ``PASSED``: it need not start, as its stage has ended well. ``AGAIN``: not now, as its pod
        drains, and it would have no place. Empty: it starts. ``line`` is a digest of its launch
        line: a torchrun with another line is no restart of one that has ended well. ``may_pass``:
        no torchrun of its container has taken part yet.
        """
        await self._registrar.registered.wait()
        if nonce is not None and nonce == self._stages.stages.passed_by:
            return self._run(run_id).kv, wire.PASSED  # it asks again, as its answer was lost
        name = await self.meant_for(container_of(nonce), run_id)
        if await self._idles(name):
            return self._run(name).kv, wire.AGAIN
        kv = self._run(name).kv
        if not self._ended_well(name):
            await kv.writes.put([await self._line(name, container_of(nonce), line)], stamp)
            return kv, b""
        passed = (
            nonce is not None
            # A torchrun of a pod that drains would train nothing: no work is left out.
            and (may_pass or self._drains(name))
            and await self._was_run(name, line)
            and await self._stages.pass_over(nonce, name)
        )
        if passed:
            log.info("a torchrun skips the stage %s, which has succeeded already", name)
        return kv, wire.PASSED if passed else b""

    async def _line(self, name: str, container: str, line: bytes) -> tuple[bytes, bytes]:
        """Build the record of the line that a torchrun of ``name`` starts with: key and value."""
        run, key, before = self._run(name), line_key(self._member), None
        seats = [one for one in run.rendezvous.round.frozen if one.member == self._member]
        placed = container_of(seats[0].nonce) if seats else ""
        if placed and placed != container:
            (before,) = await run.kv.reads.get_all([key])
        return key, recorded(container, line, before or b"", placed)

    async def _farewells(self) -> None:
        await asyncio.sleep(self._listening_s + FAREWELLS_S - self._clock())

    async def _idles(self, name: str) -> bool:
        """Return whether this pod drains while ``name`` goes on, after a wait for that to change.

        Its torchrun would be shown no place, and end with status 1 once the others have ended well.
        """
        try:
            async with asyncio.timeout(IDLE_S):
                while self._drains(name) and not self._ended_well(name):
                    await self._run(name).rendezvous.news()
        except TimeoutError:
            return True
        return False

    def _drains(self, name: str) -> bool:
        run = self._run(name)
        return self._member in run.members.at(run.rendezvous.round).leaving

    async def _was_run(self, name: str, line: bytes) -> bool:
        """Return whether ``name``, which ended well, was run with that line, here to its end."""
        run, here = self._run(name), self._member
        current = run.rendezvous.round
        own = [seat for seat in current.frozen if seat.member == here]
        held = [] if self._drains(name) else own
        if not are_done(held, run.rendezvous.snapshot()):
            return False
        members = [seat.member for seat in current.frozen]
        values = await run.kv.reads.get_all([line_key(member) for member in members])
        known = dict(zip(members, values, strict=True))
        return was_run(line, here, current.frozen, known)

    def _ended_well(self, name: str) -> bool:
        current = self._generations.current
        return current is not None and current.rounds.ended_well(name)


def line_key(member: str) -> bytes:
    """Return the key, among those of the run, of the lines that ``member`` has asked with."""
    return wire.STAGE + member.encode()


def recorded(container: str, line: bytes, before: bytes = b"", placed: str = "") -> bytes:
    """Build the value at a member's key: the container that asked, and the digest ``line``.

    ``placed``: the container that has a place in the world; its line is kept from ``before``, the
    value so far.
    """
    lines = [container.encode() + b" " + line]
    kept = _lines(before).get(placed.encode())
    if kept is not None and placed != container:
        lines.append(placed.encode() + b" " + kept)
    return b"\n".join(lines)


def was_run(
    line: bytes, member: str, frozen: Sequence[Seat], values: Mapping[str, bytes | None]
) -> bool:
    """Return whether the world ``frozen``, which has ended well, was started with ``line``.

    ``values``: the values at ``line_key``, by member. A member of that world must have its own
    line; any other, such as a pod that comes later, may have the line of any of them.
    """
    ran: dict[str, bytes] = {}
    for seat in frozen:
        of_seat = _lines(values.get(seat.member)).get(container_of(seat.nonce).encode())
        if of_seat is not None:
            ran[seat.member] = of_seat
    return line == ran[member] if member in ran else line in ran.values()


def _lines(value: bytes | None) -> dict[bytes, bytes]:
    """Parse a value: the digest of each container's line, by the container's name."""
    parts = [one.partition(b" ") for one in (value or b"").split(b"\n")]
    return {container: line for container, _, line in parts if container}


def are_done(seats: Sequence[Seat], run: RunSnapshot) -> bool:
    """Return whether the torchruns of ``seats`` came to the exit barrier of the present round."""
    return run.done.issuperset(seats)


FAILED_LOOK_S = 0.1
"""Interval of looks for errors of ranks while an answer is held: the standard library has no file
notification."""


class Launchers:
    """The connections of this pod's launchers, each attached to the run that it asks for.

    Work that outlasts a connection is done in the tasks given to ``open``. ``failed`` reads the
    masters of the worlds in which a rank of this pod has reported an error; it may block.
    """

    def __init__(
        self,
        generations: Generations,
        registrar: Registrar,
        starts: StageStarts,
        stages: KeptStages,
        failed: Callable[[], Collection[str]],
    ) -> None:
        self.generations = self._generations = generations
        self._registrar = registrar
        self.starts = starts
        self._stages = stages
        self._failed = failed
        self._tasks: asyncio.TaskGroup

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Accept connections from now on; ``tasks`` runs their clean-up."""
        self._tasks = tasks

    @property
    def closing(self) -> bool:
        """Whether the sidecar ends, and not its clients."""
        return self._generations.closing

    @property
    def shared(self) -> Kv | None:
        """Keys of clients that belong to no rendezvous; None until the member is registered."""
        current = self._generations.current
        return current.shared if current is not None else None

    async def ready(self) -> Kv:
        """Wait until the member is registered; return the shared keys."""
        return (await self._generations.first()).shared

    async def attach(self, run_id: str, author: str, nonce: str | None) -> Attachment:
        """Join a rendezvous: wait until the member is registered, and connect to the run.

        ``author`` names the connection. ``nonce`` is that of a connection that may outlive the
        sidecar. Raises ``WireError`` if another torchrun of this pod takes part already.
        """
        await self._registrar.registered.wait()
        run = self._generations.run_of(await self.starts.meant_for(container_of(nonce), run_id))
        attachment = Attachment(run.kv, connect(run.rendezvous, nonce))
        run.attached[author] = attachment
        return attachment

    async def resume(self, note: Note, author: str, nonce: str) -> Attachment:
        """Join the run again for a client that outlived the sidecar before this one."""
        await self.ready()
        run = self._generations.run_of(note.run_id)
        kept, foreign = note.node, note.generation != self._generations.number
        if kept is not None and foreign:
            # Its world was of a former generation: in this one it asks again from the start.
            kept = replace(kept, state="left", ask=0, left_reason="hung", round=0)
        if note.world is not None and not foreign:
            run.rendezvous.remember(note.world)
        agent = connect(run.rendezvous, nonce, kept)
        if not foreign:
            agent.resume(note.finished_round)
        attachment = run.attached[author] = Attachment(run.kv, agent)
        log.info(
            "a torchrun of %s has outlived its sidecar and goes on",
            note.run_id,
            extra={"event": "resumed"},
        )
        return attachment

    async def rank_fails(self, agent: TorchAgent) -> None:
        """Wait until a rank of this pod has reported an error in the world that ``agent`` is in."""
        while True:
            current = self._generations.current
            run = current.runs.get(agent.run_id) if current is not None else None
            if run is not None and agent.world is not None:
                master = run.live_round().master
                if master and master in await asyncio.to_thread(self._failed):
                    return
            await asyncio.sleep(FAILED_LOOK_S)

    def note_of(self, agent: TorchAgent) -> Note:
        """Build the note of an agent for the sidecar that serves it next."""
        return Note(
            agent.run_id,
            self._generations.number or 0,
            agent.node,
            agent.finished_round,
            agent.world,
        )

    def detach(self, author: str) -> None:
        """Note that a connection is closed."""
        current = self._generations.current
        for name, run in current.runs.items() if current is not None else ():
            attachment = run.attached.pop(author, None)
            if attachment is not None and attachment.agent.ended_well:
                self._finished(container_of(attachment.agent.claim.nonce), name)
        self._generations.follow_runs()

    def forget(self, kv: Kv | None, author: str) -> None:
        """Delete the records of a closed connection's operations, in a task.

        ``kv``: None for the shared keys.
        """

        async def work() -> None:
            keys = kv or await self.ready()
            await keys.forget_author(author)

        self._generations.follow_runs()
        if not self.closing:
            generation = None if kv is None else kv.keys.generation
            dropping = clean_up(self._registrar, generation, work)
            self._tasks.create_task(dropping, name=f"forget {author}")

    def _finished(self, container: str, name: str) -> None:
        """Count the stage ``name`` as done: the container's next torchrun is of the next stage."""
        if self._stages.stages.finish(container, name) and not self.closing:
            self._tasks.create_task(self._stages.keep(), name="keep stages")
