# SPDX-License-Identifier: Apache-2.0
"""A container engine for builds and tests: started, used through the ``docker`` SDK, and stopped.

It shares nothing with an engine that the machine may have: its data, its sockets and its cgroups
are its own, and it changes no network of the host. Containers have the host's network or none.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import docker

ROOT = Path(__file__).parents[3]
CACHE = Path(os.environ.get("MUSTER_CACHE") or Path.home() / ".cache" / "muster")
API_VERSION = "1.41"
CALL_TIMEOUT_S = 300
START_S = 90.0
END_S = 60.0
CGROUPS = Path("/sys/fs/cgroup")
CPU_WEIGHTS = {"cpu.shares": 20 * 1024, "cpu.weight": 2000}
"""CPU weight of all containers together, by the file of either cgroup version: that of twenty
processes. With the weight of one, they would starve as soon as anything else runs."""

_PRIVATELY = """
# Where cgroups of both kinds are mounted, it would use the second, which has no controller.
if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
# It insists on keeping a key in /etc/docker.
mkdir "$0/etc" "$0/work"
mount -t overlay -o "lowerdir=/etc,upperdir=$0/etc,workdir=$0/work" overlay /etc
exec "$@"
"""


def toolchain(name: str, *arguments: str) -> Path:
    """Run a script of ``scripts/toolchain`` and return the path that it prints.

    Raises ``RuntimeError`` with the script's error output if it fails.
    """
    done = subprocess.run(
        [ROOT / "scripts" / "toolchain" / name, *arguments],
        env={**os.environ, "MUSTER_CACHE": str(CACHE)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"scripts/toolchain/{name}: {done.stderr}")
    return Path(done.stdout.strip())


class ContainerEngine:
    """``with ContainerEngine() as engine: engine.client.containers.run(…)``; leaves nothing behind.

    Only its images stay if it is given a folder for them, which no other engine may use meanwhile.
    """

    client: Any

    def __init__(self, images: Path | None = None) -> None:
        if os.geteuid() != 0:
            raise RuntimeError("a container engine can only be started by root")
        self._programs = toolchain("container-engine")
        self._folder = Path(tempfile.mkdtemp(prefix="muster-engine-"))
        self._images = images or self._folder / "data"
        self._cgroup = f"muster-engine-{uuid.uuid4().hex[:8]}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        folder, programs = self._folder, self._programs
        self._weigh()
        libraries = ":".join(str(path.parent) for path in programs.glob("root/**/libdevmapper.so*"))
        (folder / "daemon.json").write_text("{}")  # instead of the machine's, if it has one
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "TERM", "unshare", "--mount"),
                    *("sh", "-ec", _PRIVATELY, folder, programs / "bin" / "dockerd"),
                    *("--config-file", folder / "daemon.json", "--data-root", self._images),
                    *("--exec-root", folder / "exec", "--pidfile", folder / "pid"),
                    *("--host", f"unix://{folder}/docker.sock"),
                    *("--storage-driver", "overlay2", "--exec-opt", "native.cgroupdriver=cgroupfs"),
                    *("--cgroup-parent", f"/{self._cgroup}", "--oom-score-adjust", "0"),
                    *("--bridge=none", "--iptables=false", "--ip6tables=false"),
                    *("--ip-forward=false", "--ip-masq=false"),
                ],
                env={
                    "PATH": f"{programs / 'bin'}:{os.environ['PATH']}",
                    "LD_LIBRARY_PATH": libraries,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self.client = self._connected()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for container in self.client.containers.list(all=True):
                container.remove(force=True)
            self.client.close()
        finally:
            self._end()

    def _weigh(self) -> None:
        """Create the containers' cgroup before dockerd does, and set its weight."""
        of_version_1 = CGROUPS / "cpu"
        cgroup = (of_version_1 if of_version_1.is_dir() else CGROUPS) / self._cgroup
        cgroup.mkdir()
        for name, weight in CPU_WEIGHTS.items():
            if (cgroup / name).exists():
                (cgroup / name).write_text(str(weight))

    def import_base(self, tag: str, architecture: str = "") -> None:
        """Import the base that ``scripts/toolchain/container-base`` provides.

        ``architecture``: one that is not the machine's, which needs an emulator.
        """
        name, _, version = tag.partition(":")
        base = toolchain("container-base", *filter(None, [architecture]))
        self.client.api.import_image_from_file(str(base), repository=name, tag=version)

    def _connected(self) -> Any:
        assert self._process is not None
        path = self._folder / "docker.sock"
        deadline_s = time.monotonic() + START_S
        # The SDK leaks a socket if it cannot connect.
        while not _listens(path):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                log = (self._folder / "log").read_text()[-3000:]
                raise AssertionError(f"dockerd does not start: {log}")
            time.sleep(0.1)
        client = docker.DockerClient(f"unix://{path}", version=API_VERSION, timeout=CALL_TIMEOUT_S)
        client.ping()
        return client

    def _end(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder)
        # Unlike a glob, a walk goes on if a cgroup of another process vanishes meanwhile.
        for folder, names, _ in os.walk(CGROUPS):
            if self._cgroup in names:
                with suppress(OSError):  # a last process of a container may still be ending
                    (Path(folder) / self._cgroup).rmdir()


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True
