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
        self._ended = {host: threading.Event() for host in "abcd"}
        self._running: dict[str, threading.Thread] = {}
        self._ranks: dict[str, int] = {}
        self.hosts = FixedHosts({"a": 1, "b": 1})
        self.driver = elastic.ElasticDriver(MagicMock(), self.hosts, 2, 2, timeout=60)
        self.registry = self.driver._worker_registry
        self.registry.record_failure = MagicMock(wraps=self.registry.record_failure)

    def start(self) -> None:
        self.driver.start(2, self._run)
        until(lambda: len(self._running) == 2)

    def _run(self, slot: Any, events: Sequence[threading.Event]) -> tuple[int, float]:
        self._running[slot.hostname] = threading.current_thread()
        self._ended[slot.hostname].wait()
        return 143, time.time()

    def end(self, host: str) -> None:
        """A worker ends; the driver has taken that in, or waits for a change to be over for it."""
        self._ended[host].set()
        told = self.registry.record_failure
        until(lambda: told.called or not self._running[host].is_alive())

    def until_changing(self) -> None:
        """Wait until all workers have come, and the driver looks for hosts for them."""
        until(lambda: not self.registry._action_event.is_set())

    def until_recorded(self, host: str) -> None:
        """Wait until the driver knows that a worker has come."""
        until(lambda: (host, 0) in self.registry.get_recorded_slots())

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


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)


def main() -> None:
    late = sys.argv[1] == "late"
    elastic.DISCOVER_HOSTS_FREQUENCY_SECS = 0.02
    workers = Workers()
    workers.start()
    workers.list("a")
    workers.gather("a")
    workers.gather("b")
    workers.until_changing()
    if not late:
        workers.end("b")
    workers.list("a", "c")
    until(lambda: len(workers.ranks("a", "b")) == 2)
    if late:
        workers.end("b")
    workers.list("c", "d")
    workers.gather("a")
    if late:
        workers.until_recorded("a")
    else:
        until(lambda: bool(workers.ranks("a")))
    workers.gather("c")
    # Told early, c gets no rank, ever.
    until(lambda: len(workers.ranks("a", "c")) == 2, 60.0 if late else 3.0)
    sys.stdout.write(f"{workers.ranks('a', 'c')}\n")
    sys.stdout.flush()
    os._exit(0)  # its threads would wait for ever


if __name__ == "__main__":
    main()
