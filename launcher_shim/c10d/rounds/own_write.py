# SPDX-License-Identifier: Apache-2.0
"""The wait for the watch to show a write by this sidecar."""

from __future__ import annotations

import asyncio
import logging

from rdzv.mirror import Mirror

log = logging.getLogger(__name__)

SEE_OWN_WRITE_S = 5.0
"""Maximum wait for the watch to show a write by this sidecar before the client is answered."""


async def shown(mirror: Mirror, revision: int) -> None:
    """Wait until the mirror has reached ``revision``, for ``SEE_OWN_WRITE_S`` at most."""
    try:
        async with asyncio.timeout(SEE_OWN_WRITE_S):
            await mirror.reached(revision)
    except TimeoutError:
        log.info("the watch is stale, more than %.0f s behind the store", SEE_OWN_WRITE_S)
