# SPDX-License-Identifier: Apache-2.0
"""A pod whose torchrun dies again and again beside a world that trains, by torch's own handlers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from launcher_shim.c10d.rounds.inputs import RoundPolicy
from launcher_shim.c10d.rounds.observations import NO_STEP
from launcher_shim.rundir.rank_reports import StepLine
from rdzv.records.history import HistoryEntry
from rdzv.records.quarantine import Quarantine, Terms
from rdzv.store import Delete
from rdzv.store.memory.client import MemoryStore
from tests.support.sidecars.jobs import KEYS
from tests.support.sidecars.rendezvous import Job, Torchrun, job

pytestmark = pytest.mark.virtual

QUICK = RoundPolicy(2, 3, last_call_s=0.5, first_call_s=1.0, confirm_s=0.5, hold_s=0.2)
FOR_LONG = Terms(worlds=2, first_s=3600.0, longest_s=3600.0, trial_s=3600.0)
FOR_A_WHILE = Terms(worlds=1, brief_s=3.0, first_s=3.0)
TO_FORM_S = 5.0
"""In so long the others would have formed another world, for one that they wait for or let in."""
ALL_BACK_S = 600.0
"""Within so long all train again, by the product's own terms."""


def record(one: Job, member: str) -> Quarantine | None:
    """What is known of the deaths of ``member``, as another member sees it."""
    return one.sidecars["a"].job.snapshot().quarantines.get(member)


def counted(one: Job, member: str) -> int:
    """How many deaths of ``member`` have been counted."""
    known = record(one, member)
    return 0 if known is None else known.deaths


def has_died(one: Job, member: str, deaths: int) -> bool:
    """Whether so many deaths of ``member`` have been counted."""
    return counted(one, member) == deaths


def told_of(one: Job, member: str) -> list[str]:
    """What the history has of the quarantine of ``member``, in order."""
    entries = [HistoryEntry.from_kv(kv) for kv in one.sidecars["a"].mirror.under(KEYS.history)]
    of_member = [entry.what for entry in entries if entry.member == member]
    return [what for what in of_member if what in ("quarantine", "admit")]


async def parked(one: Job, torchrun: Torchrun) -> None:
    """Wait until it is kept out of the world."""
    await one.until(lambda: torchrun.wire.agent.claim.parked)


def is_through(torchrun: Torchrun) -> bool:
    """Whether its wait is over, either way."""
    return torchrun.ended or bool(torchrun.worlds)


async def dies(one: Job, member: str, deaths: int) -> None:
    """Let its torchrun die in a world of all three, once more."""
    await one.world(f"ab{member}")
    one.torchruns[member].kill()
    await one.until(lambda: counted(one, member) == deaths)
    await one.world("ab")


@asynccontextmanager
async def undisturbed(one: Job) -> AsyncIterator[None]:
    """Let the world of a and b go on meanwhile, and for as long as it takes to form another."""
    worlds = [len(one.torchruns[name].worlds) for name in "ab"]
    yield
    await one.passed(TO_FORM_S)
    assert [len(one.torchruns[name].worlds) for name in "ab"] == worlds


async def test_a_crash_loop_is_damped_until_somebody_lets_it_in() -> None:
    async with job(QUICK, terms=FOR_LONG, world="abc") as one:
        await dies(one, "c", 1)
        one.torchrun("c")
        await dies(one, "c", 2)
        async with undisturbed(one):
            for _ in range(3):
                await parked(one, one.torchrun("c"))
                one.torchruns["c"].kill()
            await parked(one, one.torchrun("c"))
        known = record(one, "c")
        assert known is not None
        assert (known.out, known.deaths) == (True, 2)
        await MemoryStore(one.engine).txn([], [Delete(KEYS.in_generation(1).quarantine("c"))])
        await one.world("abc")
    assert told_of(one, "c") == ["quarantine"]


@pytest.mark.parametrize("end", ["kill", "fail"])
async def test_i11_four_that_fail_alike_nine_times_and_are_well_then_all_train_with_no_hand(
    end: str,
) -> None:
    async with job(replace(QUICK, min_nodes=1, max_nodes=5)) as one:
        for name in "abcd":
            await one.sidecar(name)
        for _ in range(9):
            for name in "abcd":
                one.torchrun(name)
            await one.passed(3)
            for name in "abcd":
                torchrun = one.torchruns[name]
                if end == "kill" or torchrun.world is None:
                    torchrun.kill()
                else:
                    torchrun.order("fail")
            await one.until(lambda: all(one.torchruns[name].ended for name in "abcd"))
        assert one.sidecars["a"].job.snapshot().quarantines
        for name in "abcd":
            one.torchrun(name)
        await one.world("abcd", ALL_BACK_S)
        await one.node("e")
        await one.world("abcde", ALL_BACK_S)
        await one.until(lambda: not one.sidecars["a"].job.snapshot().quarantines, ALL_BACK_S)


