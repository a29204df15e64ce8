# SPDX-License-Identifier: Apache-2.0
"""The container's stage, kept for the sidecar that comes after this one."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Protocol

from launcher_shim.c10d.stages import Stages, container_of
from launcher_shim.rundir import layout
from rdzv.errors import RecordError

log = logging.getLogger(__name__)


class Kept(Protocol):
    """A store of files that live as long as the pod."""

    def content(self, name: str) -> bytes | None:
        """Read a file, or return None if there is none; may block, and raises ``OSError``."""
        ...

    def put(self, name: str, content: bytes) -> None:
        """Write a whole file; may block, and raises ``OSError``."""
        ...


class KeptStages:
    """The present ``stages``, and their file (``files``; None if no later sidecar will come)."""

    def __init__(self, files: Kept | None) -> None:
        self.stages = Stages()
        self._files = files
        self._writing = asyncio.Lock()

    async def read(self) -> None:
        """Load what the sidecar before has kept."""
        if self._files is None:
            return
        try:
            content = await asyncio.to_thread(self._files.content, layout.STAGES)
            if content is not None:
                self.stages = Stages.from_json(content)
        except (OSError, RecordError) as error:
            log.warning(
                "counting stages from the first again, %s is unreadable: %s", layout.STAGES, error
            )

    async def pass_over(self, nonce: str, name: str) -> bool:
        """Record that a container is through with ``name``; return whether that is on disk.

        If the next sidecar did not know it, the container's next torchrun would be passed over
        instead. It is taken back if the client goes before it has the answer: its torchrun then
        starts, in ``name``.
        """
        before = self.stages
        after = self.stages = replace(before, finished=dict(before.finished))
        after.finish(container_of(nonce), name)
        after.passed_by = nonce
        try:
            # Shielded: the next write has to wait for this one even if this task is cancelled.
            kept = await asyncio.shield(asyncio.ensure_future(self.keep()))
        except asyncio.CancelledError:
            self._take_back(after, before)
            await self.keep()
            raise
        if not kept:
            self._take_back(after, before)
        return kept

    def _take_back(self, after: Stages, before: Stages) -> None:
        if self.stages is after:
            self.stages = before

    async def keep(self) -> bool:
        """Write the stages to disk; return whether that succeeded."""
        if self._files is None:
            return True
        try:
            async with self._writing:  # one after another: the newest must be written last
                await asyncio.to_thread(self._files.put, layout.STAGES, self.stages.to_json())
        except OSError as error:
            log.warning(
                "which stage the container is at cannot be kept (%s): were this sidecar started"
                " again, the next torchrun would be taken for one of the first stage",
                error.strerror,
            )
            return False
        return True
