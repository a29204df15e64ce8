# SPDX-License-Identifier: Apache-2.0
"""Access that the controller gives, with a real etcd that goes by certificates."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from controller.access.decision import AccessPolicy
from controller.access.reconciler import AccessExecutor, AccessReconciler
from controller.access.secret import KEYS, RELEASE, ROTATE, JobName, JobsWithPods
from controller.access.store_keeper import StoreKeeper, StoreSecrets
from controller.certificates import make_clients_authority
from controller.cluster.api import ClusterApi
from controller.cluster.events import Events
from rdzv.errors import ClusterError, ClusterRefused, StoreError, StoreRefused
from rdzv.store import Put, Store
from rdzv.store.access import Access
from rdzv.store.etcd import admin
from rdzv.store.etcd.admin import Accounts
from tests.support.clocks.hand import HandHour
from tests.support.cluster_api import CALL_S, FakeApi, make_patient
from tests.support.sidecars.processes import until
from tests.support.store.certificates import write
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.secure import cannot_touch, opened
from tests.support.tasks import beside

pytestmark = pytest.mark.etcd

OWN = "/api/v1/namespaces/muster-system/secrets"
A, B = JobName("team-a", "train"), JobName("team-b", "train")
POLICY = AccessPolicy(keep=timedelta(hours=24), rotate=timedelta(days=30))
PATIENCE_S = 150.0


@dataclass
class Cluster:
    """An etcd that takes clients of this authority, and nobody else."""

    etcd: EtcdCluster
    clients: tuple[bytes, bytes]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("clients")
    clients = make_clients_authority(datetime.now(UTC))
    write(folder / "client-ca.crt", clients[0])
    arguments = ("--client-cert-auth", f"--trusted-ca-file={folder / 'client-ca.crt'}")
    with EtcdCluster(1, tls=True, arguments=arguments) as etcd:
        yield Cluster(etcd, clients)


@dataclass
class Replica:
    """The controller's part that gives access."""

    keeper: StoreKeeper
    executor: AccessExecutor
    accounts: Accounts
    jobs: JobsWithPods
    events: Events

    async def users_of(self, job: JobName) -> list[str]:
        """The job's users in the store."""
        return [user for user in await self.accounts.users() if job.owns(user)]


@asynccontextmanager
async def replica(
    fake: FakeApi, cluster: Cluster, folder: Path, time: HandHour, *, at_work: bool = True
) -> AsyncIterator[Replica]:
    names = StoreSecrets("muster-system", "muster-etcd-access", "muster-etcd")
    async with ClusterApi(fake.access) as api:
        keeper = StoreKeeper(api, names, tuple(cluster.etcd.endpoints), folder, time)
        await keeper.keep()
        assert keeper.entry is not None
        accounts = Accounts(keeper.entry.access)
        jobs = JobsWithPods(api)
        events = Events(api, monotonic)
        executor = AccessExecutor(api, accounts, keeper, POLICY, jobs.__contains__, time, events)
        reconciler = AccessReconciler(executor, jobs, time)
        async with beside(jobs.run(), *([reconciler.run()] if at_work else [])):
            await jobs.known.wait()
            yield Replica(keeper, executor, accounts, jobs, events)
        await accounts.close()


@pytest.fixture
def hour() -> HandHour:
    return HandHour()


@pytest.fixture
async def one(
    fake: FakeApi, cluster: Cluster, tmp_path: Path, hour: HandHour
) -> AsyncIterator[Replica]:
    """A replica that does what the test says."""
    async with replica(fake, cluster, tmp_path / "one", hour, at_work=False) as made:
        yield made


@pytest.fixture
async def fake(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FakeApi]:
    """The Secrets of the chart as somebody else has filled them, as far as they are."""
    make_patient(monkeypatch)
    monkeypatch.setattr(admin, "WRITE_TIMEOUT_S", CALL_S)
    fake = FakeApi(tmp_path)
    async with fake:
        authority, key = cluster.clients
        data = {"client-ca.crt": authority, "client-ca.key": key}
        await fake.put(
            f"{OWN}/muster-etcd", {"data": encoded({"ca.crt": cluster.etcd.authority.pem})}
        )
        await fake.put(f"{OWN}/muster-etcd-access", {"data": encoded(data)})
        yield fake
    of_pods = [how for path, how in fake.accepted if path == "/api/v1/pods"]
    assert {"PartialObjectMetadata" in how for how in of_pods} == {True}


