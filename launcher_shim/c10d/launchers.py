# SPDX-License-Identifier: Apache-2.0
"""The launchers that are connected to this pod's endpoint, and the requests of their sessions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from launcher_shim.c10d.clean_up import clean_up
from launcher_shim.c10d.generation import Attachment, Generations
from launcher_shim.c10d.kept import KeptStages
from launcher_shim.c10d.rounds.records import Note
from launcher_shim.c10d.stage_starts import PodSeat, StageStarts
from launcher_shim.c10d.stages import container_of
from launcher_shim.c10d.torch.agent import TorchAgent, connect
from launcher_shim.c10d.values.operations import Kv
from rdzv.members.registrar import Registrar

log = logging.getLogger(__name__)

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
        seat: PodSeat,
        stages: KeptStages,
        failed: Callable[[], Collection[str]],
    ) -> None:
        self._generations = generations
        self._registrar = registrar
        self.starts = starts
        self.seat = seat
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
