# SPDX-License-Identifier: Apache-2.0
"""Reading of a job from the store, once or continuously."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import TYPE_CHECKING

import click

from agent.config.job import AccessConfig, JobConfig
from agent.verdict.view import JobView, present_view, view_of
from console.job.known import JOBS_MAX, jobs_in, not_found
from console.job.outage import cause, endpoint_is_local
from rdzv.errors import ConfigError, StoreRefused, StoreUnavailable
from rdzv.job import read_all
from rdzv.keys import JobKeys
from rdzv.membership import snapshot_of
from rdzv.mirror import HEALTHY_S, Mirror
from rdzv.sentences import named
from rdzv.store import Store
from rdzv.store.etcd.client import open_store

if TYPE_CHECKING:
    from rdzv.job import JobClient

AT_ONCE = 8
"""Jobs that are read at the same time."""

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
        if not read.kvs:
            raise await not_found(store, keys, or_else=" (or wait for it with --watch)")
    except StoreUnavailable as error:
        raise unreachable(config.etcd_endpoints, str(error), config.job) from error
    finally:
        await store.close()
    return view_of(keys, snapshot_of(keys, read), read.kvs)


async def look_at_all(config: AccessConfig, namespace: str | None) -> list[JobView]:
    """Read the jobs of a namespace, or of the whole store, each once.

    Raises ``StoreUnavailable``, and ``ConfigError`` if the user may not list them.
    """
    store, turns = open_store(config.access), asyncio.Semaphore(AT_ONCE)
    try:
        known = await jobs_in(store, namespace=namespace, timeout_s=REACH_TIMEOUT_S)
        if len(known) == JOBS_MAX:
            more = f"only the first {JOBS_MAX} jobs are read: name a namespace by -n"
            click.echo(f"muster: {more}", err=True)
        return list(await asyncio.gather(*(_view(store, keys, turns) for keys in known)))
    except StoreUnavailable as error:
        raise unreachable(config.etcd_endpoints, str(error)) from error
    except StoreRefused as error:
        raise ConfigError(
            f"the store does not let this user list its jobs ({error}): name one, as in muster"
            " status JOB"
        ) from error
    finally:
        await store.close()


async def _view(store: Store, keys: JobKeys, turns: asyncio.Semaphore) -> JobView:
    async with turns:
        read = await read_all(store, keys.prefix, timeout_s=REACH_TIMEOUT_S)
    return view_of(keys, snapshot_of(keys, read), read.kvs)


@asynccontextmanager
async def connected(config: JobConfig, *, known: bool = True) -> AsyncIterator[JobClient]:
    """Yield a client that follows the job in the store and may write to it.

    Raises ``StoreUnavailable`` if the first read takes longer than ``REACH_TIMEOUT_S``; in a later
    outage the client keeps its last view. Raises ``JobNotFound`` if the store has no key of the
    job, unless ``known`` is false.
    """
    from rdzv.job import JobClient  # only here: a single read has no use for it

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
                raise unreachable(
                    config.etcd_endpoints, client.watching.trouble, config.job
                ) from None
            if known and not client.mirror.kvs:
                raise await not_found(store, client.keys)
            yield client
    finally:
        await store.close()


@asynccontextmanager
async def following(config: JobConfig) -> AsyncIterator[AsyncIterator[JobView]]:
    """Follow the job: yield an iterator of views, one at first and one after each change.

    Raises as ``connected`` does, but not ``JobNotFound``.
    """
    async with connected(config, known=False) as client:
        yield _views(client)


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


def unreachable(endpoints: Sequence[str], trouble: str, job: str = "JOB") -> StoreUnavailable:
    """Return the error for a store that was not reached, with what it means for the jobs."""
    where = ", ".join(endpoints)
    local = all(endpoint_is_local(endpoint) for endpoint in endpoints)
    here = (
        "; is a port-forward down? For a test, muster store starts an empty store" if local else ""
    )
    return StoreUnavailable(
        f"cannot reach the store at {where} within {REACH_TIMEOUT_S:g} s ({cause(trouble)})"
        "\nworlds that train go on; no pod joins or leaves until it answers"
        f"\ncheck {named('--etcd-endpoints')}{here}; muster doctor {job} says more"
    )
