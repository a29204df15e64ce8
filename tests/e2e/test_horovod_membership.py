# SPDX-License-Identifier: Apache-2.0
"""An unmodified horovodrun on a live membership: each applied step adds exactly 1 to a weight."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.horovod.cluster import HorovodCluster
from tests.support.horovod.rig import horovod_folder
from tests.support.store.tcp_proxy import TcpProxy
from tests.support.training.background import Background
from tests.support.training.job import Job

StartJob = Callable[..., AbstractContextManager[HorovodCluster]]


@pytest.fixture(scope="session")
def folder() -> str:
    return horovod_folder()


@pytest.fixture
def start_job(tmp_path: Path, folder: str, embedded: list[str]) -> StartJob:
    @contextmanager
    def start(**settings: Any) -> Iterator[HorovodCluster]:
        endpoints = settings.pop("endpoints", embedded)
        with HorovodCluster(tmp_path / "job", folder, endpoints, **settings) as job:
            job.start()
            yield job

    return start


class Roster:
    """The nodes of a job that should train now, by what becomes of them."""

    def __init__(self, job: HorovodCluster, *names: str) -> None:
        self.job = job
        self.names = set(names)
        self.changes = 0
        job.until_world(*names)

    def rank_0(self) -> str:
        return self.job.host_of_rank_0()

    def other(self) -> str:
        return min(self.names - {self.rank_0()})

    def settle(self, changes: int = 1) -> None:
        """Wait until those who should train do."""
        self.changes += changes
        self.job.until_world(*self.names)
        self.job.goes_on(10)

    def add(self, *names: str) -> None:
        self.job.add(*names)
        self.names |= set(names)
        self.settle(len(names))

    def leave(self, *names: str) -> None:
        self.names -= set(names)
        self.job.leave(*names)
        self.settle(len(names))

    def kill(self, *names: str) -> None:
        self.names -= set(names)
        self.job.kill(*names)
        self.settle(len(names))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_join_a_leave_of_rank_0_and_a_loss(start_job: StartJob, slots: int) -> None:
    with start_job(nodes=2, least=1, most=3, slots=slots) as job:
        roster = Roster(job, "node-0", "node-1")
        roster.add("node-2")
        roster.leave(roster.rank_0())
        lost = roster.rank_0()
        roster.kill(lost)
        roster.add(lost)
        job.assert_nothing_lost_or_doubled()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("slots", [1, 2])
def test_twenty_changes_of_one_job(start_job: StartJob, slots: int) -> None:
    with start_job(nodes=2, least=2, most=3, slots=slots) as job:
        roster = Roster(job, "node-0", "node-1")
        roster.add("node-2")

        first = roster.rank_0()
        roster.leave(first)
        roster.add(first)
        lost = roster.rank_0()
        roster.kill(lost)
        roster.add(lost)
        assert (len(roster.names), roster.changes) == (3, 5)

        # A spare beyond max changes nothing until somebody leaves or dies.
        job.add("node-3")
        roster.settle()
        gone = roster.other()
        roster.names = roster.names - {gone} | {"node-3"}
        job.leave(gone)
        roster.settle()
        job.add(gone)
        roster.settle()
        lost = roster.other()
        roster.names = roster.names - {lost} | {gone}
        job.kill(lost)
        roster.settle()
        assert roster.changes == 9

        # Two leave at once, below min; nobody trains until two have come.
        stay = roster.rank_0()
        leavers = sorted(roster.names - {stay})
        job.begin_to_leave(*leavers)
        newest = -1
        while newest != job.newest:
            newest = job.newest
            time.sleep(1.5)
        job.add("node-4", "node-5")
        roster.names = {stay, "node-4", "node-5"}
        roster.settle(4)
        job.end_leaving(*leavers)

        # Two die at once, rank 0's node among them.
        stay = roster.other()
        dead = sorted(roster.names - {stay})
        job.kill(*dead)
        job.add(*dead)
        roster.settle(4)
        assert roster.changes == 17

        # Changes while all wait for a newcomer that is slow to start: one leaves, one comes.
        roster.leave(roster.other())
        leaver = roster.other()
        job.begin("node-6")
        job.shut_gate("node-6")
        job.finish("node-6")
        job.until_at_the_gate("node-6")
        job.begin_to_leave(leaver)
        job.add("node-7")
        time.sleep(3.0)  # horovodrun looks each two seconds at least, and does not say so
        job.open_gate("node-6")
        roster.names = roster.names - {leaver} | {"node-6", "node-7"}
        roster.settle(3)
        job.end_leaving(leaver)
        assert roster.changes >= 20
        job.assert_nothing_lost_or_doubled()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_i4_while_the_store_is_away_for_60_s_and_the_launchers_sidecar_restarts(
    start_job: StartJob, embedded: list[str], background: Background
) -> None:
    proxy = TcpProxy(embedded[0])
    background.run(proxy.__aenter__())
    try:
        with start_job(nodes=2, least=1, most=3, endpoints=[proxy.endpoint]) as job:
            job.until_world("node-0", "node-1")
            with watched_hosts(job) as seen:
                began_s = time.monotonic()
                background.call(proxy.cut)
                job.until(lambda: time.monotonic() > began_s + 20, 30, "20 s are over")
                job.stop_sidecar("launcher", signal.SIGKILL)
                job.start_sidecar(job.launcher)
                job.until(lambda: time.monotonic() > began_s + 60, 60, "60 s are over")
                background.call(proxy.mend)
                job.until_ready(job.launcher)
                for name in ("launcher", "node-1"):
                    job.stop_sidecar(name, signal.SIGTERM if name == "launcher" else signal.SIGKILL)
                    job.start_sidecar(job.nodes[name])
                    job.until_ready(job.nodes[name])
                job.goes_on(100)
            assert seen == {frozenset(("node-0", "node-1"))}
            assert job.longest_pause_s(began_s) < 5.0
            job.add("node-2")
            job.until_world("node-0", "node-1", "node-2")
            job.assert_nothing_lost_or_doubled()
    finally:
        background.run(proxy.__aexit__(None, None, None))


@contextmanager
def watched_hosts(job: HorovodCluster) -> Iterator[set[frozenset[str]]]:
    """Collect every list that ``discover_hosts.sh`` would have shown meanwhile."""
    seen: set[frozenset[str]] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            seen.add(frozenset(job.hosts()))

    thread = threading.Thread(target=watch, name="watch")
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


@pytest.mark.long
@pytest.mark.timeout(500)
def test_all_hosts_replaced_at_once_hand_the_state_over(start_job: StartJob) -> None:
    with start_job(nodes=2, least=1, most=4) as job:
        job.until_world("node-0", "node-1")
        job.until(lambda: job.newest > 300, 240, "the hosts have settled")
        before = job.newest
        for name in ("node-2", "node-3"):
            job.begin(name)
        job.begin_to_leave("node-0", "node-1")
        job.finish("node-2", "node-3")
        job.until_world("node-2", "node-3")
        job.end_leaving("node-0", "node-1")
        job.goes_on()
        assert job.newest > before
        job.assert_nothing_lost_or_doubled()


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_node_that_freezes_is_left_behind_and_its_worker_ends_when_it_wakes(
    start_job: StartJob,
) -> None:
    # Those who wait for the one that is frozen find out when Gloo's time is over.
    with start_job(nodes=3, least=1, most=3, gloo_timeout_s=60) as job:
        job.until_world("node-0", "node-1", "node-2")
        job.freeze("node-1")
        job.until_world("node-0", "node-2")
        frozen = job.workers(job.nodes["node-1"])
        assert frozen
        job.resume("node-1")
        job.until(lambda: not frozen & job.workers(job.nodes["node-1"]), 120, "its worker ends")
        # Its pod is the same one: it may come back once its time on the blacklist is over.
        job.until_world("node-0", "node-1", "node-2", timeout_s=120)
        job.assert_nothing_lost_or_doubled()


@pytest.mark.timeout(400)
def test_a_launcher_that_is_killed_leaves_no_worker(start_job: StartJob) -> None:
    with start_job(nodes=2, least=1, most=2, slots=2) as job:
        job.until_world("node-0", "node-1")
        assert job.launcher.main is not None
        workers = set().union(*(job.workers(job.nodes[name]) for name in ("node-0", "node-1")))
        assert len(workers) >= 4
        job.launcher.main.kill()
        for name in ("node-0", "node-1"):
            job.until(lambda: not job.workers(job.nodes[name]), 120, f"{name} has no worker")  # noqa: B023


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.timeout(400)
def test_one_store_serves_a_torchrun_job_and_a_horovodrun_job_at_once(
    start_job: StartJob,
    run_job: Callable[..., AbstractContextManager[Job]],
    embedded: list[str],
) -> None:
    with start_job(nodes=2, least=1, most=3) as ours, run_job(embedded, least=1, most=3) as theirs:
        pair = theirs.add(2)
        ours.until_world("node-0", "node-1")
        world = theirs.world_of(pair)
        ours.kill("node-1")
        ours.until_world("node-0")
        theirs.undisturbed(world, world.began_s)
        theirs.kill_node(pair[0])
        theirs.world_of(pair[1:])
        ours.goes_on()
        ours.add("node-1")
        ours.until_world("node-0", "node-1")
        ours.assert_nothing_lost_or_doubled()
