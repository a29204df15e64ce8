# SPDX-License-Identifier: Apache-2.0
"""Pods of a real Horovod job that are drained: each applied step adds exactly 1 to a weight."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from launcher_shim.horovod.hosts import SETTLE_S
from tests.support.horovod.drains import Drains, draining
from tests.support.horovod.rig import horovod_folder
from tests.support.training.background import Background

DRIVER = Path(__file__).parents[1] / "support/scripts/horovod_driver.py"

Start = Callable[..., AbstractContextManager[Drains]]


@pytest.fixture(scope="session")
def folder() -> str:
    return horovod_folder()


@pytest.fixture
def start(tmp_path: Path, folder: str, embedded: list[str], background: Background) -> Start:
    def start(**settings: Any) -> AbstractContextManager[Drains]:
        return draining(tmp_path / "job", folder, embedded, background, **settings)

    return start


@pytest.mark.timeout(600)
def test_i2_rank_0_is_drained_and_its_name_comes_back(start: Start) -> None:
    with start(nodes=2, least=1, most=2, grace_s=90.0) as drains:
        job = drains.job
        job.until_world("node-0", "node-1")
        first = job.host_of_rank_0()
        (other,) = {"node-0", "node-1"} - {first}
        (drained,) = drains.gone(*drains.delete(first))
        assert drained.delisted_s < drained.over_s
        assert drained.delisted_s < drained.released_s
        job.until_world(other)
        job.add(first)
        job.until_world("node-0", "node-1")
        drains.all_committed(1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("told", "ranks"), [("early", {"a": -1}), ("late", {"a": -1, "c": 0})])
def test_an_end_below_min_that_is_told_late_leaves_nobody_waiting(
    folder: str, told: str, ranks: dict[str, int]
) -> None:
    driver = subprocess.run(
        [f"{folder}/python", DRIVER, told], stdout=subprocess.PIPE, text=True, check=True
    )
    assert ast.literal_eval(driver.stdout) == ranks


@pytest.mark.long
@pytest.mark.timeout(500)
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
        job.begin(first)
        job.shut_gate(first)
        job.finish(first)
        job.until_at_the_gate(first)
        slow = job.nodes[first]
        going = drains.delete(second) + drains.delete(first)
        drains.stay(*going)
        drains.open_gate(slow)
        drains.gone(*going)
        job.until_world(*({*names} - {first, second}))
        job.add(first, second)
        job.until_world(*names)

        for _ in range(3):
            drains.replace(job.host_of_rank_0())
        drains.all_committed(10)


@pytest.mark.long
@pytest.mark.timeout(500)
def test_one_drained_below_min_waits_for_another_and_goes_at_its_deadline(start: Start) -> None:
    with start(nodes=2, least=2, most=2, grace_s=24.0) as drains:
        job = drains.job
        job.until_world("node-0", "node-1")

        first = job.host_of_rank_0()
        going = drains.delete(first)
        drains.stay(*going)
        job.add("node-2")
        drains.gone(*going)
        (other,) = {"node-0", "node-1"} - {first}
        job.until_world(other, "node-2")
        job.goes_on(10)

        (expired,) = drains.gone(*drains.delete(other))
        assert expired.drain.outcome == "expired"
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


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_newcomer_that_is_drained_at_once_stops_nobody(start: Start) -> None:
    with start(nodes=2, least=1, most=3) as drains:
        job = drains.job
        job.until_world("node-0", "node-1")
        for delay_s in (0.0, 0.7, 1.4, 2.1):
            job.begin("node-2")
            job.finish("node-2")
            host = job.nodes["node-2"].host
            job.until(lambda: host in drains.tokens(), 120, "node-2 is listed")  # noqa: B023
            drains.pause(delay_s)
            drains.gone(*drains.delete("node-2"))
            job.until_world("node-0", "node-1")
            job.goes_on(10)
        drains.all_committed(4)


@pytest.mark.long
@pytest.mark.timeout(500)
def test_all_drained_at_once_hand_the_state_over(start: Start) -> None:
    with start(nodes=2, least=1, most=4, grace_s=60.0) as drains:
        job = drains.job
        job.until_world("node-0", "node-1")
        job.until(lambda: job.newest > 300, 240, "the hosts have settled")
        before = job.newest
        for name in ("node-2", "node-3"):
            job.begin(name)
        going = drains.delete("node-0", "node-1", replaced=False)
        job.finish("node-2", "node-3")
        drains.gone(*going)
        job.until_world("node-2", "node-3")
        job.goes_on(10)
        assert job.newest > before
        drains.all_committed(2)


@pytest.mark.long
@pytest.mark.timeout(500)
def test_the_only_node_trains_on_until_another_has_its_state(start: Start) -> None:
    with start(nodes=1, least=1, most=2, grace_s=60.0) as drains:
        job = drains.job
        job.until_world("node-0")
        drains.pause(SETTLE_S)
        going = drains.delete("node-0", replaced=False)
        drains.stay(*going)
        job.goes_on(10)
        job.add("node-1")
        drains.gone(*going)
        job.until_world("node-1")
        drains.all_committed(1)
