# SPDX-License-Identifier: Apache-2.0
"""The fault matrix on three real members of etcd: nothing lost, doubled or out of order.

One fault of each family every day beside torch's handlers; all of them under a real torchrun job
in the full proof, which also draws what each cost. The driver ``etcd3`` is the default one on other
endpoints, and is held to the same contract suite: here it goes through the faults in which what an
endpoint does by itself is broken. A member that is killed: its connection is made anew. One that
freezes, and a line that passes nothing: a call that blocks a thread, and a stream that another one
reads, end in time all the same. A history that is compacted meanwhile: the package throws away that
a watch was cancelled. Tokens and certificates: it renews neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed", reason="the job is torch's")

from rdzv.errors import StoreError
from rdzv.store.access import Access
from tests.support.faults.agents import agents
from tests.support.faults.job import TrainingJob, training_job
from tests.support.faults.report import draw, keep
from tests.support.faults.rig import RUN_ID, Effect, FaultRig, fault_rig
from tests.support.faults.rows import (
    GROUPS,
    LEASE_S,
    QUOTA_BYTES,
    SECURED_LEASE_S,
    TOKEN_TTL_S,
    Row,
)
from tests.support.histories.pods import NODES
from tests.support.histories.recorded import porcupine
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.secure import root_access

__all__ = ["porcupine"]

pytestmark = [pytest.mark.etcd, pytest.mark.torch, pytest.mark.timeout(900)]

UNSECURED = tuple(name for name in GROUPS if name != "secured")


@pytest.fixture(scope="module", autouse=True)
def _table() -> Iterator[None]:
    """Draw the table of what was kept, if anything was to be."""
    yield
    draw()


@pytest.fixture
def cluster(groups: tuple[str, ...]) -> Iterator[EtcdCluster]:
    arguments = [
        f"--quota-backend-bytes={QUOTA_BYTES}",
        f"--auth-token-ttl={TOKEN_TTL_S}",
        # Ten clients log in at once, again and again, on the cores that the job trains on.
        "--bcrypt-cost=4",
    ]
    with EtcdCluster(tls="secured" in groups, arguments=arguments) as cluster:
        if "secured" in groups:
            cluster.enable_auth("root-password")
        yield cluster


@pytest.fixture
def access(groups: tuple[str, ...], cluster: EtcdCluster) -> Access:
    return root_access(cluster) if "secured" in groups else cluster.access()


@pytest.fixture
def lease_ttl_s(groups: tuple[str, ...]) -> float:
    return SECURED_LEASE_S if "secured" in groups else LEASE_S


def check(row: Row, effect: Effect, rig: FaultRig) -> None:
    """Hold what was seen against the row; a failure tells the timeline."""
    story = rig.story(f"{row.name}: {effect}")
    assert (effect.lost, effect.doubled, effect.out_of_order) == (0, 0, 0), story
    assert effect.wrong == (), story
    if row.keeps_leases is not None:
        assert (effect.registered_again == 0) == row.keeps_leases, story
    if row.new_worlds is not None:
        assert effect.worlds == row.new_worlds, story


async def endure(row: Row, rig: FaultRig, porcupine: Path) -> Effect:
    """What the fault does; what cannot be told within its time has the timeline with it."""
    try:
        return await rig.endure(row.fault, porcupine)
    except Exception as error:
        error.add_note(rig.story(row.name))
        raise


@pytest.mark.parametrize(
    ("groups", "driver"),
    [
        (UNSECURED, "http2"),
        (UNSECURED, "etcd3"),
        (("secured",), "http2"),
        pytest.param(("secured",), "etcd3", marks=pytest.mark.long),
    ],
)
async def test_one_fault_of_each_family(
    groups: tuple[str, ...],
    driver: str,
    cluster: EtcdCluster,
    access: Access,
    lease_ttl_s: float,
    porcupine: Path,
) -> None:
    rows = chain.from_iterable(GROUPS[name] for name in groups)
    async with fault_rig(cluster, driver, access, lease_ttl_s) as rig:
        ports = [one.port for one in rig.pods]
        async with agents(ports, RUN_ID, NODES) as rig.agents:
            for row in rows:
                if row.daily and driver in row.drivers:
                    rig.tell(f"-- {row.name}")
                    check(row, await endure(row, rig, porcupine), rig)


@pytest.mark.long
@pytest.mark.parametrize("groups", [(name,) for name in GROUPS], ids=lambda groups: groups[0])
async def test_every_fault_under_a_torchrun_job(
    groups: tuple[str, ...],
    cluster: EtcdCluster,
    access: Access,
    lease_ttl_s: float,
    porcupine: Path,
    tmp_path: Path,
) -> None:
    (group,) = groups
    wrong = []
    async with (
        fault_rig(cluster, "http2", access, lease_ttl_s) as rig,
        training_job(tmp_path, access, lease_ttl_s) as training,
    ):
        rig.job = training.job
        for number, row in enumerate(GROUPS[group], 10 * list(GROUPS).index(group)):
            # All of them, whatever one of them shows.
            try:
                await endure_training(rig, training, row, porcupine, number)
            except (AssertionError, ExceptionGroup, StoreError) as failure:
                wrong.append(f"{row.name}: {failure!r}")
    assert not wrong, "\n\n".join(wrong)


async def endure_training(
    rig: FaultRig, training: TrainingJob, row: Row, porcupine: Path, number: int
) -> None:
    """Go through one fault with the real job."""
    rig.tell(f"-- {row.name}")
    training.job.tell(f"-- {row.name}")
    await training.together()
    effect = await rig.endure(row.fault, porcupine)
    befell = await training.effect()
    await asyncio.to_thread(keep, number, row.name, "http2", effect, str(befell))
    check(row, effect, rig)
    assert befell.ended == 0, training.job.timeline()
    if row.new_worlds is not None:
        assert befell.new_worlds == row.new_worlds, training.job.timeline()
