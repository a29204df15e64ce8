# SPDX-License-Identifier: Apache-2.0
"""How a node and the job end."""

import pytest

from console.local.payload import Closing, Ending, Next, after_exit, job_status, shell_status

SUCCEEDED = Closing(True, frozenset({"node-0"}))
FAILED = Closing(False, frozenset({"node-0"}))


@pytest.mark.parametrize(
    ("node", "status", "restarts_left", "closing", "expected"),
    [
        ("node-0", 0, 3, None, "done"),
        ("node-0", 0, 0, SUCCEEDED, "done"),
        ("node-0", 1, 3, None, "restart"),
        ("node-0", 137, 1, None, "restart"),
        ("node-0", 1, 0, None, "failed"),
        ("node-0", 1, 3, FAILED, "failed"),
        ("node-1", 1, 3, FAILED, "failed"),
        ("node-0", 1, 3, SUCCEEDED, "failed"),
        ("node-1", 1, 3, SUCCEEDED, "spare"),
    ],
)
def test_what_comes_after_a_launcher_has_ended(
    node: str, status: int, restarts_left: int, closing: Closing | None, expected: Next
) -> None:
    decision, reason = after_exit(node, status, restarts_left, closing)
    assert decision == expected
    assert reason


@pytest.mark.parametrize(
    ("endings", "status"),
    [
        ([Ending("node-0", "done", 0), Ending("node-1", "done", 0)], 0),
        ([Ending("node-0", "failed", 3), Ending("node-1", "failed", 1)], 3),
        ([Ending("node-0", "failed", 1), Ending("node-1", "done", 0)], 0),
        ([Ending("node-0", "killed", 137), Ending("node-1", "done", 0)], 0),
        ([Ending("node-0", "done", 0), Ending("node-1", "failed", 1)], 1),
        ([Ending("node-0", "done", 0), Ending("node-1", "spare", 1)], 0),
        ([Ending("node-0", "killed", 137), Ending("node-1", "failed", 2)], 2),
        ([Ending("node-0", "killed", 137)], 137),
        ([], 137),
    ],
)
def test_the_status_is_the_jobs_own(endings: list[Ending], status: int) -> None:
    assert job_status(endings)[0] == status


def test_a_signal_reads_as_a_shell_tells_it() -> None:
    assert shell_status(-9) == 137
    assert shell_status(3) == 3
