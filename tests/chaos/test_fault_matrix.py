# SPDX-License-Identifier: Apache-2.0
"""The fault matrix on three real members of etcd: nothing lost, doubled or out of order.

One fault of each family every day, all of them in the full proof; only that one holds the bars in
seconds, which a machine that is busy elsewhere misses. Every day they are held to going on in the
time that counts. The driver ``etcd3`` goes through tokens and certificates here, and through the
other faults in which drivers can differ in ``test_store_faults``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed", reason="the job is torch's")

from rdzv.errors import StoreError
from rdzv.store.access import Access
from tests.support.faults.agents import agents
from tests.support.faults.job import TrainingJob, training_job
from tests.support.faults.report import DOCUMENT, draw_into, keep
from tests.support.faults.rig import RUN_ID, Effect, FaultRig, fault_rig
from tests.support.faults.rows import (
    ENDPOINT_S,
    EVERYDAY,
    EVERYDAY_LEASE_S,
    EVERYDAY_SECURED_LEASE_S,
    LEASES_S,
    LONG,
    QUOTA_BYTES,
    SECURED,
    SECURED_LEASE_S,
    SHORT_LEASE_S,
    TOKEN_TTL_S,
    TWICE,
    Row,
)
from tests.support.histories.pods import NODES
from tests.support.histories.recorded import porcupine
from tests.support.store.etcd_cluster import EtcdCluster

__all__ = ["porcupine"]

pytestmark = [pytest.mark.etcd, pytest.mark.torch, pytest.mark.timeout(900)]

DRIVER = "etcd"


@pytest.fixture(scope="module", autouse=True)
def _table() -> Iterator[None]:
    """Draw the table of what was kept, if anything was to be."""
    yield
    draw_into(DOCUMENT)


@contextmanager
def small_cluster(**settings: object) -> Iterator[EtcdCluster]:
    arguments = [
        f"--quota-backend-bytes={QUOTA_BYTES}",
        f"--auth-token-ttl={TOKEN_TTL_S}",
        # Ten clients log in at once, again and again, on the cores that the job trains on.
        "--bcrypt-cost=4",
    ]
    with EtcdCluster(arguments=arguments, **settings) as cluster:  # type: ignore[arg-type]
        yield cluster


@pytest.fixture
def plain() -> Iterator[EtcdCluster]:
    with small_cluster() as cluster:
        yield cluster


@pytest.fixture
def secured() -> Iterator[EtcdCluster]:
    with small_cluster(tls=True) as cluster:
        cluster.enable_auth("root-password")
        yield cluster


def check(row: Row, effect: Effect, rig: FaultRig, *, in_seconds: bool) -> None:
    """Hold what was seen against the row's bars; a failure tells the timeline."""
    story = rig.story(f"{row.name}: {effect}")
    assert (effect.lost, effect.doubled, effect.out_of_order) == (0, 0, 0), story
    assert effect.wrong == (), story
    if in_seconds:
        most_s = effect.store_gap_s + effect.cut_s + row.extra_s
        assert effect.watch_gap_s < most_s, story
        assert effect.write_outage_s < most_s, story
    if row.keeps_leases is not None:
        assert (effect.registered_again == 0) == row.keeps_leases, story
    if row.new_worlds is not None:
        assert effect.worlds == row.new_worlds, story


async def endure(
    rig: FaultRig, rows: tuple[Row, ...], porcupine: Path, *, in_seconds: bool = False
) -> None:
    """Go through some faults with a stand-in for the job."""
    ports = [one.port for one in rig.pods]
    async with agents(ports, RUN_ID, NODES) as rig.agents:
        for row in rows:
            rig.tell(f"-- {row.name}")
            effect = await rig.endure(row.fault, porcupine, back_s=row.back_s)
            check(row, effect, rig, in_seconds=in_seconds)


@pytest.mark.parametrize("_form", ["daily", pytest.param("in-seconds", marks=pytest.mark.long)])
async def test_one_fault_of_each_family(
    plain: EtcdCluster, _form: str, porcupine: Path, in_seconds: bool
) -> None:
    lease_ttl_s = SHORT_LEASE_S if in_seconds else EVERYDAY_LEASE_S
    async with fault_rig(plain, DRIVER, lease_ttl_s=lease_ttl_s) as rig:
        await endure(rig, EVERYDAY, porcupine, in_seconds=in_seconds)


async def with_password(secured: EtcdCluster, folder: Path) -> Access:
    """How to reach a cluster that asks for a user."""
    password = folder / "password"
    await asyncio.to_thread(password.write_text, "root-password")
    return secured.access(user="root", password_file=str(password))


