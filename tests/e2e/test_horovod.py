# SPDX-License-Identifier: Apache-2.0
"""An unmodified horovodrun on a live membership: each applied step adds exactly 1 to a weight."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from console.local.settings import LAUNCHER
from launcher_shim.exit_status import EXIT_TERMINATED
from tests.support.horovod.cluster import HorovodCluster, Roster
from tests.support.horovod.drains import Drains, draining
from tests.support.programs import ran
from tests.support.store.tcp_proxy import TcpProxy
from tests.support.training.background import Background
from tests.support.training.job import RunJob
from tests.support.training.pods import END_TIMEOUT_S

pytestmark = pytest.mark.timeout(900)

StartJob = Callable[..., AbstractContextManager[HorovodCluster]]
Start = Callable[..., AbstractContextManager[Drains]]

long = pytest.mark.long


@pytest.fixture
def start_job(tmp_path: Path, embedded: list[str]) -> StartJob:
    def start(**settings: Any) -> HorovodCluster:
        return HorovodCluster(tmp_path / "job", settings.pop("endpoints", embedded), **settings)

    return start


@pytest.fixture
def start(tmp_path: Path, embedded: list[str], background: Background) -> Start:
    def start(**settings: Any) -> AbstractContextManager[Drains]:
        return draining(tmp_path / "job", embedded, background, **settings)

    return start


def test_i2_a_join_a_drain_of_rank_0_a_loss_and_the_end_of_the_launcher(start: Start) -> None:
    with start(nodes=2, least=1, most=2, grace_s=90.0, lease_s=8.0) as drains:
        job = drains.job
        roster = Roster(job, "node-0", "node-1")
        first = roster.rank_0()
        drains.gone(*drains.delete(first))
        roster.names -= {first}
        roster.settle()
        roster.add(first)
        pause_and_resume(job)
        roster.kill(roster.rank_0())
        drains.all_committed(1)

        (left,) = roster.names
        node = job.nodes[left]
        assert job.workers(node)
        assert job.launcher.launcher is not None
        job.launcher.launcher.kill()
        job.until_no_worker(node)


def pause_and_resume(job: HorovodCluster) -> None:
    """All ranks stop at the step that rank 0 saves, and the same processes go on from there."""
    job.until(lambda: " horovodrun trains on 2 nodes at step " in typed(job, "status")[1], 120, "")
    workers = {name: job.workers(node) for name, node in job.nodes.items() if name != LAUNCHER}
    status, said = typed(job, "pause", "--wait")
    assert status == 0, said
    job.until(lambda: job.no_step_for(15.0), END_TIMEOUT_S, "nobody trains")
    assert f"step {job.newest} is saved" in said
    assert job.hosts() == []
    assert "paused" in typed(job, "status")[1]
    assert typed(job, "resume")[0] == 0
    job.until_world(*workers)
    assert {name: job.workers(job.nodes[name]) for name in workers} == workers


def typed(job: HorovodCluster, *words: str) -> tuple[int, str]:
    """The exit status of a command about the job, and what it printed."""
    about = (f"--job={job.settings.job}", f"--namespace={job.settings.namespace}")
    assert job.settings.access is not None
    endpoints = f"--etcd-endpoints={','.join(job.settings.access.endpoints)}"
    command = (sys.executable, "-m", "console.main", *words, *about, endpoints)
    done = ran(*command, timeout_s=END_TIMEOUT_S)
    return done.returncode, done.stdout + done.stderr


@long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("slots", [1, 2])
def test_thirty_changes_of_one_job(start: Start, slots: int) -> None:
    # A sidecar that is killed has the lease, and 5 s, to be there again.
    settings = {"slots": slots, "grace_s": 180.0, "lease_s": 15.0}
    with start(nodes=2, least=2, most=3, **settings) as drains:
        job = drains.job
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
        job.until(lambda: job.no_step_for(1.5), 120, "nobody trains")
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
        begin_at_the_gate(job, "node-6")
        job.begin_to_leave(leaver)
        job.add("node-7")
        time.sleep(3.0)  # horovodrun looks each two seconds at least, and does not say so
        job.open_gate(job.nodes["node-6"])
        roster.names = roster.names - {leaver} | {"node-6", "node-7"}
        roster.settle(3)
        job.end_leaving(leaver)
        assert roster.changes >= 20

        # No rank notices that the sidecars on its way are killed.
        names = (LAUNCHER, *sorted(roster.names))
        before = {name: job.workers(job.nodes[name]) for name in roster.names}
        for name in names:
            job.stop_sidecar(job.nodes[name], signal.SIGKILL)
            job.start_sidecar(job.nodes[name])
        job.until_ready(*(job.nodes[name] for name in names))
        roster.settle(0)
        assert {name: job.workers(job.nodes[name]) for name in roster.names} == before

        # Pods that are deleted: that of rank 0, twice, and then two at once, below min.
        for _ in range(2):
            first = roster.rank_0()
            drains.replace(first)
            roster.settle(2)
        leavers = sorted((roster.rank_0(), roster.other()))
        going = drains.delete(*leavers)
        job.add("node-8", "node-9")
        drains.gone(*going)
        roster.names = roster.names - {*leavers} | {"node-8", "node-9"}
        roster.settle(4)
        lost = roster.rank_0()
        roster.kill(lost)
        roster.add(lost)
        assert roster.changes >= 30
        drains.all_committed(4)


def begin_at_the_gate(job: HorovodCluster, name: str) -> None:
    """Start a node whose worker does not join until its gate is opened."""
    job.begin(name)
    job.shut_gate(name)
    job.finish(name)
    job.until_gate(name, "waits")


@long
@pytest.mark.timeout(2400)
def test_i4_while_the_store_is_away_for_60_s_and_the_launchers_sidecar_restarts(
    start_job: StartJob, embedded: list[str], background: Background
) -> None:
    proxy = TcpProxy(embedded[0])
    background.run(proxy.__aenter__())
    seen: set[frozenset[str]] = set()

    def watched(condition: Callable[[], bool]) -> Callable[[], bool]:
        """Every list that ``discover_hosts.sh`` would have shown meanwhile is noted."""

        def look() -> bool:
            seen.add(frozenset(job.hosts()))
            return condition()

        return look

    try:
        with start_job(nodes=2, least=1, most=3, endpoints=[proxy.endpoint]) as job:
            job.until_world("node-0", "node-1")
            background.call(proxy.cut)
            for steps in (400, 800):
                goal = job.newest + steps
                job.until(watched(lambda: job.newest >= goal), 600, "it trains")  # noqa: B023
                job.stop_sidecar(job.launcher, signal.SIGKILL)
                job.start_sidecar(job.launcher)
            background.call(proxy.mend)
            job.until(watched(job.launcher.ready), 120, "the launcher's sidecar is ready")
            for name, number in ((LAUNCHER, signal.SIGTERM), ("node-1", signal.SIGKILL)):
                job.stop_sidecar(job.nodes[name], number)
                job.start_sidecar(job.nodes[name])
                job.until(watched(job.nodes[name].ready), 120, f"{name} is ready")
            job.goes_on(100)
            assert seen == {frozenset(("node-0", "node-1"))}
            job.add("node-2")
            job.until_world("node-0", "node-1", "node-2")
            job.assert_nothing_lost_or_doubled()
    finally:
        background.run(proxy.__aexit__(None, None, None))


@long
def test_a_node_that_freezes_is_left_behind_and_its_worker_ends_when_it_wakes(
    start_job: StartJob,
) -> None:
    # Those who wait for the one that is frozen find out when Gloo's time is over.
    with start_job(nodes=3, least=1, most=3, gloo_timeout_s=60) as job:
        job.until_world("node-0", "node-1", "node-2")
        victim = job.nodes["node-1"]
        job.losses += 1
        job.freeze(victim)
        job.until_world("node-0", "node-2")
        frozen = job.workers(victim)
        assert frozen
        job.resume(victim)
        job.until(lambda: not frozen & job.workers(victim), 120, "its worker ends")
        # Its pod is the same one: it may come back once its time on the blacklist is over.
        job.until_world("node-0", "node-1", "node-2")
        job.assert_nothing_lost_or_doubled()


@long
@pytest.mark.torch
def test_one_store_serves_a_torchrun_job_and_a_horovodrun_job_at_once(
    start_job: StartJob, run_job: RunJob, embedded: list[str]
) -> None:
    with start_job(nodes=2, least=1, most=3) as ours, run_job(embedded, least=1, most=3) as theirs:
        pair = theirs.add(2)
        roster = Roster(ours, "node-0", "node-1")
        world = theirs.world_of(pair)
        roster.kill("node-1")
        theirs.undisturbed(world)
        theirs.kill_node(pair[0])
        theirs.world_of(pair[1:])
        roster.add("node-1")
        ours.assert_nothing_lost_or_doubled()


# -- drains


@long
@pytest.mark.parametrize("slots", [1, 2])
def test_i2_ten_drains_of_one_job(start: Start, slots: int) -> None:
    names = ("node-0", "node-1", "node-2")
    with start(nodes=3, least=1, most=3, slots=slots) as drains:
        job = drains.job
        job.until_world(*names)
        for _ in range(2):
            drains.replace(job.host_of_rank_0())

        # Two at once, rank 0 among them.
        first = job.host_of_rank_0()
        drains.replace(first, min({*names} - {first}))

        # While all wait for a newcomer that is slow to start: rank 0 leaves, and then it itself.
        first = job.host_of_rank_0()
        drains.gone(*drains.delete(first))
        job.until_world(*({*names} - {first}))
        second = job.host_of_rank_0()
        begin_at_the_gate(job, first)
        slow = job.nodes[first]
        going = drains.delete(second) + drains.delete(first)
        job.open_gate(slow)
        drains.gone(*going)
        job.until_world(*({*names} - {first, second}))
        job.add(first, second)
        job.until_world(*names)

        for _ in range(3):
            drains.replace(job.host_of_rank_0())
        drains.all_committed(10)


@long
def test_one_drained_below_min_waits_for_another_and_goes_at_its_deadline(start: Start) -> None:
    with start(nodes=2, least=2, most=2, grace_s=90.0) as drains:
        job = drains.job
        job.until_world("node-0", "node-1")

        first = job.host_of_rank_0()
        going = drains.delete(first)
        job.until(lambda: first not in job.hosts(), 120, "it is off the list")
        job.until(lambda: job.no_step_for(5.0), 120, "nobody trains")
        assert drains.held(*going) == [*going]
        job.add("node-2")
        drains.gone(*going)
        (other,) = {"node-0", "node-1"} - {first}
        job.until_world(other, "node-2")
        job.goes_on(10)

        (expired,) = drains.gone(*drains.delete(other))
        assert expired.outcome == "expired"
        job.add("node-3")
        job.until_world("node-2", "node-3")
        job.goes_on(10)

        # What horovodrun hears of the one that was ended must not stop what comes next.
        going = drains.delete("node-2")
        job.add("node-4")
        drains.gone(*going)
        job.until_world("node-3", "node-4")
        job.goes_on(10)
        job.assert_nothing_lost_or_doubled()


@long
def test_a_newcomer_that_is_drained_at_once_stops_nobody(start: Start) -> None:
    with start(nodes=2, least=1, most=3) as drains:
        job = drains.job
        job.until_world("node-0", "node-1")
        for steps in (0, 10, 25, 40):
            job.begin("node-2")
            job.finish("node-2")
            job.until(lambda: "node-2" in job.hosts(), 120, "node-2 is listed")
            job.goes_on(steps)
            drains.gone(*drains.delete("node-2"))
            job.until_world("node-0", "node-1")
            job.goes_on(10)
        drains.all_committed(4)


@long
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("how", ["drained", "left"])
def test_all_hosts_replaced_at_once_hand_the_state_over(start: Start, nodes: int, how: str) -> None:
    former, next_ = ([f"node-{n}" for n in range(a, a + nodes)] for a in (0, nodes))
    with start(nodes=nodes, least=1, most=2 * nodes, grace_s=240.0) as drains:
        job = drains.job
        job.until_world(*former)
        job.until(lambda: job.newest > 300, 240, "the hosts have settled")
        before = job.newest
        for name in next_:
            job.begin(name)
        if how == "left":
            job.begin_to_leave(*former)
            job.finish(*next_)
        else:
            going = drains.delete(*former, replaced=False)
            # The oldest host stays on the list: the others wait without workers.
            job.goes_on(60)
            assert len(drains.held(*going)) == 1
            job.finish(*next_)
            drains.gone(*going)
        job.until_world(*next_)
        if how == "left":
            job.end_leaving(*former)
        job.goes_on(10)
        assert job.newest > before
        drains.all_committed(nodes if how == "drained" else 0)


@long
def test_a_launcher_that_is_evicted_has_the_ranks_save_and_the_next_goes_on_there(
    start: Start,
) -> None:
    with start(nodes=2, least=1, most=2, grace_s=120.0, wrapped=True) as drains:
        job = drains.job
        job.until_world("node-0", "node-1")
        job.goes_on(20)
        launcher = job.launcher
        drains.delete(LAUNCHER, replaced=False)
        assert launcher.launcher is not None
        assert launcher.launcher.wait(END_TIMEOUT_S) == EXIT_TERMINATED
        drain = drains.until_over(launcher)
        assert (drain.outcome, drain.step) == ("committed", job.newest)
        for name in ("node-0", "node-1"):
            job.until_no_worker(job.nodes[name])
        job.stop_sidecar(launcher)
        job.add(LAUNCHER)
        job.until_world("node-0", "node-1")
        job.goes_on(20)
        job.assert_nothing_lost_or_doubled()
