# SPDX-License-Identifier: Apache-2.0
"""``tunnel``: a command through the tunnel beside the same by OpenSSH, both on loopback.

Two real sidecars, the agent under ``muster-run``, and an sshd of this user with keys that both
sides know already. Runs of both take turns.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from benchmarks.etcd_members import etcd_server
from benchmarks.figures import Bar, Figure, of_runs
from benchmarks.node_processes import Sidecar
from benchmarks.openssh import sshd, until
from benchmarks.resident_memory import rss_mib
from console.local import processes
from launcher_shim.rundir import layout

STARTS = 30
OUTPUTS = 9
OUTPUT_BYTES = 100_000_000
END_TIMEOUT_S = 30.0


async def measure(starts: int = STARTS, outputs: int = OUTPUTS) -> list[Figure]:
    """Time starts, then outputs, in turns; then measure the sidecars' memory during a command."""
    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        client = await stack.enter_async_context(sshd(root / "ssh"))
        ssh = Way(client, dict(os.environ), "")
        tunnel = await stack.enter_async_context(_tunnel(root))
        began: list[float] = []
        began_ssh: list[float] = []
        for _ in range(starts):
            began.append(await asyncio.to_thread(tunnel.seconds, "true"))
            began_ssh.append(await asyncio.to_thread(ssh.seconds, "true"))
        rates: list[float] = []
        rates_ssh: list[float] = []
        output = f"head -c {OUTPUT_BYTES} /dev/zero"
        for _ in range(outputs):
            rates.append(OUTPUT_BYTES / 1e6 / await asyncio.to_thread(tunnel.seconds, output))
            rates_ssh.append(OUTPUT_BYTES / 1e6 / await asyncio.to_thread(ssh.seconds, output))
        weights = await tunnel.weights_mib()
    ssh_name = "OpenSSH with a warm key"
    return [
        of_runs(
            "tunnel/start of a command",
            "ms",
            Bar("ratio", "<=", 1.0),
            [1000 * seconds for seconds in began],
            [1000 * seconds for seconds in began_ssh],
            ssh_name,
        ),
        of_runs(
            "tunnel/100 MB of output", "MB/s", Bar("ratio", ">=", 0.7), rates, rates_ssh, ssh_name
        ),
        of_runs(
            "tunnel/RSS of a sidecar with one command",
            "MiB",
            Bar("value", "<=", 60),
            weights,
            by=max,
        ),
    ]


class Way:
    """One way to run a command on the other side; ``words`` precede the command's text."""

    def __init__(self, words: Sequence[str], environ: dict[str, str], prefix: str) -> None:
        self._words = words
        self._environ = environ
        self._prefix = prefix

    def start(self, command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            (*self._words, f"cd / > /dev/null 2>&1 ; env {self._prefix} {command}"),
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )

    def seconds(self, command: str) -> float:
        """Run one command, read all of its output, and return the seconds that took."""
        began_s = time.monotonic()
        with self.start(command) as process:
            assert process.stdout is not None
            while os.read(process.stdout.fileno(), 1 << 20):
                pass
        taken_s = time.monotonic() - began_s
        if process.returncode:
            raise RuntimeError(f"{self._words[0]} ended with {process.returncode}")
        return taken_s


class Tunnel(Way):
    """The way through the sidecars."""

    def __init__(self, words: Sequence[str], prefix: str, sidecars: tuple[Sidecar, ...]) -> None:
        super().__init__(words, dict(os.environ), prefix)
        self._sidecars = sidecars

    async def weights_mib(self) -> tuple[float, ...]:
        """Measure the sidecars' resident memory during a command, after earlier ones."""
        with self.start("sh -c 'echo up; exec sleep 1000'") as running:
            assert running.stdout is not None
            await asyncio.to_thread(os.read, running.stdout.fileno(), 10)
            weights = tuple(rss_mib(one.pid) for one in self._sidecars)
            running.kill()
        return weights


@asynccontextmanager
async def _tunnel(root: Path) -> AsyncIterator[Tunnel]:
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(etcd_server())
        sidecars = []
        for name, role in (("launcher", "launcher"), ("node-0", "worker")):
            one = Sidecar(root / name, "tunnel", name, endpoint, (1, 1), role=role, tunnelled=True)
            await one.start()
            stack.push_async_callback(one.kill)
            await one.ready()
            sidecars.append(one)
        run_dir = root / "node-0"
        environ = {**os.environ, "MUSTER_RUN_DIR": str(run_dir)}
        command = (*sidecars[1].wrapper, str(run_dir / layout.PROGRAMS / layout.MUSTER_EXEC))
        agent = await processes.start_child(command, environ, root / "agent.log")
        stack.push_async_callback(processes.end_child, agent, END_TIMEOUT_S)
        await until((run_dir / layout.EXEC_SOCKET).exists)
        host = sidecars[1].torch_environment()["MUSTER_HOST"]
        kubexec = root / "launcher" / layout.KUBEXEC
        prefix = f"HOROVOD_HOSTNAME={host} HOROVOD_LOCAL_RANK=0"
        yield Tunnel((str(kubexec), host), prefix, tuple(sidecars))
