# SPDX-License-Identifier: Apache-2.0
"""The examination of a store for ``muster doctor``: each endpoint by itself, one job's rights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from random import Random
from time import monotonic, time
from typing import TypeVar

from agent.config.job import JobConfig
from agent.verdict.view import JobView, view_of
from console.doctor.diagnosis import READ_FAULT_S
from console.doctor.report import EndpointReport, EtcdMember, Report, RightsReport
from console.job.known import jobs_in
from rdzv.errors import StoreError, StoreRefused
from rdzv.job import read_all
from rdzv.keys import JobKeys
from rdzv.membership import snapshot_of
from rdzv.store import Compare, Delete, Put, Store
from rdzv.store.access import Access
from rdzv.store.etcd.admin import auth_enabled, cluster_members, history_compacted
from rdzv.store.etcd.client import open_store

T = TypeVar("T")

CALL_TIMEOUT_S = 3.0
READS = 50
READS_TIMEOUT_S = 3.0
PROBE_LEASE_S = 10
"""TTL of the probe's lease: it removes the probe's key if this process dies before it does."""


async def examine(config: JobConfig, random: Random) -> Report:
    """Measure everything; endpoints that do not answer cost ``CALL_TIMEOUT_S`` in all."""
    access, keys = config.access, JobKeys(config.namespace, config.job)
    endpoints = await asyncio.gather(
        *(endpoint_report(replace(access, endpoints=(one,)), keys) for one in access.endpoints)
    )
    reached = tuple(one.endpoint for one in endpoints if one.reached)
    report = Report(
        endpoints=tuple(endpoints),
        rights=RightsReport(),
        encrypted=access.tls,
        local=all(_is_loopback(target) for target in access.targets),
    )
    if not reached:
        return report
    # The report has the endpoints that do not answer: they must not slow down the other checks.
    access = replace(access, endpoints=reached)
    store = open_store(access)
    try:
        rights = await _rights(store, keys.probe(f"{random.getrandbits(48):012x}"), random)
        view = await _unless_refused(lambda: _view(store, keys))
        others = None
        if view is not None and view.job is None:
            others = await _unless_refused(lambda: jobs_in(store, timeout_s=CALL_TIMEOUT_S))
        return replace(
            report,
            rights=rights,
            job=view,
            others=tuple(others or ()),
            members=await _unless_refused(lambda: _members(access)),
            authenticated=await _unless_refused(
                lambda: auth_enabled(access, timeout_s=CALL_TIMEOUT_S)
            ),
            compacted=await _unless_refused(
                lambda: history_compacted(access, keys, timeout_s=CALL_TIMEOUT_S)
            ),
            now_unix_s=time(),
        )
    finally:
        await store.close()


async def endpoint_report(access: Access, keys: JobKeys) -> EndpointReport:
    """Read one endpoint's status, and time up to ``READS`` reads within ``READS_TIMEOUT_S``."""
    (endpoint,) = access.endpoints
    store = open_store(access)
    report = EndpointReport(endpoint)
    reads_s: list[float] = []
    try:
        report = replace(report, status=await store.status(timeout_s=CALL_TIMEOUT_S))
        began_s = monotonic()
        async with asyncio.timeout(READS_TIMEOUT_S):
            while len(reads_s) < READS:
                began_s = monotonic()
                await store.range(keys.job, timeout_s=CALL_TIMEOUT_S)
                reads_s.append(monotonic() - began_s)
    except StoreRefused as error:
        # Whether this user is known and may read is checked with the rights.
        refused = report.status is None
        report = replace(report, error=str(error) if refused else "", refused=refused)
    except StoreError as error:
        report = replace(report, error=str(error))
        if reads_s:
            reads_s.append(monotonic() - began_s)
    except TimeoutError:
        waited_s = monotonic() - began_s
        if not reads_s:
            report = replace(report, error=f"no answer within {READS_TIMEOUT_S:g} s")
        elif waited_s >= READ_FAULT_S:
            report = replace(report, error=f"no answer in {waited_s:.1f} s")
            reads_s.append(waited_s)
    finally:
        await store.close()
    return replace(report, reads_s=tuple(reads_s))


async def _rights(store: Store, key: str, random: Random) -> RightsReport:
    """Do with a key of our own what a sidecar does with its job's keys, then delete it."""
    lease_id = random.getrandbits(62) + 1
    report = RightsReport()
    step = "read"
    try:
        read = await store.range(key)
        report, step = replace(report, done=(*report.done, step)), "grant a lease"
        await store.lease_grant(lease_id, PROBE_LEASE_S)
        report, step = replace(report, done=(*report.done, step)), "write"
        began_s = monotonic()
        written = await store.txn([Compare(key, "create", "=", 0)], [Put(key, b"doctor", lease_id)])
        report = replace(report, done=(*report.done, step), write_s=monotonic() - began_s)
        step = "watch"
        await _see(store, key, read.revision + 1, written.revision)
        report = replace(report, done=(*report.done, step), watch_s=monotonic() - began_s)
        step = "renew a lease"
        await store.lease_keep_alive(lease_id)
        report, step = replace(report, done=(*report.done, step)), "delete"
        await store.txn([Compare(key, "mod", "=", written.revision)], [Delete(key)])
        return replace(report, done=(*report.done, step))
    except (StoreError, TimeoutError) as error:
        return replace(report, failed=step, error=str(error) or "nothing came in time")
    finally:
        if "grant a lease" in report.done:
            await _unless_refused(lambda: store.lease_revoke(lease_id))


async def _see(store: Store, key: str, since: int, revision: int) -> None:
    async with asyncio.timeout(CALL_TIMEOUT_S), aclosing(store.watch(key, since)) as batches:
        async for batch in batches:
            if batch.revision >= revision:
                return


async def _members(access: Access) -> tuple[EtcdMember, ...]:
    members = await cluster_members(access, timeout_s=CALL_TIMEOUT_S)
    return tuple(EtcdMember(member_id, name) for member_id, name in members)


async def _view(store: Store, keys: JobKeys) -> JobView:
    read = await read_all(store, keys.prefix, timeout_s=CALL_TIMEOUT_S)
    return view_of(keys, snapshot_of(keys, read), read.kvs)


async def _unless_refused(ask: Callable[[], Awaitable[T]]) -> T | None:
    """Await an answer that not every user or server gives; None if it fails or times out."""
    try:
        return await ask()
    except (StoreError, TimeoutError):
        return None


def _is_loopback(target: str) -> bool:
    host = target.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")
