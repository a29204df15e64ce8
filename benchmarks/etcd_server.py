# SPDX-License-Identifier: Apache-2.0
"""One real etcd member for a benchmark, with defaults: it syncs every write to disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rdzv.errors import StoreError
from rdzv.store.etcd.client import EtcdStore

START_TIMEOUT_S = 20.0


@asynccontextmanager
async def etcd_server() -> AsyncIterator[str]:
    """Run etcd until the end of the block; yields its ``host:port``.

    The binary is the one in the folder ``$MUSTER_TEST_ETCD``, or on PATH.
    """
    binary = shutil.which("etcd", path=os.environ.get("MUSTER_TEST_ETCD"))
    if binary is None:
        raise SystemExit(
            "No etcd was found: name its folder in MUSTER_TEST_ETCD, or use scripts/bench."
        )
    client, peer = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="muster-bench-etcd-") as directory:
        process = await asyncio.create_subprocess_exec(
            binary,
            "--name=bench",
            f"--data-dir={directory}/data",
            f"--listen-client-urls=http://127.0.0.1:{client}",
            f"--advertise-client-urls=http://127.0.0.1:{client}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=bench=http://127.0.0.1:{peer}",
            "--log-level=fatal",
        )
        try:
            await _answering(f"127.0.0.1:{client}")
            yield f"127.0.0.1:{client}"
        finally:
            process.terminate()
            await process.wait()


async def _answering(endpoint: str) -> None:
    store = EtcdStore([endpoint])
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                try:
                    await store.status()
                    return
                except StoreError:
                    await asyncio.sleep(0.1)
    finally:
        await store.close()


def free_port() -> int:
    """Return a port that is free now; another process may still take it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
