# SPDX-License-Identifier: Apache-2.0
"""Reads a job from the store, once or for as long as somebody looks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

from agent.config import JobConfig
from console.job_view import JobView, view_of
from rdzv.errors import ConfigError, StoreUnavailable
from rdzv.keys import JobKeys
from rdzv.membership import Membership, snapshot_of
from rdzv.paging import read_all
from rdzv.store import Store
from rdzv.store.opening import open_store
from rdzv.watching import Mirror, Watching

REACH_TIMEOUT_S = 5.0


async def look(config: JobConfig) -> JobView:
    """Read the job once.

    Raises ``StoreUnavailable`` after ``REACH_TIMEOUT_S``, ``ConfigError`` if there is no such job.
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
        raise ConfigError(
            f"the store has no job {config.job} in namespace {config.namespace}: check --job"
            " (MUSTER_JOB) and --namespace (MUSTER_NAMESPACE), or wait for it with --watch"
        )
    return view_of(keys, snapshot_of(keys, read), read.kvs)


@asynccontextmanager
async def connected(config: JobConfig) -> AsyncIterator[tuple[Store, Mirror]]:
    """Follow the job in a store that may also be written to.

    Raises ``StoreUnavailable`` if the first read takes longer than ``REACH_TIMEOUT_S``; later on
    the last view stays.
    """
    keys = JobKeys(config.namespace, config.job)
    mirror = Mirror(keys.prefix, monotonic)
    store = open_store(config.access)
    follower = Watching(store, mirror)
    watching = asyncio.create_task(follower.run(), name="watch")
    try:
        try:
            async with asyncio.timeout(REACH_TIMEOUT_S):
                await mirror.changed_after(0)
        except TimeoutError:
            raise _unreachable(config, follower.trouble) from None
        yield store, mirror
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await store.close()


@asynccontextmanager
async def following(config: JobConfig) -> AsyncIterator[AsyncIterator[JobView]]:
    """Follow the job: gives an iterator of views, one at first and one after each change.

    Raises as ``connected`` does.
    """
    async with connected(config) as (_, mirror):
        yield _views(JobKeys(config.namespace, config.job), mirror)


async def _views(keys: JobKeys, mirror: Mirror) -> AsyncIterator[JobView]:
    membership = Membership(keys, mirror)
    while True:
        sequence = mirror.sequence
        yield view_of(keys, membership.snapshot(), mirror.kvs.values())
        await mirror.changed_after(sequence)


def _unreachable(config: JobConfig, trouble: str) -> StoreUnavailable:
    where = ", ".join(config.etcd_endpoints)
    return StoreUnavailable(
        f"the store at {where} does not answer within {REACH_TIMEOUT_S:g} s"
        f"{f' ({trouble})' if trouble else ''}: check --etcd-endpoints (MUSTER_ETCD_ENDPOINTS)"
    )
