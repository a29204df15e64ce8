# SPDX-License-Identifier: Apache-2.0
"""Reading of a job from the store, once or continuously."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from time import monotonic

from agent.config.sidecar import JobConfig
from console.job.outage import cause, endpoint_is_local
from console.job.view import JobView, view_of
from rdzv.errors import JobNotFound, StoreUnavailable
from rdzv.flags import named
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.membership import snapshot_of
from rdzv.mirror import HEALTHY_S, Mirror
from rdzv.paging import read_all
from rdzv.store.open import open_store

REACH_TIMEOUT_S = 5.0

SILENCE_S = 120.0
"""Timeout of a wait for changes while the store is silent: longer than etcd takes to come back
after a restart."""


async def look(config: JobConfig) -> JobView:
    """Read the job once.

    Raises ``StoreUnavailable`` after ``REACH_TIMEOUT_S``, ``JobNotFound`` if it has no key.
    """
    keys = JobKeys(config.namespace, config.job)
    store = open_store(config.access)
    try:
        read = await read_all(store, keys.prefix, timeout_s=REACH_TIMEOUT_S)
    except StoreUnavailable as error:
        raise _unreachable(config, str(error)) from error
    finally:
        await store.close()
    if not read.kvs:
        raise JobNotFound(
            f"the store has no job {config.job} in namespace {config.namespace}: check"
            f" {named('--job')} and {named('--namespace')}, or wait for it with --watch"
        )
    return view_of(keys, snapshot_of(keys, read), read.kvs)


@asynccontextmanager
async def connected(config: JobConfig) -> AsyncIterator[JobClient]:
    """Yield a client that follows the job in the store and may write to it.

    Raises ``StoreUnavailable`` if the first read takes longer than ``REACH_TIMEOUT_S``; in a later
    outage the client keeps its last view.
    """
    # The command reports an outage once, in a sentence for its user.
    logging.getLogger(Mirror.__module__).setLevel(logging.ERROR)
    store = open_store(config.access)
    client = JobClient.of(store, JobKeys(config.namespace, config.job), clock=monotonic)
    try:
        async with client.following():
            try:
                async with asyncio.timeout(REACH_TIMEOUT_S):
                    await client.mirror.changed_after(0)
            except TimeoutError:
                raise _unreachable(config, client.watching.trouble) from None
            yield client
    finally:
        await store.close()


@asynccontextmanager
async def following(config: JobConfig) -> AsyncIterator[AsyncIterator[JobView]]:
    """Follow the job: yield an iterator of views, one at first and one after each change.

    Raises as ``connected`` does.
    """
    async with connected(config) as client:
        yield _views(client)


def present_view(client: JobClient) -> JobView:
    """Return the job as the mirror has it now."""
    return view_of(client.keys, client.membership.snapshot(), client.mirror.kvs.values())


async def news(
    mirror: Mirror, change: Callable[[], Coroutine[None, None, None]], meanwhile: str
) -> None:
    """Wait for ``change`` while the store answers.

    Raises ``StoreUnavailable`` after ``SILENCE_S`` without an answer; its message contains
    ``meanwhile``, the state that goes on.
    """
    silent = 0
    while silent * HEALTHY_S < SILENCE_S:
        try:
            async with asyncio.timeout(HEALTHY_S):
                return await change()
        except TimeoutError:
            # Count checks, not time: a command that was suspended (Ctrl-Z) has not received
            # anything meanwhile either.
            silent = 0 if mirror.healthy(mirror.clock()) else silent + 1
    raise StoreUnavailable(
        f"the store has not answered for {SILENCE_S:g} s: {meanwhile}; see muster status, or wait"
        " again by the same command"
    )


async def _views(client: JobClient) -> AsyncIterator[JobView]:
    mirror = client.mirror
    while True:
        sequence = mirror.sequence
        yield present_view(client)
        await mirror.changed_after(sequence)


def _unreachable(config: JobConfig, trouble: str) -> StoreUnavailable:
    where = ", ".join(config.etcd_endpoints)
    job = f" --job {config.job}"
    local = all(endpoint_is_local(endpoint) for endpoint in config.etcd_endpoints)
    start = f"muster store --listen {config.etcd_endpoints[0]} starts one; or " if local else ""
    return StoreUnavailable(
        f"cannot reach the store at {where} within {REACH_TIMEOUT_S:g} s ({cause(trouble)})"
        f"\n{start}set {named('--etcd-endpoints')}; muster doctor{job} says more"
    )
