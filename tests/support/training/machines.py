# SPDX-License-Identifier: Apache-2.0
"""Machines of one network, each a network namespace with a host name of its own; needs root."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

END_TIMEOUT_S = 120.0
_ON_MACHINE = 'hostname "$0" && exec "$@"'


class Network:
    """A switch, and the machines at it: what runs on one reaches the others and nothing else."""

    def __init__(self) -> None:
        self._prefix = f"muster{secrets.token_hex(4)}"
        self._started: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._namespaces: list[str] = []

    def add(self, name: str, address: str) -> None:
        """Connect a machine, whose interface is ``eth0``."""
        self._make(name)
        self._ip("-n", self._at("hub"), "link", "add", name, "type", "veth", "peer", "name", "eth0")
        self._ip("-n", self._at("hub"), "link", "set", "eth0", "netns", self._at(name))
        self._ip("-n", self._at("hub"), "link", "set", name, "master", "switch", "up")
        self._ip("-n", self._at(name), "address", "add", f"{address}/24", "dev", "eth0")
        self._ip("-n", self._at(name), "link", "set", "eth0", "up")

    def reach(self, address: str) -> None:
        """Connect this very machine, so that what runs here reaches the others."""
        link = self._prefix
        hub = self._at("hub")
        self._ip("link", "add", link, "type", "veth", "peer", "name", "here", "netns", hub)
        self._ip("-n", hub, "link", "set", "here", "master", "switch", "up")
        self._ip("address", "add", f"{address}/24", "dev", link)
        self._ip("link", "set", link, "up")

    def command(self, name: str, *words: str) -> tuple[str, ...]:
        """Return the command line that runs ``words`` on a machine."""
        return ("ip", "netns", "exec", self._at(name), *words)

    def cut(self, name: str) -> None:
        """Cut a machine off, and tell neither side; what runs on it goes on."""
        self._ip("-n", self._at("hub"), "link", "set", name, "down")

    def start(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        output: IO[bytes] | int | None = None,
        folder: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on a machine, with these variables alone."""
        entered = ("ip", "netns", "exec", self._at(name), "unshare", "--uts", "sh", "-c")
        process = subprocess.Popen(
            (*entered, _ON_MACHINE, name, *command),
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._started[name].append(process)
        return process

    def power_off(self, name: str) -> None:
        """Take a machine away at once: its connections are not closed, they go silent."""
        self.cut(name)
        self._end(name)

    def _end(self, name: str) -> None:
        listed = ("ip", "netns", "pids", self._at(name))
        found = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
        for pid in map(int, found.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started[name]:
            process.wait(END_TIMEOUT_S)

    def _at(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _make(self, name: str) -> None:
        self._ip("netns", "add", self._at(name))
        self._namespaces.append(name)
        self._started[name] = []
        self._ip("-n", self._at(name), "link", "set", "lo", "up")

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(("ip", *words), check=True)


@contextmanager
def network() -> Iterator[Network]:
    """Make one without machines; nothing that runs on its machines outlives the block."""
    made = Network()
    try:
        made._make("hub")
        made._ip("-n", made._at("hub"), "link", "add", "switch", "type", "bridge")
        made._ip("-n", made._at("hub"), "link", "set", "switch", "up")
        yield made
    finally:
        for name in reversed(made._namespaces):
            made._end(name)
            made._ip("netns", "delete", made._at(name))
