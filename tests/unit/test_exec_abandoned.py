# SPDX-License-Identifier: Apache-2.0
"""A command whose launcher's side is gone, and who is absent from the tunnel or refused."""

from __future__ import annotations

import asyncio
import logging
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.tunnel.connections import ABSENCE_LOOK_S, ABSENT_S, RETURN_S, Absence
from agent.tunnel.worker_end import HOLD_INTERVAL_S, LINES, PERIOD_S, Refusals
from launcher_shim.horovod.exec.session import CommandSession, Worker
from launcher_shim.rundir.exec_frames import Attaching, patience_s
from tests.support.clocks.virtual import now

pytestmark = pytest.mark.virtual

LEASES_S = [2, 10, 60]
STORE_LATE_S = 1.0
"""etcd looks for leases that have run out twice a second."""
LONG_S = 3600.0


class Stubborn(Worker):
    """One that ignores SIGTERM."""

    def __init__(self) -> None:
        super().__init__(cast(Any, SimpleNamespace(pid=0)))
        self.told: list[signal.Signals] = []

    def look(self) -> None:
        pass

    def signal(self, number: signal.Signals) -> None:
        self.told.append(number)
        if number == signal.SIGKILL:
            self.exited.set()


class Connection(SimpleNamespace):
    def write(self, _: bytes) -> None:
        pass

    def writelines(self, _: list[bytes]) -> None:
        pass

    def close(self) -> None:
        pass


def running(lease_ttl_s: int) -> tuple[CommandSession, Stubborn, asyncio.StreamWriter]:
    """A command with a connection."""
    session, worker = CommandSession("node-0", lease_ttl_s), Stubborn()
    session.worker = worker
    connection = cast(asyncio.StreamWriter, Connection())
    session.attach(connection, Attaching("node-0", "0" * 32, 1))
    return session, worker, connection


@pytest.mark.parametrize("lease_ttl_s", LEASES_S)
async def test_it_is_killed_before_the_launchers_side_gives_up_looking_for_it(
    lease_ttl_s: int,
) -> None:
    session, worker, connection = running(lease_ttl_s)
    session.detach(connection)
    await asyncio.sleep(patience_s(lease_ttl_s))
    assert worker.told == [signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize("lease_ttl_s", LEASES_S)
async def test_it_is_killed_in_time_where_the_lease_was_granted_just_before(
    lease_ttl_s: int,
) -> None:
    """The launcher and its sidecar are killed before the first renewal; its watch tells of it."""
    session, worker, _ = running(lease_ttl_s)
    given_up = asyncio.create_task(asyncio.sleep(patience_s(lease_ttl_s)))
    await asyncio.sleep(lease_ttl_s + STORE_LATE_S)
    absence = Absence(ABSENT_S)
    assert not absence.lasts(now(), LONG_S)
    await asyncio.sleep(ABSENT_S + ABSENCE_LOOK_S)  # the look before was a moment too early
    assert absence.lasts(now(), LONG_S)
    session.abandon("no member any more")
    await worker.exited.wait()
    assert worker.told == [signal.SIGTERM, signal.SIGKILL]
    assert not given_up.done()
    given_up.cancel()


@pytest.mark.parametrize("lease_ttl_s", LEASES_S)
async def test_i5_it_goes_on_while_its_sidecar_cannot_know_of_the_launcher(
    lease_ttl_s: int,
) -> None:
    session, worker, connection = running(lease_ttl_s)
    session.detach(connection)
    for _ in range(100):
        await asyncio.sleep(HOLD_INTERVAL_S)
        session.hold()
    assert worker.told == []
    await asyncio.sleep(patience_s(lease_ttl_s))
    assert worker.told == [signal.SIGTERM, signal.SIGKILL]


async def test_it_goes_on_where_another_sidecar_is_found_in_time() -> None:
    session, worker, connection = running(10)
    session.detach(connection)
    await asyncio.sleep(12.0)  # the lease, and as long as a sidecar takes to start
    session.attach(cast(asyncio.StreamWriter, Connection()), Attaching("node-0", "0" * 32, 2))
    await asyncio.sleep(60.0)
    assert worker.told == []


def test_one_that_dies_while_the_watch_works_is_gone_at_once() -> None:
    absence = Absence(ABSENT_S)
    assert not absence.lasts(100.0, LONG_S)
    assert absence.lasts(100.0 + ABSENT_S, LONG_S)


def test_i5_after_a_cut_between_all_and_the_store_everybody_may_come_back() -> None:
    """All leases have run out: each registers again in its own time, and its commands run on."""
    absence = Absence(ABSENT_S)
    assert not absence.lasts(100.0, 0.5)  # the first look after the cut
    assert not absence.lasts(100.0 + 2 * ABSENT_S, 0.5 + 2 * ABSENT_S)
    assert not absence.lasts(99.0 + RETURN_S, RETURN_S - 0.5)
    absence.over()
    assert not absence.lasts(200.0, LONG_S)


def test_one_that_does_not_come_back_after_a_cut_is_gone() -> None:
    absence = Absence(ABSENT_S)
    assert not absence.lasts(100.0, 0.5)
    assert absence.lasts(100.0 + RETURN_S, RETURN_S + 0.5)


@given(st.lists(st.tuples(st.floats(0.01, 5.0), st.booleans()), max_size=50))
def test_nobody_is_gone_by_what_a_blind_watch_has_missed(looks: list[tuple[float, bool]]) -> None:
    absence, now, healthy_since = Absence(ABSENT_S), 0.0, 0.0
    for passed_s, blind in looks:
        now += passed_s
        if blind:
            healthy_since = now
        if absence.lasts(now, now - healthy_since):
            assert now - healthy_since >= RETURN_S


def test_who_knocks_without_end_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    refusals = Refusals(logging.getLogger("tunnel"), lambda: now_s)
    for _ in range(LINES + 500):
        refusals.tell("10.0.0.9", "it began with no certificate")
    assert len(caplog.records) == LINES
    now_s += PERIOD_S
    refusals.tell("10.0.0.8", "it began with no certificate")
    *_, counted, last = caplog.messages
    assert (len(caplog.messages), counted.split()[0]) == (LINES + 2, "500")
    assert "10.0.0.8" in last
