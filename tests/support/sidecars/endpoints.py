# SPDX-License-Identifier: Apache-2.0
"""A c10d endpoint over the memory store, and torch's clients of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from agent.parts import endpoint_of, member_parts
from agent.surroundings import MemberSettings, Sockets, Surroundings
from launcher_shim.c10d.endpoint import Endpoint
from launcher_shim.c10d.rounds.stages import Kept
from launcher_shim.c10d.state_codec import SENTINEL, Flavour, NodeDesc, TorchState, encode
from launcher_shim.tcpstore import wire
from rdzv.errors import Fenced
from rdzv.job import JobClient
from rdzv.members.registrar import Registrar
from rdzv.members.registration import Held
from rdzv.store.memory.client import Faults, MemoryEngine
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
    def name(self) -> str:
        return self.registrar.identity.member

    @property
    def port(self) -> int:
        assert self.endpoint.port is not None
        return self.endpoint.port


@asynccontextmanager
async def serving(
    around: Surroundings,
    settings: MemberSettings,
    client: JobClient,
    sockets: Sockets,
    *more: Coroutine[Any, Any, object],
    register: bool = True,
    waits: bool = True,
    fenced: bool = False,
    kept: Kept | None = None,
    held: Held | None = None,
    on_held: Callable[[Held], Awaitable[None]] | None = None,
    failed: Callable[[], Collection[str]] = tuple,
) -> AsyncIterator[Pod]:
    """Run the parts of a member and its endpoint, and ``more`` beside them, as long as the block.

    None may end before, but by being fenced if that is to be (``fenced``). The block begins once
    they are registered, where they ``register``, and listen, if it ``waits`` for that.
    """
    member = member_parts(around, settings, client, held=held, on_held=on_held)
    registrar = member.registrar
    endpoint = endpoint_of(around, settings, member, sockets, kept=kept, failed=failed)
    parts = [*more, endpoint.run(), *([registrar.run()] if register else [])]
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        async with asyncio.timeout(DEADLINE_S):
            if waits:
                await endpoint.listening.wait()
            if register:
                await registrar.registered.wait()
        yield Pod(client, registrar, endpoint)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        expected = (asyncio.CancelledError, *([Fenced] if fenced else []))
        assert all(isinstance(one, expected) for one in ended), ended


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
    first_call_s: float = 30.0,
    c10d_port: int | None = 0,
    unix_path: str | None = None,
    kept: Kept | None = None,
    least: int = 1,
    held: Held | None = None,
    failed: Callable[[], Collection[str]] = tuple,
) -> AsyncIterator[Pod]:
    async with client(engine, faults) as one:
        around = surroundings(one.store, name)
        settings = MemberSettings(
            keys=KEYS,
            identity=identity(name, uid, least=least),
            lease_ttl_s=LEASE_TTL_S,
            last_call_s=last_call_s,
            first_call_s=first_call_s,
        )
        sockets = Sockets(c10d_port=c10d_port, c10d_path=unix_path)
        async with serving(
            *(around, settings, one, sockets),
            register=register,
            waits=waits,
            kept=kept,
            held=held,
            failed=failed,
        ) as made:
            yield made


async def asks(raw: RawClient, run_id: str) -> bytes:
    """Open a rendezvous, and join as torch does: with a first state that names itself alone."""
    assert await raw.open_rendezvous(run_id) == SENTINEL
    me = NodeDesc("10.0.0.1", 7, 0)
    first = TorchState(participants={me: 0}, last_heartbeats={me: datetime(2026, 1, 1, tzinfo=UTC)})
    key = b"/torch.rendezvous." + run_id.encode()
    blob = await raw.ask(wire.CompareSet(key, SENTINEL, encode(first, Flavour(aware=True))))
    assert isinstance(blob, bytes)
    return blob
