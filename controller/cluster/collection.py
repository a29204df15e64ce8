# SPDX-License-Identifier: Apache-2.0
"""A cache of the API server's objects of one kind: one list, then a watch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from controller.cluster.api import JSON, ClusterApi, Object
from rdzv.errors import ClusterError, ClusterRefused
from rdzv.reconcile import log_defect
from rdzv.sentences import Diary

log = logging.getLogger(__name__)

T = TypeVar("T")

PAGE = 500
"""Number of objects per page of a list: some megabytes."""

AGAIN_FIRST_S = 1.0
AGAIN_MOST_S = 30.0
"""Bounds of the backoff while the API server is unavailable. The minimum is also the pause after a
watch that has yielded nothing: an API server may end each one at once for a while."""

METADATA = "application/json;as=PartialObjectMetadata{};g=meta.k8s.io;v=v1"
"""The media type that asks for the metadata of objects only."""


class Collection(Generic[T]):
    """The cached objects by UID, each reduced by ``reduced``; unchanged during an outage.

    ``path`` may have a selector; ``metadata``: only that part of each object is asked for.
    ``sequence`` grows with each change. An object is absent that is reduced to None, or whose
    reduction fails, until it succeeds again.
    """

    def __init__(
        self,
        api: ClusterApi,
        path: str,
        reduced: Callable[[Object], T | None],
        *,
        metadata: bool = False,
    ) -> None:
        self.sequence = 0
        self._api = api
        self._path = path
        self._reduced = reduced
        self._metadata = metadata
        self._items: dict[str, T] = {}
        self._defective: set[str] = set()
        self._version = ""
        self._changed = asyncio.Event()
        self._diary = Diary(log)
        self._again_s = AGAIN_FIRST_S

    @property
    def items(self) -> Mapping[str, T]:
        """All objects, by UID; read it before the next await, or copy it."""
        return self._items

    async def changed_after(self, sequence: int) -> None:
        """Wait until ``self.sequence`` is above ``sequence``; 0 waits for the first list."""
        while self.sequence <= sequence:
            await self._changed.wait()

    async def changes(self) -> AsyncIterator[Mapping[str, T]]:
        """Yield all objects, by UID, after the first list and after each change of some."""
        sequence = 0
        while True:
            await self.changed_after(sequence)
            sequence = self.sequence
            yield self._items

    @asynccontextmanager
    async def following(self) -> AsyncIterator[Collection[T]]:
        """Follow the objects within the context; a defect ends it with an exception group."""
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(self._follow(), name=f"watch {self._path}")
            try:
                yield self
            finally:
                following.cancel()

    async def _follow(self) -> None:
        while True:
            try:
                if not self._version:
                    await self._list()
                    self._is_answered()
                await self._watch()
            except ClusterError as error:
                if isinstance(error, ClusterRefused):
                    self._version = ""
                    if error.status == 410:
                        continue  # the version has expired: list again
                self._diary.say(
                    f"cannot list or watch {self._path}, retrying: {error}",
                    level=logging.WARNING,
                    extra={"event": "cluster_unavailable"},
                )
                await asyncio.sleep(self._again_s)
                self._again_s = min(2 * self._again_s, AGAIN_MOST_S)

    def _is_answered(self) -> None:
        """End an outage: the next one begins with the first pause, and is logged."""
        self._again_s = AGAIN_FIRST_S
        self._diary.forget()

    async def _list(self) -> None:
        found: dict[str, T | None] = {}
        after: str | None = ""
        while after is not None:
            page = await self._api.get(
                _with(self._path, f"limit={PAGE}{after}"), accept=self._accept("List")
            )
            for one in page.get("items") or []:
                uid = one["metadata"]["uid"]
                found[uid] = self._seen(uid, one)
            metadata = page.get("metadata") or {}
            token = metadata.get("continue")
            after = f"&continue={token}" if token else None
        self._items = {uid: one for uid, one in found.items() if one is not None}
        self._defective &= found.keys()
        self._note_change()
        self._version = str(metadata.get("resourceVersion", ""))

    async def _watch(self) -> None:
        """Apply events after the last version seen, so that a reconnect shows no older state."""
        yielded = False
        async for event in self._api.watch(self._path, self._version, accept=self._accept("")):
            yielded = True
            self._is_answered()
            found = event.get("object") or {}
            metadata = found.get("metadata") or {}
            match event.get("type"):
                case "ADDED" | "MODIFIED":
                    self._take_in(metadata["uid"], self._seen(metadata["uid"], found))
                case "DELETED":
                    self._defective.discard(metadata["uid"])
                    self._items.pop(metadata["uid"], None)
                    self._note_change()
            self._version = str(metadata.get("resourceVersion", self._version))
        if not yielded:
            await asyncio.sleep(AGAIN_FIRST_S)

    def _accept(self, kind: str) -> str:
        return METADATA.format(kind) if self._metadata else JSON

    def _take_in(self, uid: str, reduced: T | None) -> None:
        # Nodes report every few minutes, and pods at each probe, fields that are not kept.
        if self._items.get(uid) == reduced:
            return
        if reduced is None:
            del self._items[uid]
        else:
            self._items[uid] = reduced
        self._note_change()

    def _seen(self, uid: str, one: Object) -> T | None:
        """Return the reduced object; None if that fails, which is logged once and not raised."""
        try:
            reduced = self._reduced(one)
        except Exception as error:
            if uid in self._defective:
                return None  # already reported
            self._defective.add(uid)
            name = (one.get("metadata") or {}).get("name")
            log_defect(f"ignoring {name} of {self._path}, cannot read it: {error}", error)
            return None
        self._defective.discard(uid)
        return reduced

    def _note_change(self) -> None:
        self.sequence += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _with(path: str, query: str) -> str:
    return f"{path}{'&' if '?' in path else '?'}{query}"
