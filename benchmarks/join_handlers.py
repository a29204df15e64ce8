# SPDX-License-Identifier: Apache-2.0
"""Helper process: torch's own server, and its rendezvous handlers, which all join at once."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # else 64 warnings at the end of each load

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

CONNECT_TIMEOUT = timedelta(seconds=60)


class CountingStore(TCPStore):  # type: ignore[misc]
    """torch's client, which also counts the compare-and-sets it sends."""

    compare_sets = 0

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.compare_sets += 1
        value: bytes = super().compare_set(key, expected, desired)
        return value


class Joiner:
    """One handler with its own connection."""

    def __init__(self, port: int, run_id: str, nodes: int, timeout_s: float, number: int) -> None:
        self._store = CountingStore("127.0.0.1", port, is_master=False, timeout=CONNECT_TIMEOUT)
        self._handler = DynamicRendezvousHandler.from_backend(
            run_id,
            self._store,
            C10dRendezvousBackend(self._store, run_id),
            nodes,
            nodes,
            local_addr=f"10.0.{number // 256}.{number % 256}",
            timeout=RendezvousTimeout(join=timedelta(seconds=timeout_s)),
        )
        # The one so far stored the sentinel; those after the join are heartbeats.
        self._store.compare_sets = 0
        self._joined_with: int | None = None
        self._start_heartbeats = self._handler._start_heartbeats
        self._handler._start_heartbeats = self._note_joined
        self._answer: list[Any] = []
        self._thread = threading.Thread(target=self._join, daemon=True)

    def start(self, at_s: float) -> None:
        self._at_s = at_s
        self._thread.start()

    def answer(self) -> list[Any]:
        self._thread.join()
        return self._answer

    def stop(self) -> None:
        self._handler._stop_heartbeats()

    def _note_joined(self) -> None:
        self._joined_with = self._store.compare_sets
        self._start_heartbeats()

    def _join(self) -> None:
        time.sleep(max(0.0, self._at_s - time.monotonic()))
        try:
            info = self._handler.next_rendezvous()
        except Exception as error:
            self._answer = [f"{type(error).__name__}: {error}", self._store.compare_sets]
            return
        seconds = time.monotonic() - self._at_s
        number = self._handler._state_holder.state.round
        self._answer = [number, info.rank, info.world_size, self._joined_with, seconds]


def main() -> None:
    server: TCPStore | None = None
    joiners: list[Joiner] = []
    for line in sys.stdin:
        order = json.loads(line)
        answer: Any = None
        match order["do"]:
            case "host":
                server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                answer = {"port": server.port, "pid": os.getpid(), "libuv": server.libuvBackend}
            case "prepare":
                with ThreadPoolExecutor(32) as pool:
                    joiners = list(
                        pool.map(
                            lambda number, port, order=order: Joiner(
                                port,
                                order["run_id"],
                                order["nodes"],
                                order["join_timeout_s"],
                                number,
                            ),
                            order["numbers"],
                            order["ports"],
                        )
                    )
            case "join":
                for joiner in joiners:
                    joiner.start(order["at_s"])
                answer = [joiner.answer() for joiner in joiners]
            case "stop":
                for joiner in joiners:
                    joiner.stop()
                joiners, server = [], None
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
