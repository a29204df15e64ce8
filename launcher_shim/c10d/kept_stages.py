# SPDX-License-Identifier: Apache-2.0
"""Keeps which stage the container is at for the sidecar that comes after this one."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from launcher_shim.c10d.stages import FILE_NAME, Stages
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
    """``known`` is what counts. ``files``: None where no sidecar will come after this one."""

    def __init__(self, files: Kept | None) -> None:
        self.known = Stages()
        self._files = files

    async def read(self) -> None:
        """Take over what the sidecar before knew."""
        if self._files is None:
            return
        try:
            content = await asyncio.to_thread(self._files.content, FILE_NAME)
            if content is not None:
                self.known = Stages.from_json(content)
        except (OSError, RecordError) as error:
            log.warning("which stage the container is at is not known any more: %s", error)

    async def keep(self) -> None:
        """Write down what is known."""
        if self._files is None:
            return
        try:
            await asyncio.to_thread(self._files.put, FILE_NAME, self.known.to_json())
        except OSError as error:
            log.warning(
                "which stage the container is at cannot be kept (%s): were this sidecar started"
                " again, the next torchrun would be taken for one of the first stage",
                error.strerror,
            )
