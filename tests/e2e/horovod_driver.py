# SPDX-License-Identifier: Apache-2.0
"""Horovod's own driver, with hosts and workers that are only told of: ``early`` or ``late``.

Of two workers one is drained below min, and ends at its deadline: that is told before there is
another host, or once the driver has followed a list with another one. Then the other one is
replaced too. Prints the ranks that the workers of that change are given within 3 s.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import MagicMock

from horovod.runner.elastic import driver as elastic
from horovod.runner.elastic.discovery import FixedHosts


class Workers:
    """Stand for processes: each runs until it is ended."""

    def __init__(self) -> None:
        self._ended: dict[str, threading.Event] = {}
        self._ranks: dict[str, int] = {}
        self.hosts = FixedHosts({"a": 1, "b": 1})
        self.driver = elastic.ElasticDriver(MagicMock(), self.hosts, 2, 2, timeout=60)

    def run(self, slot: Any, events: Sequence[threading.Event]) -> tuple[int, float]:
        self._ended[slot.hostname] = threading.Event()
        self._ended[slot.hostname].wait()
        return 143, time.time()

    def end(self, host: str) -> None:
        self._ended[host].set()

    def list(self, *hosts: str) -> None:
        wanted = {**dict.fromkeys(hosts, 1), f"rev-{time.monotonic_ns()}": 0}
        self.hosts.set(wanted)
        known = self.driver._host_manager
        until(lambda: known.current_hosts.available_hosts == wanted.keys())

    def gather(self, host: str) -> None:
        """A worker comes for the next change, and waits for its rank."""
        self._ranks.pop(host, None)
        threading.Thread(target=self._ask, args=(host,), daemon=True).start()

    def _ask(self, host: str) -> None:
        self.driver.record_ready(host, 0)
        self._ranks[host] = self.driver.get_slot_info(host, 0).rank

    def ranks(self, *hosts: str) -> dict[str, int]:
        return {host: self._ranks[host] for host in hosts if host in self._ranks}


def until(condition: Callable[[], bool], timeout_s: float = 3.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)


def main() -> None:
    late = sys.argv[1] == "late"
    elastic.DISCOVER_HOSTS_FREQUENCY_SECS = 0.02
    workers = Workers()
    workers.driver.start(2, workers.run)
    workers.list("a")
    workers.gather("a")
    workers.gather("b")
    time.sleep(0.3)
    if not late:
        workers.end("b")
        time.sleep(0.3)
    workers.list("a", "c")
    until(lambda: len(workers.ranks("a", "b")) == 2)
    if late:
        workers.end("b")
        time.sleep(0.3)
    workers.list("c", "d")
    workers.gather("a")
    until(lambda: not late and bool(workers.ranks("a")), 0.5)
    workers.gather("c")
    until(lambda: len(workers.ranks("a", "c")) == 2)
    sys.stdout.write(f"{workers.ranks('a', 'c')}\n")
    sys.stdout.flush()
    os._exit(0)  # its threads would wait for ever


if __name__ == "__main__":
    main()
