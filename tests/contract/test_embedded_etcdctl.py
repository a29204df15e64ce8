# SPDX-License-Identifier: Apache-2.0
"""The embedded server as ``etcdctl`` sees it."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from rdzv.store import Delete, Put
from rdzv.store.memory.client import MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.store.etcd_cluster import START_S, find_etcd

pytestmark = pytest.mark.etcd

PATIENT = (f"--command-timeout={START_S:g}s", f"--dial-timeout={START_S:g}s")
"""Its own deadlines are 5 and 2 s, which a busy machine may take."""

Etcdctl = Callable[..., Awaitable[str]]


@pytest.fixture
async def etcdctl() -> AsyncIterator[Etcdctl]:
    binary = (await asyncio.to_thread(find_etcd)).with_name("etcdctl")
    async with EmbeddedServer() as server:

        async def run(*arguments: str, stdin: str = "", status: int = 0) -> str:
            command = [str(binary), *PATIENT, "--endpoints", server.endpoint, *arguments]
            done = await asyncio.to_thread(
                subprocess.run,
                command,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=START_S + 10,
                check=False,
            )
            assert done.returncode == status, done.stderr
            return done.stdout + (done.stderr if status else "")

        yield run


async def test_keys(etcdctl: Etcdctl) -> None:
    assert await etcdctl("put", "a/1", "one") == "OK\n"
    assert await etcdctl("put", "a/2", "two") == "OK\n"
    assert await etcdctl("put", "a/1", "uno", "--prev-kv") == "OK\na/1\none\n"
    assert await etcdctl("get", "--prefix", "a/") == "a/1\nuno\na/2\ntwo\n"
    assert await etcdctl("get", "a/", "--prefix", "--keys-only", "--order=DESCEND") == (
        "a/2\n\na/1\n\n"
    )
    limited = json.loads(await etcdctl("get", "--prefix", "a/", "--limit", "1", "-w", "json"))
    assert (limited["count"], len(limited["kvs"]), limited["more"]) == (2, 1, True)
    assert await etcdctl("get", "a/2", "--from-key", "--keys-only") == "a/2\n\n"
    assert await etcdctl("del", "a/1", "--prev-kv") == "1\na/1\nuno\n"
    assert await etcdctl("del", "--prefix", "a/") == "1\n"
    assert await etcdctl("get", "--prefix", "") == ""


async def test_transactions(etcdctl: Etcdctl) -> None:
    await etcdctl("put", "a", "1")
    script = 'value("a") = "1"\n\nput b 2\nget b\n\nput c 3\n\n'
    assert await etcdctl("txn", stdin=script) == "SUCCESS\n\nOK\n\nb\n2\n"
    script = 'mod("a") > "100"\n\nput b 2\n\nput c 3\ndel a\n\n'
    assert await etcdctl("txn", stdin=script) == "FAILURE\n\nOK\n\n1\n"


async def test_leases(etcdctl: Etcdctl) -> None:
    lease = (await etcdctl("lease", "grant", "600")).split()[1]
    await etcdctl("put", "a", "1", f"--lease={lease}")
    assert lease in await etcdctl("lease", "list")
    assert "attached keys([a])" in await etcdctl("lease", "timetolive", lease, "--keys")
    assert "TTL(600)" in await etcdctl("lease", "keep-alive", "--once", lease)
    assert "revoked" in await etcdctl("lease", "revoke", lease)
    assert "already expired" in await etcdctl("lease", "timetolive", lease)
    assert await etcdctl("get", "a") == ""
    assert "lease not found" in await etcdctl("put", "a", "1", "--lease=1234", status=1)


async def test_watches_and_compactions(etcdctl: Etcdctl) -> None:
    for value in ("1", "2", "3"):
        await etcdctl("put", "a", value)
    assert "compacted revision 3" in await etcdctl("compaction", "3")
    assert "has been compacted" in await etcdctl("compaction", "3", status=1)
    assert "has been compacted" in await etcdctl("watch", "a", "--rev", "2", status=5)


async def test_a_live_watch() -> None:
    binary = (await asyncio.to_thread(find_etcd)).with_name("etcdctl")
    async with EmbeddedServer() as server:
        store = MemoryStore(server.engine)
        await store.txn([], [Put("a/1", b"old")])
        watching = await asyncio.create_subprocess_exec(
            *(str(binary), *PATIENT, "--endpoints", server.endpoint),
            *("watch", "--prefix", "a/", "--rev", "2"),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert watching.stdout is not None
            async with asyncio.timeout(START_S):
                assert await watching.stdout.readexactly(12) == b"PUT\na/1\nold\n"
                await store.txn([], [Put("a/2", b"new"), Delete("a/1")])
                expected = b"PUT\na/2\nnew\nDELETE\na/1\n\n"
                assert await watching.stdout.readexactly(len(expected)) == expected
        finally:
            watching.terminate()
            await watching.wait()


async def test_health(etcdctl: Etcdctl) -> None:
    assert "is healthy" in await etcdctl("endpoint", "health")
    (status,) = json.loads(await etcdctl("endpoint", "status", "-w", "json"))
    assert status["Status"]["version"].startswith("3.6")
