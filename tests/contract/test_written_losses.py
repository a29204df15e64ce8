# SPDX-License-Identifier: Apache-2.0
"""torch's own handlers leave a world once it is written that it must form again, not before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

from rdzv.errors import StoreRefused
from tests.support.sidecars.rendezvous import QUICK, Job, job

pytestmark = pytest.mark.virtual

TTL_S = 1.0
LONG_S = 4 * (TTL_S + QUICK.confirm_s + QUICK.return_s)
"""Longer than it takes to miss a node, and to write it."""


def restarts(one: Job) -> list[int]:
    return [torchrun.restarts for torchrun in one.everyone]


async def full(one: Job) -> None:
    """The store refuses writes from now on, and the lease of c ends, whose ranks live."""
    one.engine.full = True
    one.sidecars["c"].cut.cut()
    await one.until(lambda: "c" not in one.sidecars["a"].rendezvous.snapshot().nodes)
    await one.passed(LONG_S)
    assert restarts(one) == [0, 0, 0]


async def test_i11_a_store_that_takes_no_writes_costs_no_world() -> None:
    async with job(replace(QUICK, max_nodes=3), TTL_S, world="abc") as one:
        await full(one)
        one.sidecars["c"].cut.mend()
        await one.passed(LONG_S)
        one.engine.full = False
        await one.until(lambda: "c" in one.sidecars["a"].rendezvous.snapshot().nodes)
        await one.passed(LONG_S)
        assert restarts(one) == [0, 0, 0]


async def test_i11_a_loss_is_written_once_the_store_takes_writes_again() -> None:
    async with job(replace(QUICK, max_nodes=3), TTL_S, world="abc") as one:
        await full(one)
        one.engine.full = False
        assert await one.world("ab") == 1
        assert one.sidecars["a"].rendezvous.round.ends == ""


async def test_i11_a_torchrun_that_ends_while_writes_are_refused_leaves_the_others_training() -> (
    None
):
    async with job(replace(QUICK, max_nodes=3), TTL_S, world="abc") as one:
        one.engine.full = True
        one.torchruns["c"].kill()
        await one.passed(LONG_S)
        assert restarts(one) == [0, 0, 0]
        one.engine.full = False
        assert await one.world("ab") == 1


async def test_i11_a_newcomer_is_let_in_once_that_is_written() -> None:
    async with job(replace(QUICK, max_nodes=3), world="ab") as one:
        await one.tell(joins_wait=True)
        await one.node("c")
        await one.until(lambda: "c" in one.sidecars["a"].rendezvous.snapshot().nodes)
        one.engine.full = True
        for sidecar in one.sidecars.values():
            sidecar.joins_wait = False
        await one.passed(LONG_S)
        assert restarts(one) == [0, 0, 0]
        one.engine.full = False
        await one.tell()
        assert await one.world("abc") == 1


async def test_i11_one_whose_writes_alone_are_refused_holds_nobody_up_for_ever() -> None:
    """It reads, and its lease is renewed, so that its node stays; it cannot write that it left."""
    async with job(replace(QUICK, leave_s=3.0), world="abc") as one:

        async def refuse(*_: Any, **__: Any) -> NoReturn:
            raise StoreRefused("permission denied")

        one.sidecars["a"].store.txn = refuse  # type: ignore[method-assign]
        one.torchruns["b"].kill()
        one.torchrun("b")
        await one.world("bc")
        assert one.torchruns["a"].failure is None