@pytest.mark.parametrize("driver", [DRIVER, pytest.param("etcd3", marks=pytest.mark.long)])
async def test_tokens_expire_and_certificates_are_rotated(
    secured: EtcdCluster, driver: str, porcupine: Path, tmp_path: Path
) -> None:
    access = await with_password(secured, tmp_path)
    lease_ttl_s = EVERYDAY_SECURED_LEASE_S
    async with fault_rig(secured, driver, lease_ttl_s=lease_ttl_s, access=access) as rig:
        await endure(rig, SECURED, porcupine)


async def test_a_member_is_started_twice(plain: EtcdCluster, porcupine: Path) -> None:
    async with fault_rig(plain, DRIVER, lease_ttl_s=EVERYDAY_LEASE_S) as rig:
        await endure(rig, (TWICE,), porcupine)


async def endure_training(
    rig: FaultRig, training: TrainingJob, row: Row, porcupine: Path, number: int
) -> None:
    """Go through one fault with the real job."""
    rig.tell(f"-- {row.name}")
    training.job.tell(f"-- {row.name}")
    await training.together()
    effect = await rig.endure(row.fault, porcupine, back_s=row.back_s)
    befell = await training.effect()
    await asyncio.to_thread(keep, number, row.name, DRIVER, effect, str(befell))
    check(row, effect, rig, in_seconds=True)
    assert befell.ended == 0, training.job.timeline()
    if row.new_worlds is not None:
        assert befell.new_worlds == row.new_worlds, training.job.timeline()


NUMBERS = {row.name: number for number, row in enumerate(chain(*LONG.values()))} | {
    row.name: number for number, row in enumerate(SECURED, 40)
}


@pytest.mark.long
@pytest.mark.parametrize("group", LONG)
async def test_every_fault_under_a_torchrun_job(
    plain: EtcdCluster, group: str, porcupine: Path, tmp_path: Path
) -> None:
    async with (
        fault_rig(plain, DRIVER, lease_ttl_s=LEASES_S[group]) as rig,
        training_job(tmp_path, plain.access(), DRIVER) as training,
    ):
        await endure_all(rig, training, LONG[group], porcupine)


async def endure_all(
    rig: FaultRig, training: TrainingJob, rows: tuple[Row, ...], porcupine: Path
) -> None:
    """Go through some faults with the real job, all of them whatever one of them shows."""
    rig.job = training.job
    wrong = []
    for row in rows:
        try:
            await endure_training(rig, training, row, porcupine, NUMBERS[row.name])
        except (AssertionError, ExceptionGroup, StoreError) as failure:
            wrong.append(f"{row.name}: {failure!r}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.long
async def test_tokens_and_certificates_under_a_torchrun_job(
    secured: EtcdCluster, porcupine: Path, tmp_path: Path
) -> None:
    access = await with_password(secured, tmp_path)
    async with (
        fault_rig(secured, DRIVER, lease_ttl_s=SECURED_LEASE_S, access=access) as rig,
        training_job(tmp_path, access, DRIVER, SECURED_LEASE_S) as training,
    ):
        await endure_all(rig, training, SECURED, porcupine)


@pytest.mark.long
async def test_a_member_is_started_twice_under_a_torchrun_job(
    plain: EtcdCluster, porcupine: Path, tmp_path: Path
) -> None:
    async with (
        fault_rig(plain, DRIVER, lease_ttl_s=10) as rig,
        training_job(tmp_path, plain.access(), DRIVER) as training,
    ):

        async def twice(rig: FaultRig) -> None:
            await training.start_twin()
            await TWICE.fault(rig)

        row = replace(TWICE, fault=twice)
        await endure_training(rig, training, row, porcupine, 50)


@pytest.mark.long
async def test_a_sidecar_is_frozen_under_a_torchrun_job(
    plain: EtcdCluster, porcupine: Path, tmp_path: Path
) -> None:
    async with (
        fault_rig(plain, DRIVER, lease_ttl_s=10) as rig,
        training_job(tmp_path, plain.access(), DRIVER) as training,
    ):

        async def frozen(rig: FaultRig) -> None:
            await training.freeze_sidecar(15)

        # Its node counts as dead 4 s after its lease: the others may go on without it meanwhile.
        row = Row("sidecar frozen, 15 s", frozen, extra_s=ENDPOINT_S, new_worlds=None)
        await endure_training(rig, training, row, porcupine, 30)
