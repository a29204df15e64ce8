# SPDX-License-Identifier: Apache-2.0
"""A streamed data set of the protocol of Hugging Face's ``datasets``, a quarter of a gigabyte.

Like theirs, it divides its shards among the workers of a torch loader by itself, and its state is
that of the last record which it yielded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any


class Streamed:
    """Shards of so many records each; a record is ``(shard, number)``."""

    def __init__(self, lengths: Sequence[int], first: int = 0) -> None:
        self._lengths = lengths
        self._first = first
        self._state: Any = {"shard": 0, "records": 0, "former": None}
        self._begin: Any = None

    @property
    def num_shards(self) -> int:
        return len(self._lengths)

    def shard(self, num_shards: int, index: int) -> Streamed:
        low, high = (self.num_shards * at // num_shards for at in (index, index + 1))
        return Streamed(self._lengths[low:high], self._first + low)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        number, many = _worker()
        begin = self._begin or {"shard": 0, "records": 0}
        for shard in range(begin["shard"], self.num_shards):
            if shard % many != number:
                continue
            start = begin["records"] if shard == begin["shard"] else 0
            for record in range(start, self._lengths[shard]):
                self._state = {"shard": shard, "records": record + 1, "former": None}
                yield self._first + shard, record

    def state_dict(self) -> Any:
        return dict(self._state)

    def load_state_dict(self, state: Any) -> None:
        self._begin = state


def _worker() -> tuple[int, int]:
    if "torch" not in sys.modules:
        return 0, 1
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
