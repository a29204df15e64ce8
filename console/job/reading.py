# SPDX-License-Identifier: Apache-2.0
"""Reading of a job from the store, once or continuously; and what is wrong if that fails.

The store has no such job, or it is not reachable: causes by HTTP/2 and OpenSSL are long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import TYPE_CHECKING

import click

from agent.job_config import AccessConfig, JobConfig
from agent.verdict.view import JobView, present_view, view_of
from console.help import near
from rdzv.errors import ConfigError, JobNotFound, StoreError, StoreRefused, StoreUnavailable
from rdzv.keys import ROOT, JobKeys, job_of
from rdzv.membership import snapshot_of
from rdzv.mirror import HEALTHY_S, Mirror, read_all
from rdzv.sentences import named
from rdzv.store import Store
from rdzv.store.etcd.client import open_store

if TYPE_CHECKING:
    from rdzv.job import JobClient

JOBS_MAX = 1000
"""The most reads that look for jobs: each finds one at most."""

HINT_TIMEOUT_S = 1.0
"""Time for a hint at another name: the error is right without it."""

NAMED_MAX = 5
"""The most jobs to name in an error."""

NO_ETCD = "what answers there is no etcd, but a web server or a proxy"

_OUTAGE_CAUSES = (
    ("connection refused", "connection refused: nothing listens there"),
    ("name or service not known", "the name is not known"),
    ("dns resolution failed", "the name is not known"),
    ("domain name not found", "the name is not known"),
    ("lookup error", "the name is not known, or no name server answers"),
    ("http2 header", NO_ETCD),
    ("http/2", NO_ETCD),
    ("unimplemented", NO_ETCD),
    ("no connection within", "no connection comes about: check the address and the firewall"),
    ("no route to host", "no route to it"),
    ("network is unreachable", "the network is unreachable"),
    ("certificate", "the certificates do not fit"),
    ("handshake", "TLS fails: http:// and https:// may be mixed up"),
    ("ssl", "TLS fails: http:// and https:// may be mixed up"),
    ("deadline", "it does not answer"),
)
"""Signs in a connection error, in lower case, with their causes; the first match counts."""

AT_ONCE = 8
"""Jobs that are read at the same time."""

REACH_TIMEOUT_S = 5.0

SILENCE_S = 120.0
"""Timeout of a wait for changes while the store is silent: longer than etcd takes to come back
after a restart."""


async def jobs_in(store: Store, *, namespace: str | None = None, timeout_s: float) -> list[JobKeys]:
    """Return the jobs of the store, or of a namespace, by namespace and name.

    Returns the first ones if there are more than ``JOBS_MAX``. Raises ``StoreError``.
    """
    found: list[JobKeys] = []
    prefix = JobKeys(namespace, "_").prefix.removesuffix("_/") if namespace else ROOT
    after = ""
    for _ in range(JOBS_MAX):
        page = await store.page(prefix, limit=1, after=after, timeout_s=timeout_s)
        if not page.kvs:
            break
        key = page.kvs[0].key
        if (parsed := job_of(key)) is None:
            after = key
            continue
        found.append(parsed[0])
        # All of its keys follow its prefix, which ends with "/"; "0" is the next character.
        after = f"{parsed[0].prefix[:-1]}0"
    return sorted(found, key=lambda keys: (keys.namespace, keys.job_name))


async def not_found(store: Store, wanted: JobKeys, *, or_else: str = "") -> JobNotFound:
    """Return the error for a job that the store does not have, with the name that was meant."""
    try:
        async with asyncio.timeout(HINT_TIMEOUT_S):
            known = await jobs_in(store, timeout_s=HINT_TIMEOUT_S)
    except (StoreError, TimeoutError):
        known = []  # the user may read one job alone, or the store is slow
    return JobNotFound(f"{missing_job(wanted)}: {meant_job(wanted, known)}{or_else}")


def missing_job(wanted: JobKeys) -> str:
    """Say that the store does not have a job."""
    return f"the store has no job {wanted.job_name} in namespace {wanted.namespace}"


def meant_job(wanted: JobKeys, known: Iterable[JobKeys]) -> str:
    """Return a hint at the job that was probably meant: pure."""
    known = tuple(known)
    elsewhere = [keys.namespace for keys in known if keys.job_name == wanted.job_name]
    if elsewhere:
        return f"there is one in namespace {elsewhere[0]}: add -n {elsewhere[0]}"
    here = [keys.job_name for keys in known if keys.namespace == wanted.namespace]
    if close := near(wanted.job_name, here):
        return f"did you mean {close}?"
    everywhere = {keys.job_name: keys for keys in known}
    if close := near(wanted.job_name, everywhere):
        return f"did you mean {close} in namespace {everywhere[close].namespace}?"
    if not known:
        return "see whether its pods have started, and have the sidecar"
    names = [f"{keys.namespace}/{keys.job_name}" for keys in known]
    more = len(names) - NAMED_MAX
    rest = f" and {more} more: muster list" if more > 0 else ""
    return f"it has {', '.join(names[:NAMED_MAX])}{rest}"


def outage_cause(trouble: str) -> str:
    """Return the short cause of a connection error; an unknown error is returned as it is."""
    lower = trouble.lower()
    causes = (sentence for sign, sentence in _OUTAGE_CAUSES if sign in lower)
    return next(causes, trouble or "it does not answer")


def endpoint_is_local(endpoint: str) -> bool:
    """Return whether an endpoint is local and without TLS: ``muster store`` could serve it."""
    return endpoint.startswith(("127.", "localhost:", "[::1]:"))


async def read_view(store: Store, keys: JobKeys, *, timeout_s: float) -> JobView:
    """Read the job once; raises ``StoreError``."""
    read = await read_all(store, keys.prefix, timeout_s=timeout_s)
    return view_of(keys, snapshot_of(keys, read), read.kvs)


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

        async def view(keys: JobKeys) -> JobView:
            async with turns:
                return await read_view(store, keys, timeout_s=REACH_TIMEOUT_S)

        return list(await asyncio.gather(*map(view, known)))
    except StoreUnavailable as error:
        raise unreachable(config.etcd_endpoints, str(error)) from error
    except StoreRefused as error:
        raise ConfigError(
            f"the store does not let this user list its jobs ({error}): name one, as in muster"
            " status JOB"
        ) from error
    finally:
        await store.close()


@asynccontextmanager
async def connected(config: JobConfig, *, known: bool = True) -> AsyncIterator[JobClient]:
    """Yield a client that follows the job in the store and may write to it.

    Raises ``StoreUnavailable`` if the first read takes longer than ``REACH_TIMEOUT_S``; in a later
    outage the client keeps its last view. Raises ``JobNotFound`` if the store has no key of the
    job, unless ``known`` is false.
    """
    from rdzv.job import JobClient  # only here: a single read has no use for it

    # The command reports an outage once, in a sentence for its user.
    for one in (Mirror, JobClient):
        logging.getLogger(one.__module__).setLevel(logging.ERROR)
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
        f"cannot reach the store at {where} within {REACH_TIMEOUT_S:g} s ({outage_cause(trouble)})"
        "\nworlds that train go on; no pod joins or leaves until it answers"
        f"\ncheck {named('--etcd-endpoints')}{here}; muster doctor {job} says more"
    )
