# SPDX-License-Identifier: Apache-2.0
"""Keeps which stage the container is at for the sidecar that comes after this one."""

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
    """Files that live as long as the pod."""

    def content(self, name: str) -> bytes | None:
        """Read one, or None where there is none; may block, and raises ``OSError``."""
        ...

    def put(self, name: str, content: bytes) -> None:
        """Write one whole; may block, and raises ``OSError``."""
        ...


class KeptStages:
    """``stages`` is what counts. ``files``: None where no sidecar will come after this one."""

    def __init__(self, files: Kept | None) -> None:
        self.stages = Stages()
        self._files = files
        self._writing = asyncio.Lock()

    async def read(self) -> None:
        """Take over what the sidecar before knew."""
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
        """Note that a client's container is through with ``name``; return whether that is kept.

        Forgotten by the next sidecar, the container's next torchrun would be passed over instead.
        Taken back where the client goes before it is told: its torchrun starts then, in ``name``.
        """
        before = self.stages
        after = self.stages = replace(before, finished=dict(before.finished))
        after.finish(container_of(nonce), name)
        after.passed_by = nonce
        try:
            # Not cancelled with us: what is written next has to wait for it.
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
        """Write down what is known; return whether that could be."""
        if self._files is None:
            return True
        try:
            async with self._writing:  # one after another: the newest is to be the last
                await asyncio.to_thread(self._files.put, layout.STAGES, self.stages.to_json())
        except OSError as error:
            log.warning(
                "which stage the container is at cannot be kept (%s): were this sidecar started"
                " again, the next torchrun would be taken for one of the first stage",
                error.strerror,
            )
            return False
        return True
