# SPDX-License-Identifier: Apache-2.0
"""Clean-up in the store after connections and runs that are over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rdzv.errors import StoreError
from rdzv.members.registrar import Registrar

log = logging.getLogger(__name__)

CLEAN_UP_S = 120.0
"""Total time for retries of deletions of keys of closed connections, in seconds: longer than most
outages."""

CLEAN_UP_PAUSE_S = 0.5
"""The pause between two attempts."""


async def clean_up(
    registrar: Registrar, generation: int | None, work: Callable[[], Awaitable[None]]
) -> None:
    """Retry ``work``, which must be idempotent, until it succeeds, for ``CLEAN_UP_S`` at most.

    ``generation``: the one whose keys it drops; None for whichever the member is in by then. Once
    the member is registered in another generation, these keys are gone.
    """
    registered = registrar.registered
    reason = ""
    try:
        async with asyncio.timeout(CLEAN_UP_S):
            while True:
                await registered.wait()
                if generation not in (None, registrar.generation):
                    return
                try:
                    await work()
                except StoreError as error:
                    reason = str(error)
                else:
                    return
                await asyncio.sleep(CLEAN_UP_PAUSE_S)
    except TimeoutError:
        if not registered.is_set():
            reason = "the member is not registered"
    log.info("gave up deleting the keys of a closed connection: %s", reason or "the store is slow")
