# SPDX-License-Identifier: Apache-2.0
"""A pod of real processes for tests: a sidecar that may die, and ``muster-run`` beside it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.ports import free_ports
from tests.support.sidecars.processes import PATIENCE_S, Sidecar, sidecar, until


@dataclass
class RelayedPod:
    """``port`` is that of the relay; ``runner`` the process of ``muster-run``."""

    endpoint: str
    run_dir: Path
    port: int
    environ: dict[str, str]
    stack: AsyncExitStack
    sidecar: Sidecar | None = None
    runner: asyncio.subprocess.Process | None = None
    of_container: dict[str, str] = field(default_factory=dict)
    """Variables of the training container's own."""

    async def start_sidecar(self) -> None:
        """Start a sidecar and wait until it is ready."""
        settings = {
            "MUSTER_C10D_PORT": "0",
            "MUSTER_RELAY_PORT": str(self.port),
            "MUSTER_LEASE_TTL": "10",
            **self.environ,
        }
        self.sidecar = await self.stack.enter_async_context(
            sidecar(self.endpoint, self.run_dir, **settings)
        )
        await self.sidecar.until_ready()

    async def kill_sidecar(self) -> None:
        """SIGKILL."""
        assert self.sidecar is not None
        await self.sidecar.end(signal.SIGKILL)

    async def start_runner(self, *command: str) -> None:
        """Start ``muster-run`` and wait until its relay listens."""
        await self.start_again(*command)

        async def listens() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except ConnectionError:
                return False
            writer.close()
            return True

        await until(listens)

    async def start_again(self, *command: str) -> None:
        """Start ``muster-run``, which may end at once."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("MUSTER_", "PET_"))}
        self.runner = await asyncio.create_subprocess_exec(
            self.run_dir / "bin" / "muster-run",
            *("--", *command),
            env={**environ, "MUSTER_RUN_DIR": str(self.run_dir), **self.of_container},
            stderr=asyncio.subprocess.PIPE,
        )


@asynccontextmanager
async def relayed_pod(
    endpoint: str,
    run_dir: Path,
    *command: str,
    port: int = 0,
    of_container: dict[str, str] | None = None,
    **environ: str,
) -> AsyncIterator[RelayedPod]:
    """Run a pod; end it at the end. ``port``: 0 chooses one."""
    port = port or free_ports(1)[0]
    async with AsyncExitStack() as stack:
        pod = RelayedPod(endpoint, run_dir, port, environ, stack)
        pod.of_container = dict(of_container or {})
        await pod.start_sidecar()
        await pod.start_runner(*(command or ("sleep", "600")))
        try:
            yield pod
        finally:
            assert pod.runner is not None
            if pod.runner.returncode is None:
                pod.runner.send_signal(signal.SIGINT)
            async with asyncio.timeout(PATIENCE_S):
                await pod.runner.communicate()
