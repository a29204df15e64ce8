# SPDX-License-Identifier: Apache-2.0
"""A cache of the API server's objects of one kind: one list, then a watch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from controller.cluster.api import ClusterApi, Object
from controller.cluster.watching import AGAIN_FIRST_S, AGAIN_MOST_S
from controller.defect import tell_defect
from rdzv.diary import Diary
from rdzv.errors import ClusterError, ClusterRefused

log = logging.getLogger(__name__)

T = TypeVar("T")

PAGE = 500
"""Number of objects per page of a list: some megabytes."""


class Collection(Generic[T]):
    """The cached objects by UID, each reduced by ``reduced``; unchanged during an outage.

    ``path`` may have a label selector. ``sequence`` grows with each change. An object whose
    reduction fails is absent until it succeeds again.
    """

    def __init__(self, api: ClusterApi, path: str, reduced: Callable[[Object], T]) -> None:
        self.sequence = 0
        self._api = api
        self._path = path
        self._reduced = reduced
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
        found: dict[str, T] = {}
        defective: set[str] = set()
        after = ""
        while True:
            page = await self._api.get(_with(self._path, f"limit={PAGE}{after}"))
            for one in page.get("items") or []:
                uid = one["metadata"]["uid"]
                if (reduced := self._seen(uid, one)) is not None:
                    found[uid] = reduced
                else:
                    defective.add(uid)
            metadata = page.get("metadata") or {}
            if not (token := metadata.get("continue")):
                break
            after = f"&continue={token}"
        self._items, self._defective = found, defective
        self._note_change()
        self._version = str(metadata.get("resourceVersion", ""))

    async def _watch(self) -> None:
        """Apply events after the last version seen, so that a reconnect shows no older state."""
        yielded = False
        async for event in self._api.watch(self._path, self._version):
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
            tell_defect(f"ignoring {name} of {self._path}, cannot read it: {error}", error)
            return None
        self._defective.discard(uid)
        return reduced

    def _note_change(self) -> None:
        self.sequence += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _with(path: str, query: str) -> str:
    return f"{path}{'&' if '?' in path else '?'}{query}"
