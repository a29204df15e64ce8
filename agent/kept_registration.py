# SPDX-License-Identifier: Apache-2.0
"""The pod's registration, kept in the run directory for the sidecar that starts here next.

It is written to the disk before it is announced. A full disk does not keep the pod out: the write
is retried until it succeeds, as without it the next sidecar would begin as a fresh pod.
"""

from __future__ import annotations

import asyncio
import logging

from agent.rundir.files import RunDir, State
from launcher_shim.rundir import layout
from rdzv.members.registration import Held

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 5.0
"""Retry interval after a registration that the disk did not take, in seconds."""


class KeptRegistration:
    """The keeper of the newest registration of the pod ``pod_uid``."""

    def __init__(self, run_dir: RunDir, pod_uid: str) -> None:
        self._run_dir = run_dir
        self._pod_uid = pod_uid
        self._held: Held | None = None
        self._again: asyncio.Task[None] | None = None
        # One write at a time: an older one must not land last.
        self._writing = asyncio.Lock()

    async def keep(self, held: Held) -> None:
        """Write a registration; if the disk does not take it, retry until ``end``."""
        self._held = held
        try:
            await self._write()
        except OSError as error:
            log.error(
                "%s cannot be written (%s): were this sidecar started again, it would be taken"
                " for a fresh pod",
                self._run_dir.path / layout.STATE,
                error.strerror,
                extra={"event": "state_not_kept"},
            )
            self.end()
            self._again = asyncio.create_task(self._try_again(), name="keep-registration")

    def end(self) -> None:
        """Stop retrying."""
        if self._again is not None:
            self._again.cancel()

    async def _try_again(self) -> None:
        while True:
            await asyncio.sleep(RETRY_PAUSE_S)
            try:
                await self._write()
            except OSError:
                continue  # logged at the first failure
            log.info("what is registered is kept now", extra={"event": "state_kept"})
            return

    async def _write(self) -> None:
        async with self._writing:
            state = State(self._pod_uid, self._held)
            await asyncio.to_thread(self._run_dir.keep, state)
