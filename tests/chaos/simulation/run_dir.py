# SPDX-License-Identifier: Apache-2.0
"""A run directory in memory: what the two containers of a pod hand to each other.

It outlives the sidecar, as the real one does. A file is there whole or not at all; what a rank
tells of itself is kept as the record that the sidecar would have read, not as bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent.rundir import HOSTS_NAME, STATE_NAME, RunDir, State
from rdzv.gate import RankProgress


class MemoryPath:
    """As much of a path as the drain's parts use. Of workers of horovodrun there are none."""

    def __init__(self, files: dict[str, bytes], ranks: dict[int, RankProgress], name: str) -> None:
        self._files = files
        self._name = name
        self.ranks = ranks

    def __truediv__(self, name: str) -> MemoryPath:
        return MemoryPath(self._files, self.ranks, name)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the file."""
        self._files.pop(self._name, None)

    def iterdir(self) -> list[MemoryPath]:
        """Nothing has made this directory."""
        raise FileNotFoundError(self._name)


class MemoryRunDir(RunDir):
    """A run directory whose files are a dictionary. ``written`` is set by the next write.

    ``on_hosts`` is called with each host list.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.ranks: dict[int, RankProgress] = {}
        self.written = asyncio.Event()
        self.on_hosts: Callable[[bytes], None] = lambda content: None
        self.path = MemoryPath(self.files, self.ranks, "")  # type: ignore[assignment]

    def state(self, pod_uid: str) -> State:
        """What this pod's sidecar kept, or the state of a fresh pod."""
        content = self.files.get(STATE_NAME)
        return State(pod_uid) if content is None else State.from_json(STATE_NAME, content)

    def hosts(self) -> str:
        """The host list as it was delivered last."""
        return self.files.get(HOSTS_NAME, b"").decode()

    def content(self, name: str) -> bytes | None:
        """What lies there under ``name``."""
        return self.files.get(name)

    def _write(self, name: str, content: bytes, mode: int) -> None:
        self.files[name] = content
        written, self.written = self.written, asyncio.Event()
        written.set()
        if name == HOSTS_NAME:
            self.on_hosts(content)


def read_ranks(progress: MemoryPath) -> tuple[RankProgress, ...]:
    """Stand in for ``agent.progress.read_ranks``."""
    return tuple(progress.ranks[rank] for rank in sorted(progress.ranks))
