# SPDX-License-Identifier: Apache-2.0
"""Who leaves a node, who is asked to save for them, and how the command ends."""

from __future__ import annotations

import pytest

from console.job.drain_command import nothing_on, who_leaves, worst
from console.remote.node_drain import jobs_on
from console.remote.pods import JobPod


def pod(name: str, node: str, *, runs: bool = True, phase: str = "Running") -> JobPod:
    return JobPod("team", name, f"uid-{name}", node=node, phase=phase, sidecar_runs=runs)


def test_pods_that_stay_are_asked_first() -> None:
    pods = [pod("d-0", "north"), pod("d-1", "south"), pod("d-2", "north"), pod("d-3", "east")]
    (job,) = jobs_on("north", [("digits", pods)])
    assert job.leave == ("d-0", "d-2")
    assert [one.name for one in job.pods] == ["d-1", "d-3", "d-0", "d-2"]


def test_a_pod_without_a_running_sidecar_is_told_apart() -> None:
    (job,) = jobs_on("north", [("digits", [pod("d-0", "north"), pod("d-1", "north", runs=False)])])
    assert (job.leave, job.rest) == (("d-0",), ("d-1",))


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_is_over_has_nothing_to_save(phase: str) -> None:
    assert jobs_on("north", [("digits", [pod("d-0", "north", runs=False, phase=phase)])]) == []


def test_jobs_come_by_name() -> None:
    here = [(name, [pod(f"{name}-0", "north")]) for name in ("letters", "digits")]
    elsewhere = ("words", [pod("words-0", "south")])
    assert [one.name for one in jobs_on("north", [*here, elsewhere])] == ["digits", "letters"]


@pytest.mark.parametrize(
    ("statuses", "status"),
    [([], 0), ([0, 0], 0), ([0, 6], 6), ([6, 4], 4), ([4, 3, 0], 3), ([3, 5, 6], 5), ([5, 69], 69)],
)
def test_the_worst_end_counts(statuses: list[int], status: int) -> None:
    assert worst(statuses) == status


def test_who_leaves_is_one_sentence() -> None:
    assert who_leaves("d", ["a"], "north", 3) == "job d: a leaves node north; 2 of 3 stay"
    assert who_leaves("d", ["a", "b"], "north", 2) == "job d: a, b leave node north; 0 of 2 stay"


def test_an_empty_node_names_those_that_have_pods() -> None:
    said = nothing_on("nroth", "namespace team", ["south", "north", "north", ""])
    assert said == (
        "nothing to drain: namespace team has no pod on node nroth: they are on north, south"
    )
    assert nothing_on("north", "job d", []) == "nothing to drain: job d has no pod on node north"
