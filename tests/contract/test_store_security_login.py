# SPDX-License-Identifier: Apache-2.0
"""A user with a password: tokens that end, passwords that change, and what is refused."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from rdzv.errors import StoreRefused
from rdzv.keys import JobKeys
from rdzv.store import Compare, Put
from rdzv.store.access import Access
from rdzv.store.etcd.admin import JobRole, auth_enabled
from rdzv.store.memory.server import EmbeddedServer
from tests.support.store.certificates import write
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.patient_store import CALL_S, PatientEtcdStore
from tests.support.store.secure import (
    ROOT_PASSWORD,
    TOKEN_TTL_S,
    job_access,
    opened,
    secure_cluster,
    user_access,
)

__all__ = ["secure_cluster"]

pytestmark = pytest.mark.etcd

LEASE = 4711
OUTLIVED_S = TOKEN_TTL_S + 2.5
"""After which a token that nobody used is gone: etcd looks once a second."""


@pytest.fixture
async def keys(request: pytest.FixtureRequest) -> JobKeys:
    """A job of the test's own."""
    return JobKeys("login", request.node.name.replace("_", "-"))


@pytest.fixture
async def access(secure_cluster: EtcdCluster, keys: JobKeys) -> Access:
    return await job_access(secure_cluster, keys)


def etcdctl(cluster: EtcdCluster, *words: str, stdin: str = "") -> str:
    return cluster.etcdctl(*words, user=f"root:{ROOT_PASSWORD}", stdin=stdin)


async def test_a_token_that_ended_is_renewed_for_reads_writes_leases_and_watches(
    access: Access, keys: JobKeys
) -> None:
    """Each kind of call in turn is the first one with a token that is gone."""
    async with (
        opened(access, patiently=True) as reader,
        opened(access, patiently=True) as writer,
        opened(access, patiently=True) as renewer,
        opened(access, patiently=True) as watcher,
    ):
        done = await writer.txn([], [Put(keys.job, b"1")])
        await renewer.lease_grant(501, 60)
        for store in (reader, watcher):
            await store.range(keys.job)
        async with aclosing(watcher.watch(keys.prefix, done.revision)) as batches:
            assert [event.kv.value for event in (await anext(batches)).events] == [b"1"]
            await asyncio.sleep(OUTLIVED_S)
            written = await writer.txn(
                [Compare(keys.job, "version", "=", 1)], [Put(keys.job, b"2")]
            )
            assert written.succeeded
            assert (await reader.range(keys.job)).kvs[0].version == 2
            assert await renewer.lease_keep_alive(501) > 0
            # A stream outlives its token.
            async with asyncio.timeout(CALL_S):
                while not (events := (await anext(batches)).events):
                    pass
            assert [event.kv.value for event in events] == [b"2"]
        async with aclosing(watcher.watch(keys.prefix, written.revision)) as batches:
            assert [event.kv.value for event in (await anext(batches)).events] == [b"2"]


class _SlowToWatch(PatientEtcdStore):
    """Takes so long between its two steps to a watch that the token ends meanwhile."""

    opened = 0

    async def _same_life(self, *arguments: Any) -> Any:
        life = await super()._same_life(*arguments)
        self.opened += 1
        if self.opened == 1:
            await asyncio.sleep(OUTLIVED_S)
        return life


async def test_a_stream_that_is_refused_for_its_token_is_opened_with_a_new_one(
    access: Access, keys: JobKeys
) -> None:
    store = _SlowToWatch(access)
    try:
        done = await store.txn([], [Put(keys.job, b"1")])
        async with aclosing(store.watch(keys.prefix, done.revision)) as batches:
            assert [event.kv.value for event in (await anext(batches)).events] == [b"1"]
        # Once for each token that ended meanwhile.
        assert store.opened >= 2
    finally:
        await store.close()


@pytest.fixture
def jwt_cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    """One member whose tokens are JSON web tokens."""
    key, path = rsa.generate_private_key(public_exponent=65537, key_size=2048), tmp_path / "jwt.pem"
    coding = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    write(path, key.private_bytes(*coding, serialization.NoEncryption()))
    token = f"--auth-token=jwt,priv-key={path},sign-method=RS256,ttl={TOKEN_TTL_S}s"
    with EtcdCluster(1, tls=True, arguments=[token, "--bcrypt-cost=4"]) as cluster:
        cluster.enable_auth(ROOT_PASSWORD)
        yield cluster


async def test_json_web_tokens_are_renewed_too(jwt_cluster: EtcdCluster, keys: JobKeys) -> None:
    """They hold the revision of all rights, so any change of rights ends them as well."""
    async with opened(await job_access(jwt_cluster, keys), patiently=True) as store:
        done = await store.txn([], [Put(keys.job, b"1")])
        await asyncio.sleep(OUTLIVED_S)
        async with aclosing(store.watch(keys.prefix, done.revision)) as batches:
            assert (await anext(batches)).events
        await job_access(jwt_cluster, JobKeys("login", "another"))
        written = await store.txn([Compare(keys.job, "version", "=", 1)], [Put(keys.job, b"2")])
        assert written.succeeded
        assert (await store.range(keys.job)).kvs[0].version == 2


async def test_many_calls_at_once_with_an_ended_token_all_pass_and_log_in_together(
    access: Access, keys: JobKeys, secure_cluster: EtcdCluster
) -> None:
    async with opened(access, patiently=True) as store:
        await store.range(keys.job)
        await asyncio.sleep(OUTLIVED_S)
        before = await asyncio.to_thread(logins, secure_cluster)
        await asyncio.gather(*(store.range(keys.job) for _ in range(50)))
        # One; where this takes longer than a token lives, one for each that ended.
        assert await asyncio.to_thread(logins, secure_cluster) - before < 10


