# SPDX-License-Identifier: Apache-2.0
"""The stage of a torchrun that is about to start, and whether it has to start at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from launcher_shim.c10d.generations import Generations
from launcher_shim.c10d.kept import KeptStages
from launcher_shim.c10d.launch_lines import line_key, recorded, was_done, was_run
from launcher_shim.c10d.pod_seat import PodSeat
from launcher_shim.c10d.stages import container_of, torch_run_id
from launcher_shim.c10d.values.ledger import Stamp
from launcher_shim.c10d.values.operations import Kv
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
        seat: PodSeat,
        stages: KeptStages,
        *,
        restarted: bool,
        clock: Callable[[], float],
    ) -> None:
        self._generations = generations
        self._run = generations.run_of
        self._registrar = registrar
        self._member = registrar.identity.member
        self._seat = seat
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
        await self._seat.vacant()
        name = self._stages.stages.next(container, run_id)
        if container and self._ended_well(name):
            # A torchrun that has ended while there was no sidecar may still have to report that.
            await self._farewells()
            await self._seat.vacant()
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
        run_id, cells = torch_run_id(name), run.kv.cells
        if not all(was_done(seat, run_id, current.number, cells) for seat in held):
            return False  # it died on its way to the exit barrier: its work would be left out
        members = [seat.member for seat in current.frozen]
        values = await run.kv.reads.get_all([line_key(member) for member in members])
        known = dict(zip(members, values, strict=True))
        return was_run(line, here, current.frozen, known)

    def _ended_well(self, name: str) -> bool:
        current = self._generations.current
        return current is not None and current.rounds.ended_well(name)
