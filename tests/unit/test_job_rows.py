# SPDX-License-Identifier: Apache-2.0
"""The rows of ``muster list`` and ``muster get``, and how the jobs of a store are found."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from console.job import reading
from console.job.jobs import job_grid, pod_grid
from console.job.reading import jobs_in
from console.job.rows import NOT_RUNNING, PodFacts, beside, job_line, not_running, pod_lines
from injection.kinds import job_label
from rdzv.keys import ROOT, JobKeys
from rdzv.store import Put
from rdzv.store.memory.client import MemoryStore

NOW = 1_000_000.0

TOLD: dict[str, Any] = {
    "job": "digits",
    "at_unix_s": NOW + 3600,
    "min": 2,
    "max": 4,
    "verdict": {"state": "training", "why": "a world of 2 nodes", "do": ""},
    "steps_per_s": 2.0,
    "last_save": {
        "seen_step": 400,
        "step_of_all_ranks": 300,
        "step_of_all_ranks_at_unix_s": NOW + 3570,
    },
    "members": [
        {"name": "b", "state": "listed", "doing": "training", "ranks": "8-15", "step": 400},
        {"name": "c", "state": "standby", "doing": "standby", "why": "max are listed"},
        {"name": "a", "state": "listed", "doing": "training", "ranks": "0-7", "node": "n1"},
    ],
}
WAITING = PodFacts("d", "Pending", why="0/2 nodes are available", runs=False)
PODS = [
    *(PodFacts(name, "Running", f"n{name}", created_unix_s=NOW - 90) for name in "abc"),
    WAITING,
]


def test_a_job_has_one_row() -> None:
    line = job_line("team", "digits", TOLD, PODS, NOW)
    (row,) = job_grid([line], wide=False, everywhere=True).rows
    assert row[:-1] == (
        *("team", "digits", "training", "2 (2-4)", "400"),
        *("2/s", "-", "30 s ago", "1 min 30 s"),
    )
    assert row[-1] == "1 of 4 pods is pending: d: 0/2 nodes are available"


def test_the_time_left_is_known_with_the_last_step_and_the_rate() -> None:
    pods = [replace(PODS[0], steps=1000)]
    assert job_line("team", "digits", TOLD, pods, NOW).eta_s == 300.0
    assert job_line("team", "digits", {**TOLD, "steps_per_s": None}, pods, NOW).eta_s is None
    assert job_line("team", "digits", TOLD, PODS, NOW).eta_s is None


def test_pods_are_in_the_order_of_ranks_and_pending_ones_come_last() -> None:
    lines = pod_lines(TOLD, PODS, NOW)
    assert [line.name for line in lines] == ["a", "b", "c", "d"]
    assert lines[-1].state == "pending"
    rows = pod_grid(lines, wide=False).rows
    assert rows[0] == ("a", "training", "0-7", "n1", "-", "-", "1 min 30 s", "")
    assert rows[-1][-1] == "0/2 nodes are available"


def test_a_pod_says_whether_its_node_is_spot() -> None:
    pods = [replace(PODS[0], spot=True), replace(PODS[1], spot=False), PODS[2]]
    spot = [row[4] for row in pod_grid(pod_lines(TOLD, pods, NOW), wide=False).rows]
    assert spot == ["spot", "no", "-"]


@pytest.mark.parametrize(
    ("phases", "phase", "why"),
    [
        (["Pending"], "below min", "no pod runs; 1 of 1 pod is pending: p0: no node"),
        (["Succeeded", "Succeeded"], "done", ""),
        (["Failed", "Succeeded"], "failing", "no pod runs, and 1 pod failed: p0"),
        (["Running", "Pending"], "unknown", "it does not answer"),
    ],
)
def test_without_a_sidecar_the_row_is_of_its_pods(phases: list[str], phase: str, why: str) -> None:
    pods = [PodFacts(f"p{n}", one, why="no node") for n, one in enumerate(phases)]
    line = job_line("team", "digits", None, pods, NOW, trouble="it does not answer")
    assert (line.phase, line.why) == (phase, why)
    assert "not registered yet" not in {pod.why for pod in line.pods}


def test_an_older_sidecar_leaves_columns_empty() -> None:
    told = {"job": "digits", "members": [{"name": "a", "state": "listed"}], "last_save": None}
    line = job_line("team", "digits", told, [], NOW)
    assert (line.phase, line.step, line.rate, line.saved_s) == ("unknown", None, None, None)
    assert line.pods[0].state == "listed"


def test_a_sidecar_completes_the_name_of_its_job_and_takes_no_other() -> None:
    whole = "digits-" * 20
    label = job_label(whole)
    assert job_line("team", label, {**TOLD, "job": whole}, PODS, NOW).name == whole
    assert job_line("team", "digits", {**TOLD, "job": "payroll"}, PODS, NOW).name == "digits"


@pytest.mark.parametrize(
    "wrong",
    [
        {"verdict": "fine"},
        {"members": ["a"]},
        {"members": [{"name": "a", "step": "many"}]},
        {"steps_per_s": "2"},
        {"at_unix_s": float("inf")},
    ],
)
def test_what_makes_no_sense_ends_no_table(wrong: dict[str, Any]) -> None:
    line = job_line("team", "digits", {**TOLD, **wrong}, PODS[:3], NOW)
    assert (line.phase, line.why) == ("unknown", "what its sidecar says cannot be read")
    assert [pod.name for pod in line.pods] == ["a", "b", "c"]


def test_pods_that_do_not_run_come_with_a_command() -> None:
    sent = beside([*PODS, replace(WAITING, name="e")])
    assert [(one.name, one.state, one.why) for one in not_running(sent, NOW)] == [
        ("d", "pending", "0/2 nodes are available"),
        ("e", "pending", "0/2 nodes are available"),
    ]
    assert beside(PODS[:-1]) == {}
    many = not_running(beside(replace(WAITING, name=str(n)) for n in range(30)), NOW)
    assert (len(many), many[-1].name) == (21, "and 10 more pods")
    newer = {NOT_RUNNING: json.dumps([{"name": "d", "phase": "Pending", "colour": "blue"}])}
    assert [one.name for one in not_running(newer, NOW)] == ["d"]
    for wrong in ("[1]", "{}", "[{}]", "?"):
        assert not_running({NOT_RUNNING: wrong}, NOW) == []


async def names(store: MemoryStore, namespace: str | None = None) -> list[str]:
    found = await jobs_in(store, namespace=namespace, timeout_s=5)
    return [f"{keys.namespace}/{keys.job_name}" for keys in found]


async def filled(*keys: str) -> MemoryStore:
    store = MemoryStore()
    await store.txn([], [Put(key, b"") for key in keys])
    return store


async def test_a_namespace_is_read_alone() -> None:
    jobs = (("a", "x"), ("a", "y"), ("a b", "x"), ("ab", "x"))
    store = await filled(*(JobKeys(*job).job for job in jobs))
    assert await names(store) == ["a/x", "a/y", "a b/x", "ab/x"]
    assert await names(store, "a") == ["a/x", "a/y"]
    assert await names(store, "a b") == ["a b/x"]
    assert await names(store, "none") == []


async def test_jobs_of_others_hide_none_of_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "JOBS_MAX", 2)
    store = await filled(*(JobKeys("a", name).job for name in "xyz"), JobKeys("b", "x").job)
    assert await names(store) == ["a/x", "a/y"]
    assert await names(store, "b") == ["b/x"]


async def test_keys_of_no_job_cost_a_few_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "JOBS_MAX", 3)
    store = await filled(*(f"{ROOT}{number}" for number in range(9)), JobKeys("a", "x").job)
    assert await names(store) == []