def logins(cluster: EtcdCluster) -> int:
    """How many times a password was asked for, as the member counts its calls."""
    with urllib.request.urlopen(f"{cluster.metrics_urls[0]}/metrics", timeout=CALL_S) as answer:
        lines = answer.read().decode().splitlines()
    found = [
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("grpc_server_started_total") and '"Authenticate"' in line
    ]
    return int(sum(found))


async def test_a_changed_password_is_read_from_its_file(
    access: Access, keys: JobKeys, secure_cluster: EtcdCluster
) -> None:
    user = JobRole(keys).user_name
    async with opened(access, patiently=True) as store:
        await store.range(keys.job)
        await asyncio.to_thread(
            etcdctl, secure_cluster, "user", "passwd", user, "--interactive=false", stdin="fresh"
        )
        with pytest.raises(StoreRefused, match="--etcd-password-file"):
            await store.range(keys.job)
        await asyncio.to_thread(user_access, secure_cluster, user, "fresh")
        await store.range(keys.job)


async def test_rights_that_are_taken_back_end_calls_and_given_again_serve_them(
    access: Access, keys: JobKeys, secure_cluster: EtcdCluster
) -> None:
    role = JobRole(keys)
    async with opened(access, patiently=True) as store:
        done = await store.txn([], [Put(keys.job, b"1")])
        words = ("revoke-role", role.user_name, role.name)
        await asyncio.to_thread(etcdctl, secure_cluster, "user", *words)
        with pytest.raises(StoreRefused, match="muster store-role"):
            await store.range(keys.job)
        with pytest.raises(StoreRefused, match="muster store-role"):
            await anext(store.watch(keys.prefix, 1))
        words = ("grant-role", role.user_name, role.name)
        await asyncio.to_thread(etcdctl, secure_cluster, "user", *words)
        assert (await store.range(keys.job)).kvs[0].mod_revision == done.revision


async def test_who_may_only_read_renews_no_lease_that_its_records_hang_on(
    access: Access, keys: JobKeys, secure_cluster: EtcdCluster
) -> None:
    """So no sidecar that is refused alone stays a member, and holds up those that can act."""
    role = JobRole(keys)
    async with opened(access, patiently=True) as store:
        await store.lease_grant(LEASE, 60)
        await store.txn([], [Put(keys.job, b"1", LEASE)])
        assert await store.lease_keep_alive(LEASE) > 0
        for words in (
            ("revoke-permission", role.name, keys.prefix, "--prefix"),
            ("grant-permission", role.name, "read", keys.prefix, "--prefix"),
        ):
            await asyncio.to_thread(etcdctl, secure_cluster, "role", *words)
        assert (await store.range(keys.job)).kvs
        with pytest.raises(StoreRefused, match="permission denied"):
            await store.lease_keep_alive(LEASE)


async def test_a_wrong_user_and_a_missing_file_are_told_without_the_secret(
    access: Access, keys: JobKeys, secure_cluster: EtcdCluster, tmp_path: Path
) -> None:
    path = tmp_path / "hunter2.password"
    await asyncio.to_thread(write, path, b"hunter2-is-secret\n")
    wrong = secure_cluster.access(user="nobody", password_file=str(path))
    async with opened(wrong, patiently=True) as store:
        with pytest.raises(StoreRefused, match="does not let user nobody in") as caught:
            await store.range(keys.job)
        assert "hunter2" not in f"{caught.value!r} {wrong!r}"
        await asyncio.to_thread(path.unlink)
        with pytest.raises(StoreRefused, match="cannot be read"):
            await store.range(keys.job)


async def test_without_a_user_the_store_says_what_to_give(
    secure_cluster: EtcdCluster, keys: JobKeys
) -> None:
    nobody = secure_cluster.access()
    assert await auth_enabled(nobody, timeout_s=CALL_S)
    async with opened(nobody, patiently=True) as store:
        for call in (store.range(keys.job), store.status(), store.lease_grant(9, 60)):
            with pytest.raises(StoreRefused, match="--etcd-user"):
                await call
        with pytest.raises(StoreRefused, match="--etcd-user"):
            await anext(store.watch(keys.prefix, 1))


async def test_a_user_of_a_store_that_asks_nobody_who_he_is_is_let_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "password"
    await asyncio.to_thread(write, path, b"secret")
    with_auth_off = await asyncio.to_thread(EtcdCluster, 1)
    await asyncio.to_thread(with_auth_off.__enter__)
    try:
        access = with_auth_off.access(user="somebody", password_file=str(path))
        assert not await auth_enabled(access, timeout_s=CALL_S)
        async with opened(access), opened(access, patiently=True) as store:
            assert (await store.txn([], [Put("/a", b"1")])).succeeded
            await asyncio.to_thread(with_auth_off.enable_auth)
            with pytest.raises(StoreRefused, match="does not let user somebody in"):
                await store.range("/a")
    finally:
        await asyncio.to_thread(with_auth_off.close)
    assert "in plain text" in caplog.text


async def test_the_embedded_store_asks_nobody_who_he_is() -> None:
    async with EmbeddedServer() as server:
        assert not await auth_enabled(Access((server.endpoint,)), timeout_s=CALL_S)
