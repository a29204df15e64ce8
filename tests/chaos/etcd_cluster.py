# SPDX-License-Identifier: Apache-2.0
"""Real etcd members on loopback that a test may kill, freeze and bring back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

VERSION = "3.6.16"
START_S = 20.0
_CACHE = Path(os.environ.get("MUSTER_CACHE") or Path.home() / ".cache" / "muster")


def find_etcd() -> Path:
    """The etcd that ``scripts/toolchain/etcd`` provides."""
    named = os.environ.get("MUSTER_TEST_ETCD")
    candidates = [Path(named)] if named else [_CACHE / f"etcd-{VERSION}"]
    on_path = shutil.which("etcd")
    if on_path and not named:
        candidates.append(Path(on_path))
    for candidate in candidates:
        binary = candidate / "etcd" if candidate.is_dir() else candidate
        if os.access(binary, os.X_OK):
            return binary
    pytest.fail(f"no etcd at {candidates[0]} or on PATH: run scripts/toolchain/etcd", pytrace=False)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


class EtcdCluster:
    """``with EtcdCluster() as cluster: … cluster.endpoints``; leaves nothing running or on disk.

    ``start``, ``restore`` and ``empty`` block: within a running loop call them through
    ``asyncio.to_thread``.
    """

    def __init__(self, members: int = 3) -> None:
        self._binary = find_etcd()
        ports = free_ports(2 * members)
        self._client_ports, self._peer_ports = ports[:members], ports[members:]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * members
        self._frozen: set[int] = set()
        self._token = uuid.uuid4().hex

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="muster-etcd-"))
        try:
            self.restore()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def endpoints(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self._client_ports]

    def kill(self, member: int) -> None:
        """SIGKILL."""
        process = self._processes[member]
        assert process is not None
        process.kill()
        self._frozen.discard(member)

    def freeze(self, member: int) -> None:
        """SIGSTOP: the kernel still takes connections, nobody answers."""
        self._signal(member, signal.SIGSTOP)
        self._frozen.add(member)

    def resume(self, member: int) -> None:
        """SIGCONT."""
        self._signal(member, signal.SIGCONT)
        self._frozen.discard(member)

    def start(self, member: int) -> None:
        """Start a member that was killed, on its own data."""
        old = self._processes[member]
        if old is not None:
            old.wait(timeout=START_S)
        peers = ",".join(
            f"m{number}=http://127.0.0.1:{port}" for number, port in enumerate(self._peer_ports)
        )
        client = f"http://127.0.0.1:{self._client_ports[member]}"
        peer = f"http://127.0.0.1:{self._peer_ports[member]}"
        command = [
            str(self._binary),
            f"--name=m{member}",
            f"--data-dir={self.folder / f'm{member}'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={peers}",
            f"--initial-cluster-token={self._token}",
            "--initial-cluster-state=new",
            "--snapshot-count=1000",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        with (self.folder / f"m{member}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def empty(self) -> None:
        """Kill every member, throw its data away, and start again from nothing."""
        for member, process in enumerate(self._processes):
            self.kill(member)
            assert process is not None
            process.wait(timeout=START_S)
            shutil.rmtree(self.folder / f"m{member}")
        self.restore()

    def restore(self) -> None:
        """Bring every member up and wait until each one says that the cluster is healthy."""
        for member, process in enumerate(self._processes):
            if member in self._frozen:
                self.resume(member)
            if process is None or process.poll() is not None:
                self.start(member)
        deadline = time.monotonic() + START_S
        while not all(map(self.healthy, range(len(self)))):
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))
                raise RuntimeError(f"etcd is not healthy after {START_S} s:\n{logs}")
            time.sleep(0.05)

    def healthy(self, member: int) -> bool:
        """Whether the member can commit; blocks for up to 1 s."""
        url = f"http://127.0.0.1:{self._client_ports[member]}/health"
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                return bool(json.load(answer)["health"] == "true")
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        for process in self._processes:
            if process is not None:
                process.kill()
        for process in self._processes:
            if process is not None:
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal(self, member: int, number: int) -> None:
        process = self._processes[member]
        assert process is not None
        process.send_signal(number)


@pytest.fixture(scope="session")
def etcd_cluster() -> Iterator[EtcdCluster]:
    """Three members for the whole test session; whoever breaks one calls ``restore``."""
    with EtcdCluster() as cluster:
        yield cluster