def encoded(data: dict[str, bytes]) -> dict[str, str]:
    return {key: base64.b64encode(value).decode() for key, value in data.items()}


def path_of(job: JobName) -> str:
    return f"/api/v1/namespaces/{job.namespace}/secrets/{job.secret}"


def pod_of(job: JobName) -> dict[str, Any]:
    notes = {"muster.dev/etcd-secret": job.secret, "muster.dev/job": job.job}
    labels = {"muster.dev/job": job.job}
    return {"metadata": {"namespace": job.namespace, "labels": labels, "annotations": notes}}


def pod_path(job: JobName) -> str:
    return f"/api/v1/namespaces/{job.namespace}/pods/{job.job}"


@asynccontextmanager
async def inside(secret: dict[str, Any], cluster: Cluster, folder: Path) -> AsyncIterator[Store]:
    """The store, as a sidecar enters it by what a kubelet lays before it."""
    access = await asyncio.to_thread(_mounted, secret, cluster, folder)
    async with opened(access, patiently=True) as store:
        yield store


def _mounted(secret: dict[str, Any], cluster: Cluster, folder: Path) -> Access:
    folder.mkdir(exist_ok=True)
    for key in KEYS:
        write(folder / key, base64.b64decode(secret["data"][key]))
    ca, certificate, key = (str(folder / name) for name in KEYS)
    return cluster.etcd.access(cacert=ca, cert=certificate, key=key)


async def usable(store: Store, job: JobName) -> None:
    """Wait until the store knows the user of a Secret."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await store.txn([], [Put(job.keys.job, b"ours")])
                return
            except StoreError:
                await asyncio.sleep(0.05)


async def test_each_job_reads_and_writes_its_own_records_and_no_others(
    fake: FakeApi, cluster: Cluster, tmp_path: Path, hour: HandHour
) -> None:
    async with replica(fake, cluster, tmp_path / "one", hour):
        for job in (A, B):
            await fake.put(pod_path(job), pod_of(job))
        of_jobs = [await fake.until(path_of(job), lambda s: s.get("data")) for job in (A, B)]
        assert of_jobs[1]["type"] == "Opaque"
        async with (
            inside(of_jobs[0], cluster, tmp_path / "a") as of_a,
            inside(of_jobs[1], cluster, tmp_path / "b") as of_b,
        ):
            await usable(of_a, A)
            await usable(of_b, B)
            await cannot_touch(of_b, A.keys, B.keys)
            (held,) = (await of_a.range(A.keys.job)).kvs
            assert held.value == b"ours"
        # Nor does a user of the store manage users.
        accounts = Accounts(await asyncio.to_thread(_mounted, of_jobs[1], cluster, tmp_path / "b"))
        with pytest.raises(StoreRefused, match="permission denied"):
            await accounts.make_user(B.user("abc"), A.role)
        await accounts.close()
        # Without a certificate nobody gets in at all.
        async with opened(cluster.etcd.access()) as nobody:
            with pytest.raises(StoreError):
                await nobody.range(A.keys.job)


async def test_a_certificate_is_replaced_and_nobody_is_refused_meanwhile(
    fake: FakeApi, cluster: Cluster, tmp_path: Path, hour: HandHour
) -> None:
    job = JobName("team-c", "train")
    async with replica(fake, cluster, tmp_path / "one", hour) as one:
        await fake.put(pod_path(job), pod_of(job))
        first = await fake.until(path_of(job), lambda s: s.get("data"))
        async with inside(first, cluster, tmp_path / "first") as former:
            await usable(former, job)
            notes = first["metadata"]["annotations"]
            asked = {**first["metadata"], "annotations": {**notes, ROTATE: "now"}}
            await fake.put(path_of(job), {**first, "metadata": asked})
            await one.executor.bring_in_line(job)
            second = await fake.until(path_of(job), lambda s: s["data"] != first["data"])
            assert ROTATE not in second["metadata"]["annotations"]
            async with inside(second, cluster, tmp_path / "second") as new:
                await new.range(job.keys.job)
                await former.range(job.keys.job)
                hour.now += POLICY.overlap
                await one.executor.bring_in_line(job)
                await new.range(job.keys.job)
                with pytest.raises(StoreRefused):
                    await former.range(job.keys.job)
        assert len(await one.users_of(job)) == 1


CALLS = ("make_role", "make_user", "delete_user", "delete_role", "create", "replace", "delete")


async def test_two_replicas_make_one_access_whatever_is_cut_off(
    one: Replica,
    fake: FakeApi,
    cluster: Cluster,
    tmp_path: Path,
    hour: HandHour,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One is cut off after each call that it makes, in turn; the other goes on."""
    async with replica(fake, cluster, tmp_path / "other", hour, at_work=False) as other:

        async def cut_off_and_mended(job: JobName, name: str, *, after: bool) -> None:
            with monkeypatch.context() as patched:
                cut_off(patched, name, after=after)
                with suppress(CutOffError):
                    await one.executor.bring_in_line(job)
            await asyncio.gather(*(each.executor.bring_in_line(job) for each in (one, other)))

        for name, after in product(CALLS, (False, True)):
            job = JobName("team-d", f"train-{name.replace('_', '-')}-{after}".lower())
            await fake.put(pod_path(job), pod_of(job))
            await until_known(job, one, other)
            await cut_off_and_mended(job, name, after=after)
            await agree(one, fake, job)
            await fake.remove(pod_path(job))
            await until_known(job, one, other, known=False)
            await one.executor.bring_in_line(job)
            hour.now += POLICY.keep
            await cut_off_and_mended(job, name, after=after)
            assert path_of(job) not in fake.objects
            assert not await one.users_of(job)
            assert job not in await other.executor.jobs()


