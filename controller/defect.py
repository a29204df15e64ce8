# SPDX-License-Identifier: Apache-2.0
"""The controller's own defects: reported with the traceback, and outlived by its tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator

log = logging.getLogger(__name__)

AGAIN_S = 30.0
"""Restart delay of a task after a defect; the others, and the webhook, go on meanwhile."""


def tell_defect(sentence: str, error: BaseException, **fields: str) -> None:
    """Log ``sentence`` as a defect of Muster, with the traceback; ``fields`` are for machines."""
    told = {"event": "defect", **fields}
    log.critical("a defect of muster: %s", sentence, exc_info=error, extra=told)


async def restarted(what: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work`` until cancelled, and restart it after a defect, ``AGAIN_S`` later."""
    while True:
        try:
            await work()
        except* Exception as group:
            for error in each_of(group):
                tell_pause(what, error)
        await asyncio.sleep(AGAIN_S)


def tell_pause(what: str, error: BaseException) -> None:
    """Report a defect after which a task pauses for ``AGAIN_S``."""
    tell_defect(f"{what} pauses for {AGAIN_S:g} s: {error}", error)


def each_of(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors of a group, and of the groups in it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from each_of(error)
        else:
            yield error
