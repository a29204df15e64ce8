# SPDX-License-Identifier: Apache-2.0
"""Events: sentences that ``kubectl describe`` shows at an object."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from controller.cluster import paths
from controller.cluster.api import ClusterApi
from controller.cluster.series import Series, after_write, said
from rdzv.errors import ClusterError, ClusterRefused

log = logging.getLogger(__name__)

KEPT = 4000
"""Series that are remembered, the newest: a job whose pods are made anew all day is told once."""
MESSAGE_LENGTH = 1000
"""The API server takes 1024 characters."""
NAME_LENGTH = 200
AGAIN_S = 5.0
"""After the API server was away."""
GONE, THERE = 404, 409

Key = tuple[str, str]


class Events:
    """Says what is said again by a count; a replica knows only what it said itself.

    ``clock`` is monotonic, in seconds.
    """

    def __init__(self, api: ClusterApi, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._series: OrderedDict[Key, Series] = OrderedDict()
        self._about: dict[Key, tuple[Mapping[str, Any], str]] = {}
        self._not_before_s = -math.inf
        self._stirred = asyncio.Event()
        self._writing = asyncio.Lock()

    @property
    def series(self) -> list[Series]:
        """All that is remembered."""
        return list(self._series.values())

    def say(
        self,
        about: Mapping[str, Any],
        reason: str,
        message: str,
        *,
        revision: int = 0,
        warning: bool = False,
    ) -> None:
        """Have it written at the object that ``about`` names, with its namespace and UID.

        What was said of the object last, at the same ``revision``, is not said again.
        """
        key = (str(about.get("uid")), reason)
        message = message[:MESSAGE_LENGTH]
        # A record may say what no UTF-8 can: half of a surrogate pair.
        said_so = f"{key} {revision} {message}".encode("utf-8", "backslashreplace")
        drawn = hashlib.sha256(said_so).hexdigest()[:16]
        name = f"{about['name'][:NAME_LENGTH]}.{drawn}"
        self._series[key] = said(self._clock(), self._series.get(key), name, message, revision)
        self._series.move_to_end(key)
        self._about[key] = (about, "Warning" if warning else "Normal")
        self._forget_old()
        self._stirred.set()

    async def run(self) -> None:
        """Write what is due until cancelled."""
        while True:
            self._stirred.clear()
            await self.write()
            due_s = min((one.due_s for one in self._series.values()), default=math.inf)
            left_s = max(due_s, self._not_before_s) - self._clock()
            try:
                async with asyncio.timeout(max(0.0, left_s) if left_s < math.inf else None):
                    await self._stirred.wait()
            except TimeoutError:
                continue  # something is due

    async def write(self) -> None:
        """Write what is due now; while the API server is away it stays owed."""
        async with self._writing:
            await self._write()

    async def _write(self) -> None:
        now = self._clock()
        if now < self._not_before_s:
            return
        due = [key for key, one in self._series.items() if one.due_s <= now]
        for key in due:
            series = self._series.get(key)
            if series is None:
                continue  # forgotten while those before it were written
            try:
                await self._write_one(key, series)
            except ClusterRefused as error:
                log.warning("dropped an Event: %s", error, extra={"event": "event_not_written"})
            except ClusterError as error:
                log.warning(
                    "cannot write Events, retrying: %s", error, extra={"event": "event_not_written"}
                )
                self._not_before_s = self._clock() + AGAIN_S
                return
            # What was refused would be refused again: it is in the log.
            if key in self._series:
                self._series[key] = after_write(self._clock(), self._series[key], series)

    async def _write_one(self, key: Key, series: Series) -> None:
        about, kind = self._about[key]
        namespace = str(about["namespace"])
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        path = paths.core(namespace, "events")
        changing = {"message": series.message, "count": series.count, "lastTimestamp": now}
        if series.written:
            try:
                await self._api.merge(paths.core(namespace, "events", series.name), changing)
                return
            except ClusterRefused as error:
                if error.status != GONE:
                    raise
        event = {
            "metadata": {"name": series.name, "namespace": namespace},
            "involvedObject": dict(about),
            "type": kind,
            "reason": key[1],
            "source": {"component": "muster-controller"},
            "firstTimestamp": now,
            **changing,
        }
        try:
            await self._api.create(path, event)
        except ClusterRefused as error:
            if error.status != THERE:
                raise
            # A leader before us has written it, or an answer was lost. Its name is that of what was
            # said first: what was said since is not in it.
            if series.count > 1:
                await self._api.merge(f"{path}/{series.name}", changing)

    def _forget_old(self) -> None:
        while len(self._series) > KEPT:
            key, _ = self._series.popitem(last=False)
            self._about.pop(key, None)


def reference(found: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    """Take what an Event says of its object from an ownerReference."""
    names = ("apiVersion", "kind", "name", "uid")
    return {**{name: found[name] for name in names if name in found}, "namespace": namespace}