async def test_a_store_restored_from_before_a_job_knows_it_again_and_asks_who_is_there(
    one: Replica, fake: FakeApi, cluster: Cluster, tmp_path: Path
) -> None:
    job = JobName("team-g", "train")
    before = await given(one, fake, job)
    (user,) = await one.users_of(job)
    await one.accounts.delete_user(user)
    await one.accounts.delete_role(job.role)
    root = [f"--{flag}={tmp_path / 'one' / f'tls.{end}'}" for flag, end in _ROOTS]
    await asyncio.to_thread(cluster.etcd.etcdctl, *root, "auth", "disable")
    await one.keeper.keep()
    await one.executor.bring_in_line(job)
    # The Secret and its rights are unchanged: no sidecar needs an update.
    assert fake.objects[path_of(job)] == before
    await agree(one, fake, job)
    async with inside(before, cluster, tmp_path / "mounted") as store:
        await usable(store, job)
        with pytest.raises(StoreRefused, match="permission denied"):
            await store.range(A.keys.job)


_ROOTS = (("cert", "crt"), ("key", "key"))


class CutOffError(ClusterError):
    """Here the process ends."""


def cut_off(patched: pytest.MonkeyPatch, name: str, *, after: bool) -> None:
    holder: Any = Accounts if hasattr(Accounts, name) else ClusterApi
    real = getattr(holder, name)

    async def call(self: Any, *arguments: Any) -> None:
        if after:
            await real(self, *arguments)
        raise CutOffError(name)

    patched.setattr(holder, name, call)


async def until_known(job: JobName, *replicas: Replica, known: bool = True) -> None:
    """Wait until each of these knows of a pod of the job, or of none any more."""
    await until(lambda: all((job in one.jobs) is known for one in replicas))


async def given(one: Replica, fake: FakeApi, job: JobName) -> dict[str, Any]:
    """Let a pod of the job come, and be given access; return the Secret."""
    await fake.put(pod_path(job), pod_of(job))
    await until_known(job, one)
    await one.executor.bring_in_line(job)
    return fake.objects[path_of(job)]


async def agree(one: Replica, fake: FakeApi, job: JobName) -> None:
    user = fake.objects[path_of(job)]["metadata"]["annotations"]["muster.dev/store-user"]
    assert await one.users_of(job) == [user]
    assert await one.accounts.roles_of(user) == {job.role}
    assert await one.accounts.may_use(job.role, job.keys.prefix)


