# SPDX-License-Identifier: Apache-2.0
"""A watch of a single object, for the life of the process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from urllib.parse import quote

from controller.cluster.api import ClusterApi
from rdzv.errors import ClusterError, ClusterRefused

log = logging.getLogger(__name__)

AGAIN_FIRST_S = 1.0
AGAIN_MOST_S = 30.0
"""Bounds of the backoff while the API server is unavailable. The minimum is also the pause after a
watch that has yielded nothing: an API server may end each one at once for a while."""


async def watch_one(
    api: ClusterApi, collection: str, name: str, changed: Callable[[], None]
) -> None:
    """Call ``changed`` at the start and after each change of ``collection``'s object ``name``.

    The callee must read the object: events may be missed, but never the last state.
    """
    selected = f"{collection}?fieldSelector={quote(f'metadata.name={name}')}"
    again_s = AGAIN_FIRST_S
    while True:
        try:
            listed = await api.get(selected)
            changed()
            version = str((listed.get("metadata") or {}).get("resourceVersion", ""))
            again_s = AGAIN_FIRST_S
            yielded = False
            async for event in api.watch(selected, version):
                yielded = True
                if event.get("type") != "BOOKMARK":
                    changed()
            if not yielded:
                await asyncio.sleep(AGAIN_FIRST_S)
        except ClusterError as error:
            expired = isinstance(error, ClusterRefused) and error.status == 410
            if not expired:
                log.warning(
                    "cannot list or watch %s, retrying: %s",
                    selected,
                    error,
                    extra={"event": "cluster_unavailable"},
                )
                await asyncio.sleep(again_s)
                again_s = min(2 * again_s, AGAIN_MOST_S)
