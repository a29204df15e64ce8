# SPDX-License-Identifier: Apache-2.0
"""The ledgers of a job's data sets as its mirror shows them; each record is parsed once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Self
from urllib.parse import unquote

from rdzv.errors import RecordError
from rdzv.keys import JobKeys
from rdzv.mirror import Mirror
from rdzv.records.shards import OpenShards, PodShards, ShardWorld, TrainedShards
from rdzv.shards.ledger import ShardLedger
from rdzv.store import KeyValue, WatchEvent

log = logging.getLogger(__name__)

Record = ShardWorld | OpenShards | TrainedShards | PodShards


class ShardView:
    """The ledgers by the keys below ``shards/``; ``following`` keeps them in step with a mirror."""

    def __init__(self, keys: JobKeys, kvs: Iterable[KeyValue]) -> None:
        self._keys = keys
        self._records: dict[str, dict[str, Record]] = {}
        self._unreadable: dict[str, dict[str, str]] = {}
        self._ledgers: dict[str, ShardLedger] = {}
        self._apply([WatchEvent("put", kv) for kv in kvs])

    @classmethod
    def following(cls, keys: JobKeys, mirror: Mirror) -> Self:
        """Build the view of what the mirror has, and keep it up to date."""
        view = cls(keys, mirror.kvs.values())
        mirror.subscribe(view._apply)
        return view

    @property
    def names(self) -> tuple[str, ...]:
        """The data sets that the job has handed out."""
        return tuple(sorted(self._records))

    def ledger(self, name: str) -> ShardLedger:
        """Return what the store knows of one data set; the same object until that changes."""
        if name not in self._ledgers:
            records = self._records.get(name, {})
            faults = self._unreadable.get(name, {})
            world, opened = records.get("world"), records.get("open")
            trained = records.get("trained")
            self._ledgers[name] = ShardLedger(
                world=world if isinstance(world, ShardWorld) else None,
                open=opened if isinstance(opened, OpenShards) else OpenShards(),
                trained=trained if isinstance(trained, TrainedShards) else TrainedShards(),
                pods={one.member: one for one in records.values() if isinstance(one, PodShards)},
                unreadable=next(iter(faults.values()), ""),
            )
        return self._ledgers[name]

    def _apply(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            key = event.kv.key
            if not key.startswith(self._keys.shards):
                continue
            encoded, _, rest = key.removeprefix(self._keys.shards).partition("/")
            kind = _kind(rest)
            if kind is None:
                continue
            name = unquote(encoded)
            self._ledgers.pop(name, None)
            records = self._records.setdefault(name, {})
            faults = self._unreadable.setdefault(name, {})
            records.pop(rest, None)
            faults.pop(rest, None)
            if event.kind == "put":
                try:
                    records[rest] = kind.from_kv(event.kv)
                except RecordError as error:
                    log.warning("no shards of %s until this is mended: %s", name, error)
                    faults[rest] = str(error)


def _kind(rest: str) -> type[Record] | None:
    match rest.split("/"):
        case ["world"]:
            return ShardWorld
        case ["open"]:
            return OpenShards
        case ["trained"]:
            return TrainedShards
        case ["pods", _]:
            return PodShards
    return None
