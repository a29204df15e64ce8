# SPDX-License-Identifier: Apache-2.0
"""One real etcd that speaks TLS and asks who its clients are, and the users of jobs in it."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager

import pytest

from rdzv.errors import StoreRefused
from rdzv.keys import ROOT, JobKeys
from rdzv.store import Compare, Delete, Put, Range, Store
from rdzv.store.access import Access
from rdzv.store.etcd.admin import JobRole
from rdzv.store.etcd.client import open_store
from tests.support.store.certificates import write
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.patient_store import PatientEtcdStore, PatientRights
from tests.support.waiting import DEADLINE_S

ROOT_PASSWORD = "root-password"
TOKEN_TTL_S = 5
SHELL_S = 90.0
"""For a handful of commands, each a process that a busy machine takes seconds to start."""

ELECTION = ("--heartbeat-interval=500", "--election-timeout=5000")
"""For members that elect once, however long a machine stands still; no lease lives under 8 s."""

ARGUMENTS = (f"--auth-token-ttl={TOKEN_TTL_S}", "--bcrypt-cost=4")


@pytest.fixture(scope="module")
def secure_cluster() -> Iterator[EtcdCluster]:
    """One member: users come by password, and tokens soon end."""
    with EtcdCluster(1, tls=True, arguments=ARGUMENTS) as cluster:
        cluster.enable_auth(ROOT_PASSWORD)
        yield cluster


@pytest.fixture(scope="session")
def secure_etcd_cluster() -> Iterator[EtcdCluster]:
    """Three members for the whole test session, as ``secure_cluster``."""
    with EtcdCluster(tls=True, arguments=(*ARGUMENTS, *ELECTION)) as cluster:
        cluster.enable_auth(ROOT_PASSWORD)
        yield cluster


@pytest.fixture(scope="module")
def named_cluster() -> Iterator[EtcdCluster]:
    """One member: clients need a certificate, whose name is that of a user."""
    with EtcdCluster(1, tls=True, client_certificates=True, arguments=ARGUMENTS) as cluster:
        cluster.enable_auth(ROOT_PASSWORD)
        yield cluster


def user_access(cluster: EtcdCluster, user: str, password: str) -> Access:
    """Access with a password, whose file is written here."""
    path = cluster.folder / f"{user.replace('/', '.')}.password"
    write(path, f"{password}\n".encode())
    return cluster.access(user=user, password_file=str(path))


def root_access(cluster: EtcdCluster) -> Access:
    return user_access(cluster, "root", ROOT_PASSWORD)


async def job_access(cluster: EtcdCluster, keys: JobKeys) -> Access:
    """Make the job's user and role, as ``muster store-role --apply`` does."""
    role = JobRole(keys)
    rights = PatientRights(await asyncio.to_thread(root_access, cluster))
    password = secrets.token_hex(16)
    await rights.make(role, password)
    await rights.close()
    return await asyncio.to_thread(user_access, cluster, role.user_name, password)


@asynccontextmanager
async def opened(access: Access, *, patiently: bool = False) -> AsyncIterator[Store]:
    """A client; one that is ``patient`` makes no attempt a second time."""
    store = PatientEtcdStore(access) if patiently else open_store(access)
    try:
        yield store
    finally:
        await store.close()


async def cannot_touch(store: Store, keys: JobKeys, own: JobKeys) -> None:
    """Try every way to read or write another job, or what lies above both; all are refused."""
    touches: list[Awaitable[object]] = [
        store.range(keys.job),
        store.txn([], [Put(keys.job, b"mine")]),
        store.txn([Compare(own.job, "version", ">", -1)], [], [Put(keys.job, b"mine")]),
        store.txn([], [Delete(keys.job)]),
        store.txn([Compare(keys.job, "version", ">", 0)], [Range(own.job)]),
        store.txn([Compare(keys.prefix, "version", ">", 0, prefix=True)], []),
        store.txn([], [Range(keys.prefix, prefix=True)]),
    ]
    for prefix in (keys.prefix, own.prefix[:-1], f"{ROOT}{own.namespace}/", ROOT, "/", "a"):
        touches += [
            store.range(prefix, prefix=True),
            store.txn([], [Delete(prefix, prefix=True)]),
            anext(store.watch(prefix, 1)),
        ]
    for touch in touches:
        with pytest.raises(StoreRefused, match="permission denied"):
            await asyncio.wait_for(touch, DEADLINE_S)


def shell(cluster: EtcdCluster, script: str) -> str:
    """Run shell lines with ``etcdctl`` at hand, as root of the cluster."""
    environment = {
        **os.environ,
        "PATH": f"{cluster.etcdctl_binary.parent}{os.pathsep}{os.environ['PATH']}",
        **cluster.etcdctl_environment(f"root:{ROOT_PASSWORD}"),
    }
    done = subprocess.run(
        ["sh", "-euc", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SHELL_S,
        check=True,
    )
    return done.stdout
