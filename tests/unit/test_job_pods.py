# SPDX-License-Identifier: Apache-2.0
"""A pod of a job, reduced to what commands show."""

from __future__ import annotations

from typing import Any

import pytest

from console.remote.pods import job_pod

RUNS: dict[str, Any] = {"state": {"running": {}}}


def pod(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "namespace": "team",
            "name": "digits-0",
            "uid": "u",
            "labels": {"muster.dev/job": "digits"},
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "ownerReferences": [
                {
                    "apiVersion": "apps/v1",
                    "kind": "StatefulSet",
                    "name": "digits",
                    "uid": "s",
                    "controller": True,
                }
            ],
        },
        "spec": {
            "nodeName": "node-a",
            "initContainers": [{"name": "muster", "env": []}],
            "containers": [{"name": "trainer"}],
        },
        "status": status,
    }


def test_a_pod_that_trains() -> None:
    found = job_pod(
        pod(
            phase="Running",
            conditions=[{"type": "Ready", "status": "True"}],
            initContainerStatuses=[{"name": "muster", **RUNS}],
        ),
        frozenset({"node-a"}),
    )
    assert (found.job, found.name, found.node, found.phase) == (
        *("digits", "digits-0", "node-a", "Running"),
    )
    assert (found.ready, found.sidecar_runs, found.spot) == (True, True, True)
    assert (found.sidecar, found.containers, found.why_pending) == ("muster", ("trainer",), "")
    assert found.maker == ("StatefulSet", "digits")
    assert found.owner is not None
    assert found.created_unix_s == 1767225600.0


def test_a_user_without_rights_to_nodes_knows_no_spot() -> None:
    assert job_pod(pod(phase="Running")).spot is None
    assert job_pod(pod(phase="Running"), frozenset()).spot is False


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "no GPU"}]},
            "no GPU",
        ),
        (
            {
                "initContainerStatuses": [{"name": "muster", **RUNS}],
                "containerStatuses": [
                    {
                        "name": "trainer",
                        "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no tag"}},
                    }
                ],
            },
            "ImagePullBackOff: no tag",
        ),
        (
            {
                "containerStatuses": [
                    {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
                ]
            },
            "its containers start",
        ),
    ],
)
def test_a_pending_pod_says_why(status: dict[str, Any], why: str) -> None:
    assert job_pod(pod(phase="Pending", **status)).why_pending == why


def test_a_pod_that_runs_says_which_container_does_not() -> None:
    waits = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}
    containers = [{"name": "trainer", "state": waits}]
    found = job_pod(pod(phase="Running", containerStatuses=containers))
    assert found.why_pending == "CrashLoopBackOff: back-off 40s"
    assert job_pod(pod(phase="Running")).why_pending == ""


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("--max-steps=1_000", 1000),
        ("--max-steps " + "9" * 5000, None),
        ("--max-steps=\u0664\u0662", None),
    ],
)
def test_a_launch_line_names_its_last_step(words: str, steps: int | None) -> None:
    found = pod()
    found["spec"]["containers"][0]["args"] = words.split()
    assert job_pod(found).steps == steps
