# SPDX-License-Identifier: Apache-2.0
"""What a submitted job is doing, and how it ended, by what the API server shows."""

from __future__ import annotations

from typing import Any

import pytest

from console.submit.delete import lost_steps, stays
from console.submit.following import error_in, failure_of, progress_of

Object = dict[str, Any]


def pod(name: str, phase: str = "Running", *, ready: bool = False, **status: Any) -> Object:
    conditions = [{"type": "Ready", "status": "True"}] if ready else []
    return {
        "metadata": {"name": name},
        "spec": {"initContainers": [{"name": "muster"}]},
        "status": {"phase": phase, "conditions": conditions, **status},
    }


def ended(code: int, at: str = "1", reason: str = "Error", name: str = "trainer") -> Object:
    state = {"terminated": {"exitCode": code, "finishedAt": at, "reason": reason}}
    return {"containerStatuses": [{"name": name, "state": state}]}


def owner(*conditions: str, **spec: Any) -> Object:
    held = [{"type": one, "status": "True", "message": "because"} for one in conditions]
    return {"spec": {"parallelism": 2, **spec}, "status": {"conditions": held}}


UNPLACED = [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}]
NO_IMAGE = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
STARTING = {"waiting": {"reason": "ContainerCreating"}}


@pytest.mark.parametrize(
    ("held", "pods", "sentence"),
    [
        (owner(), [], "0 of 2 pods ready"),
        (owner(), [pod("a", ready=True), pod("b")], "1 of 2 pods ready"),
        (owner(), [pod("a", "Succeeded"), pod("b")], "0 of 2 pods ready; 1 pod ended with 0"),
        (
            owner(),
            [pod("a", "Failed", **ended(1)), pod("b", "Failed", **ended(143))],
            "0 of 2 pods ready; 1 pod failed before",
        ),
        (
            owner(),
            [{**pod("a", "Pending"), "status": {"phase": "Pending", "conditions": UNPLACED}}],
            "0 of 2 pods ready; a waits: 0/2 nodes are available",
        ),
        (
            owner(),
            [pod("a", "Pending", containerStatuses=[{"name": "trainer", "state": NO_IMAGE}])],
            "0 of 2 pods ready; a waits: ErrImagePull: not found",
        ),
        (
            owner(),
            [pod("a", "Pending", containerStatuses=[{"name": "trainer", "state": STARTING}])],
            "0 of 2 pods ready",
        ),
        (
            owner(),
            [{**pod("a"), "spec": {}}],
            "0 of 2 pods ready; a has no sidecar, and trains without Muster",
        ),
        (owner(suspend=True), [], "the job is suspended: its pods are made once it is resumed"),
        (owner("SuccessCriteriaMet"), [], "training has ended; the last pods stop"),
        (owner("FailureTarget"), [], "the job fails: because; its pods stop"),
    ],
)
def test_a_job_that_goes_on(held: Object, pods: list[Object], sentence: str) -> None:
    found = progress_of(held, pods)
    assert (found.sentence, found.status) == (sentence, None)


@pytest.mark.parametrize(
    ("condition", "pods", "status"),
    [
        ("Complete", [pod("a", "Failed", **ended(1))], 0),
        ("Succeeded", [], 0),
        ("Failed", [], 1),
        ("Failed", [pod("a", "Failed", **ended(143))], 1),
        ("Failed", [pod("a", "Failed", **ended(7)), pod("b", "Failed", **ended(137, "2"))], 137),
        ("Failed", [pod("a", "Failed", **ended(137, name="muster"))], 1),
    ],
)
def test_the_exit_status_is_the_jobs(condition: str, pods: list[Object], status: int) -> None:
    assert progress_of(owner(condition), pods).status == status


def test_a_failure_says_why() -> None:
    found = failure_of([pod("a", "Failed", **ended(137, reason="OOMKilled"))])
    assert str(found) == "container trainer of pod a ended with 137 (OOMKilled)"
    restarted = [{"name": "c", "state": {}, "lastState": {"terminated": {"exitCode": 3}}}]
    again = failure_of([pod("a", containerStatuses=restarted)])
    assert str(again) == "container c of pod a ended with 3"


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["step 1", "ValueError: bad", "raise ChildFailedError("], "ValueError: bad"),
        (["KeyError: 'x'", "torch.x.ChildFailedError: "], "KeyError: 'x'"),
        (["[rank0]: torch.OutOfMemoryError: CUDA"], "[rank0]: torch.OutOfMemoryError: CUDA"),
        (["all is well", "an error: no"], ""),
    ],
)
def test_the_error_is_the_scripts(lines: list[str], error: str) -> None:
    assert error_in(lines) == error


@pytest.mark.parametrize(
    ("save", "said"),
    [
        (None, "as no step is reported yet; no save is known"),
        ({"steps_at_risk": None, "step_of_all_ranks": 7}, "yet; the last save is of step 7"),
        ({"steps_at_risk": 1, "step_of_all_ranks": 4}, "lost: 1 step; the last save is of step 4"),
        ({"steps_at_risk": 9, "step_of_all_ranks": None}, "lost: 9 steps; no save is known"),
    ],
)
def test_what_a_deletion_loses(save: Object | None, said: str) -> None:
    assert said in lost_steps(save)


def test_claims_stay() -> None:
    from console.submit.delete import JobObject

    volume = {"name": "c", "persistentVolumeClaim": {"claimName": "checkpoints"}}
    made = {"spec": {"template": {"spec": {"volumes": [volume, {"name": "e", "emptyDir": {}}]}}}}
    target = JobObject("Job", "digits", "/x", made)
    assert stays([target, target]) == ["claim checkpoints", "the job's records in the store"]
