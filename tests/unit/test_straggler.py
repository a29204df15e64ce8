# SPDX-License-Identifier: Apache-2.0
"""The rank that the others wait for is found by the shares of its time that each rank waits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import agent.stuck
from agent.rundir.reports import read_line
from agent.verdict.runs import straggler, waits_of
from muster import waiting
from muster.waiting import WaitingShare
from rdzv.drain.saves import steady
from rdzv.keys import JobKeys
from rdzv.records.progress import PodSaves
from rdzv.store import KeyValue
from tests.support.programs import older_pythons
from tests.support.sources import ROOT

PYTHONS = [sys.executable, *older_pythons()]


def pod(name: str, first: int, *waits: float) -> PodSaves:
    ranks = tuple(range(first, first + len(waits)))
    return PodSaves(name, f"uid-{name}", "digits", 3, ranks=ranks, waits=waits)


def test_the_rank_that_waits_least_is_named_with_what_it_costs() -> None:
    found = straggler("ab", [pod("a", 0, 0.5, 0.45), pod("b", 2, 0.05, 0.55)])
    assert found is not None
    assert found.ranks == (("b", 2),)
    assert found.sentence == (
        "all others wait for rank 2 (b): at least 45% of each step, and a step would take 40% less"
        " without"
    )


@pytest.mark.parametrize(
    "told",
    [
        [pod("a", 0, 0.1), pod("b", 1, 0.25)],
        [pod("a", 0, 0.1), pod("b", 1, 0.1), pod("c", 2, 0.8)],
        [pod("a", 0, 0.5)],
        [pod("a", 0, 0.5), pod("b", 1)],
        [],
    ],
    ids=["alike", "most-are-slow", "one-pod-silent", "one-rank-unknown", "nothing"],
)
def test_no_rank_is_named_without_need(told: list[PodSaves]) -> None:
    names = "abc" if len(told) == 3 else "ab"
    assert straggler(names, told) is None


def test_two_ranks_as_slow_as_each_other_are_both_named() -> None:
    told = [pod("a", 0, 0.1, 0.6), pod("b", 2, 0.12, 0.6), pod("c", 4, 0.6, 0.6)]
    found = straggler("abc", told)
    assert found is not None
    assert [rank for _, rank in found.ranks] == [0, 2]
    assert waits_of(told) == {"a": 0.1, "b": 0.12, "c": 0.6}


def test_a_share_is_the_median_of_windows_that_end_at_steps() -> None:
    share, found = WaitingShare(), None
    for step in range(20):  # of 2 s each, 0.5 s of waiting; the ninth is a save
        for tenth in range(20):
            waits = tenth >= 15 or step == 8
            found = share.add(0.1, step, waits=waits) or found
    assert found == pytest.approx(0.25)


def test_a_share_is_unknown_until_there_are_windows() -> None:
    share = WaitingShare()
    assert all(share.add(0.1, 0, waits=True) is None for _ in range(1000))


def test_small_changes_are_not_stored() -> None:
    stored = pod("a", 0, 0.5, 0.5)
    assert steady(pod("a", 0, 0.56, 0.44), stored).waits == (0.5, 0.5)
    assert steady(pod("a", 0, 0.5, 0.35), stored).waits == (0.5, 0.35)
    assert steady(pod("a", 4, 0.56, 0.44), stored).waits == (0.56, 0.44)


def test_shares_survive_the_store() -> None:
    one = pod("a", 0, 0.5, 0.25)
    key = JobKeys("n", "digits").in_generation(1).pod_saves("a")
    assert PodSaves.from_kv(KeyValue(key, one.to_json(), 0, 1, 1, 0)).waits == (0.5, 0.25)
    assert "waits" not in json.loads(pod("a", 0).to_json())


def test_library_and_sidecar_know_the_same_collective_operations() -> None:
    assert waiting.COLLECTIVES.pattern == agent.stuck._COLLECTIVES.pattern
    assert waiting.PYTHONS.pattern == agent.stuck._PYTHONS.pattern


@pytest.mark.parametrize("python", PYTHONS)
def test_a_rank_reports_its_share_of_waiting(tmp_path: Path, python: str) -> None:
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    (tmp_path / "torch" / "distributed" / "calls.py").write_text(
        "import time\n\n\ndef all_reduce(for_s):\n    time.sleep(for_s)\n"
    )
    (tmp_path / "train.py").write_text(
        "import sys, time\n"
        "sys.path.insert(0, sys.argv[1] + '/torch/distributed')\n"
        "import calls, muster\n"
        "for step in range(1000000):\n"
        "    time.sleep(0.05)\n"
        "    calls.all_reduce(0.15)\n"
        "    muster.report_step(step)\n"
    )
    environ = {"PYTHONPATH": str(ROOT), "MUSTER_RUN_DIR": str(tmp_path), "WORLD_SIZE": "2"}
    words = [python, str(tmp_path / "train.py"), str(tmp_path)]
    process = subprocess.Popen(words, env=environ)
    try:
        share = None
        while share is None:
            assert process.poll() is None
            line = read_line(tmp_path / "progress" / "0.json")
            share = None if line is None else line.waits
        assert 0.5 < share < 1.0
    finally:
        process.kill()
        process.wait()