async def test_a_secret_of_somebody_else_is_left_alone_and_a_forged_one_gets_nobodys_certificate(
    one: Replica, fake: FakeApi, cluster: Cluster, tmp_path: Path
) -> None:
    victim, other = JobName("team-e", "train"), JobName("team-f", "train")
    held = (await given(one, fake, victim))["metadata"]
    await fake.put(pod_path(other), pod_of(other))
    await until_known(other, one)
    await fake.put(path_of(other), {"data": {"mine": ""}})
    with pytest.raises(ClusterRefused, match="rename it"):
        await one.executor.bring_in_line(other)
    assert fake.objects[path_of(other)]["data"] == {"mine": ""}
    # Who writes Secrets of the other namespace has the victim's user in each place.
    notes = dict.fromkeys(
        (f"muster.dev/store-user{word}" for word in ("", "-next", "-former")),
        held["annotations"]["muster.dev/store-user"],
    )
    forged = {"labels": held["labels"], "annotations": {**held["annotations"], **notes}}
    await fake.put(path_of(other), {"metadata": forged, "data": {}})
    await one.executor.bring_in_line(other)
    made = fake.objects[path_of(other)]
    assert other.owns(made["metadata"]["annotations"]["muster.dev/store-user"])
    async with inside(made, cluster, tmp_path / "forged") as store:
        await usable(store, other)
        with pytest.raises(StoreRefused, match="permission denied"):
            await store.range(victim.keys.job)


async def test_a_secret_that_has_lost_its_label_is_ours_while_its_certificate_is_and_then_nobodys(
    one: Replica, fake: FakeApi
) -> None:
    job = JobName("team-h", "train")
    made = await given(one, fake, job)
    without = {**made["metadata"], "labels": {}}
    await fake.put(path_of(job), {**made, "metadata": without})
    await one.executor.bring_in_line(job)
    mended = fake.objects[path_of(job)]
    assert mended["metadata"]["labels"] == made["metadata"]["labels"]
    assert mended["data"] == made["data"]
    await agree(one, fake, job)
    await fake.put(path_of(job), {"metadata": without, "data": {"mine": ""}})
    with pytest.raises(ClusterRefused, match="is not the controller's"):
        await one.executor.bring_in_line(job)
    assert not await one.users_of(job)


async def test_a_secret_of_another_release_is_left_alone_and_so_are_its_users(
    one: Replica, fake: FakeApi
) -> None:
    job = JobName("team-r", "train")
    made = await given(one, fake, job)
    labels = {**made["metadata"]["labels"], RELEASE: "other.muster-controller"}
    await fake.put(path_of(job), {**made, "metadata": {**made["metadata"], "labels": labels}})
    before = fake.objects[path_of(job)]
    users = await one.users_of(job)
    for _ in range(2):
        with pytest.raises(ClusterRefused, match=r"belongs to release other\.muster-controller"):
            await one.executor.bring_in_line(job)
        await one.events.write()
    (told,) = await fake.until_any(f"/api/v1/namespaces/{job.namespace}/events/")
    assert (told["involvedObject"]["name"], told["reason"]) == (job.secret, "AccessNotGiven")
    assert fake.objects[path_of(job)] == before
    assert await one.users_of(job) == users


async def test_an_immutable_secret_is_told_of_at_itself_and_replaced_once_it_is_deleted(
    one: Replica, fake: FakeApi
) -> None:
    job = JobName("team-i", "train")
    made = await given(one, fake, job)
    notes = {**made["metadata"]["annotations"], ROTATE: "now"}
    asked = {**made["metadata"], "annotations": notes}
    await fake.put(path_of(job), {**made, "metadata": asked, "immutable": True})
    for _ in range(2):
        with pytest.raises(ClusterRefused, match="delete it, and the controller makes another"):
            await one.executor.bring_in_line(job)
        await one.events.write()
    (told,) = await fake.until_any(f"/api/v1/namespaces/{job.namespace}/events/")
    assert (told["involvedObject"]["name"], told["reason"]) == (job.secret, "AccessNotGiven")
    assert told["count"] == 1
    await fake.remove(path_of(job))
    await one.executor.bring_in_line(job)
    assert "immutable" not in fake.objects[path_of(job)]
    await agree(one, fake, job)
