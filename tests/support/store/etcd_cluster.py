# SPDX-License-Identifier: Apache-2.0
"""Real etcd members on loopback that a test may kill, freeze and bring back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from rdzv.store.access import Access
from tests.support.ports import free_ports
from tests.support.sidecars.listeners import listening
from tests.support.store.certificates import Authority

VERSION = "3.6.16"
START_S = 120.0
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


class _PortTaken(RuntimeError):
    """A member has ended because somebody else listens on a port of its."""


class EtcdCluster:
    """``with EtcdCluster() as cluster: … cluster.endpoints``; leaves nothing running or on disk.

    All that starts a process and waits for it blocks: ``start``, ``restart``, ``restore``,
    ``empty``, ``etcdctl``, ``enable_auth``. Within a running loop call them through
    ``asyncio.to_thread``.

    With ``tls`` its clients need TLS, and its ``authority`` signs certificates for it and for
    them; with ``client_certificates`` they need one, and are users by its name. ``arguments`` are
    more of etcd's own.
    """

    def __init__(
        self,
        members: int = 3,
        *,
        tls: bool = False,
        client_certificates: bool = False,
        arguments: Sequence[str] = (),
    ) -> None:
        self._binary = find_etcd()
        self._tls = tls
        self._client_certificates = client_certificates
        self._arguments = arguments
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * members
        self._frozen: set[int] = set()
        self._token = uuid.uuid4().hex
        self._choose_ports()

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="muster-etcd-"))
        if self._tls:
            self.authority = Authority(self.folder)
            self._certificate = self.authority.server()
        try:
            try:
                self.restore()
            except _PortTaken:
                self._choose_ports()
                self.empty()
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
        scheme = "https://" if self._tls else ""
        return [f"{scheme}127.0.0.1:{port}" for port in self._client_ports]

    @property
    def metrics_urls(self) -> list[str]:
        """Where the members tell of themselves, to anybody."""
        return [f"http://127.0.0.1:{port}" for port in self._health_ports]

    def access(self, **given: Any) -> Access:
        """How to reach it; ``given`` are further fields of ``Access``."""
        cacert = str(self.authority.cacert) if self._tls else ""
        return Access(**{"endpoints": tuple(self.endpoints), "cacert": cacert, **given})

    def etcdctl(self, *arguments: str, user: str = "", stdin: str = "") -> str:
        """Run ``etcdctl``; ``user`` is ``name:password``. Raises ``CalledProcessError``."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD")}
        done = subprocess.run(
            [str(self.etcdctl_binary), *arguments],
            env=environment | self.etcdctl_environment(user),
            input=stdin,
            capture_output=True,
            text=True,
            # Longer than its own, so that it says itself what it waited for.
            timeout=START_S + 10,
            check=True,
        )
        return done.stdout

    @property
    def etcdctl_binary(self) -> Path:
        return self._binary.with_name("etcdctl")

    def etcdctl_environment(self, user: str = "") -> dict[str, str]:
        """The variables with which ``etcdctl`` reaches it."""
        environment = {
            "ETCDCTL_ENDPOINTS": ",".join(self.endpoints),
            # Its own are 5 and 2 s, which a busy machine may take.
            "ETCDCTL_COMMAND_TIMEOUT": f"{START_S:g}s",
            "ETCDCTL_DIAL_TIMEOUT": f"{START_S:g}s",
        }
        if self._tls:
            environment["ETCDCTL_CACERT"] = str(self.authority.cacert)
        if self._client_certificates:
            certificate, key = self.authority.client("root", "etcdctl")
            environment |= {"ETCDCTL_CERT": str(certificate), "ETCDCTL_KEY": str(key)}
        if user:
            environment["ETCDCTL_USER"] = user
        return environment

    def enable_auth(self, password: str = "root-password") -> None:
        """Ask for a user from now on; ``root`` may do everything."""
        self.etcdctl("user", "add", "root", "--interactive=false", stdin=password)
        self.etcdctl("user", "grant-role", "root", "root")
        self.etcdctl("auth", "enable")

    def kill(self, member: int) -> None:
        """SIGKILL."""
        process = self._processes[member]
        assert process is not None
        process.kill()
        self._frozen.discard(member)

    def stop(self, member: int) -> None:
        """SIGTERM, and wait: it lets calls under way end, and hands leadership over."""
        process = self._processes[member]
        assert process is not None
        process.terminate()
        process.wait(timeout=START_S)

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
        scheme = "https" if self._tls else "http"
        client = f"{scheme}://127.0.0.1:{self._client_ports[member]}"
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
            *self._arguments,
        ]
        if self._tls:
            command += [
                f"--cert-file={self._certificate[0]}",
                f"--key-file={self._certificate[1]}",
                # /health must answer whoever holds no certificate.
                f"--listen-metrics-urls=http://127.0.0.1:{self._health_ports[member]}",
            ]
        if self._client_certificates:
            command += ["--client-cert-auth", f"--trusted-ca-file={self.authority.cacert}"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        with (self.folder / f"m{member}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def restart(self, member: int) -> None:
        """Kill a member, start it again, and wait until all are healthy."""
        self.kill(member)
        self.start(member)
        self.restore()

    def empty(self) -> None:
        """Kill every member, throw its data away, and start again from nothing."""
        for member, process in enumerate(self._processes):
            self.kill(member)
            assert process is not None
            process.wait(timeout=START_S)
            if (data := self.folder / f"m{member}").exists():
                shutil.rmtree(data)
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
            self._check_ports()
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))
                raise RuntimeError(f"etcd is not healthy after {START_S} s:\n{logs}")
            time.sleep(0.05)

    def healthy(self, member: int) -> bool:
        """Whether the member can commit, and not somebody who has its port; blocks up to 1 s."""
        process = self._processes[member]
        if process is None or process.poll() is not None:
            return False
        with suppress(FileNotFoundError):  # it has just ended
            ports = {port for _, port in listening(process.pid)}
            return self._client_ports[member] in ports and (
                b'"health":"true"' in self._page(member, "health")
            )
        return False

    def leader(self) -> int:
        """Wait until one member, and no other, says that it leads."""
        deadline = time.monotonic() + START_S
        while True:
            pages = [self._page(member, "metrics") for member in range(len(self))]
            leaders = [n for n, page in enumerate(pages) if b"\netcd_server_is_leader 1\n" in page]
            if len(leaders) == 1:
                return leaders[0]
            assert time.monotonic() < deadline, f"members {leaders} lead"
            time.sleep(0.1)

    def _page(self, member: int, name: str) -> bytes:
        """What a member shows anybody; nothing where it does not answer within 1 s."""
        try:
            with urllib.request.urlopen(f"{self.metrics_urls[member]}/{name}", timeout=1) as answer:
                page: bytes = answer.read()
                return page
        except OSError:
            return b""

    def close(self) -> None:
        for process in self._processes:
            if process is not None:
                process.kill()
        for process in self._processes:
            if process is not None:
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _choose_ports(self) -> None:
        members = len(self)
        ports = free_ports(3 * members)
        self._client_ports, self._peer_ports = ports[:members], ports[members : 2 * members]
        self._health_ports = ports[2 * members :] if self._tls else self._client_ports

    def _check_ports(self) -> None:
        for member, process in enumerate(self._processes):
            if process is not None and process.poll() is not None:
                log = (self.folder / f"m{member}.log").read_text()[-2000:]
                if "address already in use" in log:
                    raise _PortTaken(log)

    def _signal(self, member: int, number: int) -> None:
        process = self._processes[member]
        assert process is not None
        process.send_signal(number)
