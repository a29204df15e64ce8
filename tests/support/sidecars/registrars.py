# SPDX-License-Identifier: Apache-2.0
"""Registrars over the memory store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from agent.parts import member_parts
from agent.surroundings import MemberSettings
from rdzv.job import JobClient
from rdzv.members.registrar import Registrar
from rdzv.members.registration import Held, Identity
from rdzv.snapshot import Snapshot
from tests.support.sidecars.jobs import KEYS, identity, surroundings
from tests.support.waiting import DEADLINE_S

TTL_S = 2.0


LONG_TTL_S = 60.0
"""What happens within seconds is not due to its end."""

W_0 = identity("w-0")


def registrar(
    one: JobClient,
    who: Identity,
    held: Held | None = None,
    seed: int = 0,
    on_held: Callable[[Held], Awaitable[None]] | None = None,
    lease_ttl_s: float = TTL_S,
) -> Registrar:
    around = surroundings(one.store, f"{who.member}{who.pod_uid}{seed}")
    settings = MemberSettings(keys=KEYS, identity=who, lease_ttl_s=lease_ttl_s)
    return member_parts(around, settings, one, held=held, on_held=on_held).registrar


@asynccontextmanager
async def running(one: Registrar) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(one.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(
    one: JobClient, condition: Callable[[Snapshot], bool], timeout_s: float = 30
) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition(one.membership.snapshot()):
            await one.mirror.changed_after(one.mirror.sequence)


async def registered(*registrars: Registrar) -> None:
    async with asyncio.timeout(DEADLINE_S):
        for one in registrars:
            await one.registered.wait()


@asynccontextmanager
async def member_of(
    one: JobClient, who: Identity = W_0, **options: Any
) -> AsyncIterator[Registrar]:
    """A member that is registered; ``options`` are those of ``registrar``."""
    member = registrar(one, who, **options)
    async with running(member):
        await registered(member)
        yield member
