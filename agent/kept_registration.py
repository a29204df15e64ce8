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
    """The keeper of the newest registration of the pod ``pod_uid``.

    One task writes, so that an older registration never lands last: a write that hangs goes on in
    its thread after ``keep`` is cancelled.
    """

    def __init__(self, run_dir: RunDir, pod_uid: str) -> None:
        self._run_dir = run_dir
        self._pod_uid = pod_uid
        self._held: Held | None = None
        self._attempted = asyncio.Event()
        """Set once the disk has taken or refused the newest registration."""
        self._news = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    async def keep(self, held: Held) -> None:
        """Have a registration written; if the disk refuses it, retry until ``end``."""
        self._held = held
        self._attempted = attempted = asyncio.Event()
        self._news.set()
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name="keep-registration")
        await attempted.wait()
        if self._writing.done():
            self._writing.result()  # raises what ended it, if it is a defect

    def end(self) -> None:
        """Stop retrying."""
        if self._writing is not None:
            self._writing.cancel()

    async def _write(self) -> None:
        """Write the newest registration, and each newer one, until the disk has taken it."""
        refused = False
        while self._news.is_set() or refused:
            self._news.clear()
            attempted = self._attempted
            try:
                await asyncio.to_thread(self._run_dir.keep, State(self._pod_uid, self._held))
            except OSError as error:
                if not attempted.is_set():  # later attempts have the same reason
                    self._log_refusal(error)
                refused = True
            else:
                if refused:
                    log.info("what is registered is kept now", extra={"event": "state_kept"})
                refused = False
            finally:
                attempted.set()
            if refused:
                await self._news_or_pause()

    async def _news_or_pause(self) -> None:
        try:
            async with asyncio.timeout(RETRY_PAUSE_S):
                await self._news.wait()
        except TimeoutError:
            return  # retry the same registration

    def _log_refusal(self, error: OSError) -> None:
        log.error(
            "%s cannot be written (%s): were this sidecar started again, it would be taken for a"
            " fresh pod",
            self._run_dir.path / layout.STATE,
            error.strerror,
            extra={"event": "state_not_kept"},
        )