@pytest.mark.parametrize("most", [3, 4], ids=["all are at their places", "a place is free"])
async def test_i11_a_crash_loop_is_tried_again_after_ever_longer_pauses(
    most: int,
) -> None:
    async with job(replace(QUICK, max_nodes=most), terms=FOR_A_WHILE, world="abc") as one:
        for pauses in (1, 2, 3):
            await dies(one, "c", pauses if pauses == 1 else 2)
            known = record(one, "c")
            assert known is not None
            assert (known.out, known.pauses) == (True, pauses)
            one.torchrun("c")
        await one.world("abc", FOR_A_WHILE.pause_s(3) + 20)
        await one.until(lambda: record(one, "c") is None)


async def test_i11_a_world_that_only_loads_has_made_no_progress() -> None:
    async with job(QUICK, terms=replace(FOR_LONG, worlds=3, brief_s=3.0), world="abc") as one:
        for deaths in (1, 2, 3):
            await one.world("abc")
            for name in "abc":
                here = one.sidecars[name].rendezvous
                here.ranks_at(here.round.number, NO_STEP)
            await one.passed(10)
            one.torchruns["c"].kill()
            await one.until(partial(has_died, one, "c", deaths))
            await one.world("ab")
            one.torchrun("c")
        known = record(one, "c")
        assert known is not None
        assert (known.out, known.proven) == (True, False)
        for name in "ab":
            here = one.sidecars[name].rendezvous
            here.ranks_at(here.round.number, NO_STEP)
        await one.passed(10)
        assert record(one, "c") == known


async def test_who_ends_the_run_where_no_other_could_go_on_has_died_before_the_others() -> None:
    async with job(replace(QUICK, max_nodes=2), terms=FOR_LONG, world="ab") as one:
        await one.node("c")
        await parked(one, one.torchruns["c"])
        one.torchruns["b"].order("fail")
        await one.world("ac")
        assert counted(one, "b") == 1


async def test_who_dies_after_progress_is_in_no_crash_loop() -> None:
    async with job(QUICK, terms=replace(FOR_LONG, worlds=1), world="abc") as one:
        for life in range(3):
            await one.world("abc")
            one.sidecars["c"].told = [StepLine((life, 0), 1, 500)]
            one.torchruns["c"].kill()
            await one.world("ab")
            one.torchrun("c")
        await one.world("abc")
        assert record(one, "c") is None
        one.sidecars["c"].told = [StepLine((9, 0), 501, 510)]
        one.torchruns["c"].kill()
        await one.until(lambda: counted(one, "c") == 1)
        await one.world("ab")


async def test_who_has_paused_is_let_in_again() -> None:
    async with job(QUICK, terms=FOR_A_WHILE, world="abc") as one:
        await dies(one, "c", 1)
        one.torchrun("c")
        await one.world("abc")
        assert told_of(one, "c") == ["quarantine", "admit"]


async def test_a_sidecar_started_again_keeps_its_torchrun_out() -> None:
    async with job(QUICK, terms=replace(FOR_LONG, worlds=1), world="abc") as one:
        await dies(one, "c", 1)
        held = one.sidecars["c"].registrar.held
        await one.stop_sidecar("c")
        await one.sidecar("c", held)
        async with undisturbed(one):
            kept_out = one.torchrun("c")
            await parked(one, kept_out)
        assert kept_out.worlds == []


async def test_who_is_quarantined_is_let_in_where_too_few_others_train() -> None:
    async with job(QUICK, terms=replace(FOR_LONG, worlds=1), world="abc") as one:
        await dies(one, "c", 1)
        kept_out = one.torchrun("c")
        await parked(one, kept_out)
        one.torchruns["b"].kill()
        await one.world("ac")


async def test_who_gives_up_waiting_because_it_is_kept_out_has_not_died_and_is_let_in() -> None:
    async with job(QUICK, terms=FOR_A_WHILE, world="abc") as one:
        await dies(one, "c", 1)
        for _ in range(20):
            # Its own maximum is another one, so it waits where torch's time-out counts, as all do
            # that know no redundancy list.
            kept_out = one.torchrun("c", max_nodes=4, join_s=1)
            await one.until(partial(is_through, kept_out))
            if kept_out.worlds:
                break
            assert isinstance(kept_out.failure, RendezvousTimeoutError)
        await one.world("abc")
        known = record(one, "c")
        assert known is not None
        assert known.deaths == 1
        assert told_of(one, "c") == ["quarantine", "admit"]


async def test_a_torchrun_that_ends_in_a_drain_has_not_died() -> None:
    async with job(QUICK, terms=replace(FOR_LONG, worlds=1), world="abc") as one:
        await one.tell(granted="c")
        one.torchruns["c"].kill()
        await one.world("ab")
        assert record(one, "c") is None
