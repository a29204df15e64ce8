# SPDX-License-Identifier: Apache-2.0
"""Kubernetes Events: sentences that ``kubectl describe`` shows with an object.

A series is one Event that counts the repetitions of a reason at an object. An Event counts as told
only once it is written: until then its series owes it, for any time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from controller.cluster import paths
from controller.cluster.api import CONFLICT, NOT_FOUND, ClusterApi
from rdzv.errors import ClusterError, ClusterRefused
from rdzv.reconcile import Loop, Outlook

log = logging.getLogger(__name__)

REPEAT_S = 30.0
"""Minimum interval between two writes of a series. Shorter: a pod that flaps costs the API server
more. Longer: the count that kubectl shows is further behind."""
SILENCE_S = 600.0
"""Time after which a repetition is a new Event, as the former one is no news any more."""

KEPT = 4000
"""Maximum number of remembered series; the least recent are dropped. A job whose pods are replaced
all day keeps its own, as they are used each time."""
MESSAGE_LENGTH = 1000
"""Maximum length of a message; the API server allows 1024 characters."""
NAME_LENGTH = 200
AGAIN_S = 5.0
"""Retry interval while the API server is unavailable."""


@dataclass(frozen=True, slots=True)
class Series:
    """One reason at one object. Times are monotonic, in seconds.

    ``name``: the Event's name. ``count``: the number of repetitions; ``written``: how many of them
    the API server has. ``owed_revision``: the store's revision of the first that it lacks (inf: it
    has all).
    """

    name: str
    message: str
    revision: int
    count: int = 1
    written: int = 0
    said_s: float = 0.0
    written_s: float = -math.inf
    owed_revision: float = math.inf

    @property
    def owes(self) -> bool:
        """Whether the API server lacks a part of the series."""
        return self.written < self.count

    @property
    def due_s(self) -> float:
        """The time of its next write: at once if none was written yet; inf if nothing is owed."""
        return self.written_s + REPEAT_S if self.owes else math.inf


def noted(now: float, before: Series | None, name: str, message: str, revision: int) -> Series:
    """Add ``message`` at ``revision`` to the series; ``name`` is used if it starts a new Event."""
    if before is None or (not before.owes and now - before.said_s > SILENCE_S):
        return Series(name, message, revision, said_s=now, owed_revision=revision)
    if revision <= before.revision and message == before.message:
        return before
    return replace(
        before,
        message=message,
        revision=max(revision, before.revision),
        count=before.count + 1,
        said_s=now,
        owed_revision=min(before.owed_revision, revision),
    )


def after_write(now: float, series: Series, as_written: Series) -> Series:
    """Return the series after a write of ``as_written``, its state when that write began."""
    owes = series.count > as_written.count
    return replace(
        series,
        written=as_written.count,
        written_s=now,
        owed_revision=as_written.revision + 1 if owes else math.inf,
    )


def reported_up_to(revision: int, all_series: list[Series]) -> int:
    """Return the revision up to which everything is written, at most ``revision``."""
    owed = min((one.owed_revision for one in all_series), default=math.inf)
    return int(min(revision, owed - 1))


Key = tuple[str, str]


class Events(Loop):
    """A publisher that counts repetitions in one Event; it knows only those of this replica.

    ``clock`` is monotonic, in seconds.
    """

    def __init__(self, api: ClusterApi, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._api = api
        self._series: OrderedDict[Key, Series] = OrderedDict()
        self._about: dict[Key, tuple[Mapping[str, Any], str]] = {}
        self._not_before_s = -math.inf
        self._writing = asyncio.Lock()

    @property
    def series(self) -> list[Series]:
        """All remembered series."""
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
        """Queue an Event for the object that ``about`` refers to, with its namespace and UID.

        A repetition of the object's last message at the same ``revision`` is ignored.
        """
        # A pod may claim any UID as its maker's: that of another namespace is another object.
        key = (f"{about.get('namespace')}/{about.get('uid')}", reason)
        message = message[:MESSAGE_LENGTH]
        # A record may contain half of a surrogate pair, which UTF-8 cannot encode.
        said_so = f"{key} {revision} {message}".encode("utf-8", "backslashreplace")
        drawn = hashlib.sha256(said_so).hexdigest()[:16]
        name = f"{str(about['name'])[:NAME_LENGTH]}.{drawn}"
        self._series[key] = noted(self.clock(), self._series.get(key), name, message, revision)
        self._series.move_to_end(key)
        self._about[key] = (about, "Warning" if warning else "Normal")
        self._forget_old()
        self.wake()

    async def step(self) -> Outlook:
        """Write the Events that are due."""
        await self.write()
        due_s = min((one.due_s for one in self._series.values()), default=math.inf)
        return Outlook(look_at_s=max(due_s, self._not_before_s))

    async def write(self) -> None:
        """Write the Events that are due; they stay queued while the API server is unavailable."""
        async with self._writing:
            await self._write()

    async def _write(self) -> None:
        now = self.clock()
        if now < self._not_before_s:
            return
        due = [key for key, one in self._series.items() if one.due_s <= now]
        for key in due:
            series = self._series.get(key)
            if series is None:
                continue  # dropped while the ones before it were written
            try:
                await self._write_one(key, series)
            except ClusterRefused as error:
                log.warning("dropped an Event: %s", error, extra={"event": "event_not_written"})
            except ClusterError as error:
                log.warning(
                    "cannot write Events, retrying: %s", error, extra={"event": "event_not_written"}
                )
                self._not_before_s = self.clock() + AGAIN_S
                return
            # A refused Event would be refused again: it is only logged.
            if key in self._series:
                self._series[key] = after_write(self.clock(), self._series[key], series)

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
                if error.status != NOT_FOUND:
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
            if error.status != CONFLICT:
                raise
            # A former leader has written it, or an answer was lost. The name is derived from the
            # first message: the Event lacks what was said since.
            if series.count > 1:
                await self._api.merge(f"{path}/{series.name}", changing)

    def _forget_old(self) -> None:
        while len(self._series) > KEPT:
            key, _ = self._series.popitem(last=False)
            self._about.pop(key, None)


def reference(found: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    """Convert an ownerReference to the object reference of an Event."""
    names = ("apiVersion", "kind", "name", "uid")
    return {**{name: found[name] for name in names if name in found}, "namespace": namespace}
