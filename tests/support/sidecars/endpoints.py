# SPDX-License-Identifier: Apache-2.0
"""A c10d endpoint over the memory store, and torch's clients of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from agent.parts import endpoint_of, member_parts
from agent.surroundings import MemberSettings, Sockets
from launcher_shim.c10d.endpoint import Endpoint
from launcher_shim.c10d.kept_stages import Kept
from launcher_shim.c10d.torch.state_codec import (
    SENTINEL,
    Flavour,
    NodeDesc,
    TorchState,
    encode,
)
from launcher_shim.tcpstore import wire
from rdzv.job import JobClient
from rdzv.members.registrar import Registrar
from rdzv.members.registration import Held
from rdzv.store.memory.client import MemoryEngine
from rdzv.store.memory.faults import Faults
from tests.support.sidecars.jobs import KEYS, client, identity, surroundings
from tests.support.sidecars.raw_client import DEADLINE_S, RawClient

LEASE_TTL_S = 600.0
"""No lease is to end here."""


@dataclass
class Pod:
    """A sidecar's registrar and endpoint."""

    client: JobClient
    registrar: Registrar
    endpoint: Endpoint

    @property
    def port(self) -> int:
        assert self.endpoint.port is not None
        return self.endpoint.port


@asynccontextmanager
async def pod(
    engine: MemoryEngine,
    name: str,
    faults: Faults | None = None,
    *,
    register: bool = True,
    waits: bool = True,
    uid: str = "",
    last_call_s: float = 2.0,
    c10d_port: int | None = 0,
    unix_path: str | None = None,
    kept: Kept | None = None,
    least: int = 1,
    held: Held | None = None,
) -> AsyncIterator[Pod]:
    async with client(engine, faults) as one:
        around = surroundings(one.store, name)
        settings = MemberSettings(
            keys=KEYS,
            identity=identity(name, uid, least=least),
            lease_ttl_s=LEASE_TTL_S,
            last_call_s=last_call_s,
        )
        member = member_parts(around, settings, one, held=held)
        sockets = Sockets(c10d_port=c10d_port, c10d_path=unix_path)
        registrar = member.registrar
        endpoint = endpoint_of(around, settings, member, sockets, kept=kept)
        tasks = [asyncio.create_task(endpoint.run())]
        if register:
            tasks.append(asyncio.create_task(registrar.run()))
        try:
            async with asyncio.timeout(DEADLINE_S):
                if waits:
                    await endpoint.listening.wait()
                if register:
                    await registrar.registered.wait()
            yield Pod(one, registrar, endpoint)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


async def asks(raw: RawClient, run_id: str) -> bytes:
    """Open a rendezvous, and join as torch does: with a first state that names itself alone."""
    assert await raw.open_rendezvous(run_id) == SENTINEL
    me = NodeDesc("10.0.0.1", 7, 0)
    first = TorchState(participants={me: 0}, last_heartbeats={me: datetime(2026, 1, 1, tzinfo=UTC)})
    key = b"/torch.rendezvous." + run_id.encode()
    blob = await raw.ask(wire.CompareSet(key, SENTINEL, encode(first, Flavour(aware=True))))
    assert isinstance(blob, bytes)
    return blob
