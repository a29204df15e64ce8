# SPDX-License-Identifier: Apache-2.0
"""Pure rules for the end of a node and of the job.

A node is like a pod with restart policy OnFailure: a launcher that fails is restarted a few times,
unless the job itself is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from launcher_shim.exit_status import EXIT_KILLED

RESTART_PAUSE_S = 1.0

Next = Literal["done", "spare", "restart", "failed"]


@dataclass(frozen=True, slots=True)
class Closing:
    """The closing of the run by its launchers, with the nodes of its last round."""

    succeeded: bool
    nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Ending:
    """The final end of one node; a list of these is in the order in which the nodes ended."""

    node: str
    how: Literal["done", "spare", "failed", "drained", "killed"]
    status: int


def shell_status(returncode: int) -> int:
    """Return a process's status as a shell reports it: 128 + N after signal N."""
    return 128 - returncode if returncode < 0 else returncode


def after_exit(
    node: str, status: int, restarts_left: int, closing: Closing | None
) -> tuple[Next, str]:
    """Decide what follows the end of a node's launcher, and why."""
    if status == 0:
        return "done", "its launcher exited with 0"
    if closing is not None and closing.succeeded and node not in closing.nodes:
        return "spare", "the job finished without it"
    if closing is not None:
        how = "succeeded" if closing.succeeded else "failed"
        return "failed", f"its launcher exited with {status}, and the job has {how}"
    if restarts_left > 0:
        return "restart", f"its launcher exited with {status}, and starts again"
    return "failed", f"its launcher exited with {status}, and no restart is left"


def after_horovodrun(status: int) -> tuple[Next, str]:
    """Decide what follows the end of the one launcher of a Horovod job, and why."""
    if status == 0:
        return "done", "horovodrun ended with 0"
    return "failed", f"horovodrun ended with {status}"


def horovod_status(launcher: Ending | None) -> tuple[int, str]:
    """Return a Horovod job's exit status and the reason: horovodrun's own, if it ended."""
    if launcher is None:
        return EXIT_KILLED, "horovodrun never ran to an end"
    if launcher.how == "killed":
        return launcher.status, "the launcher was killed"
    if launcher.how == "done":
        return 0, "the job finished"
    return launcher.status, f"horovodrun ended with {launcher.status}"


def job_status(endings: Sequence[Ending]) -> tuple[int, str]:
    """Return the job's exit status and the reason, from the ends of all nodes.

    The job has finished if a node was done and none failed after that; what failed or was killed
    before, the job has survived.
    """
    first_done = next((i for i, ending in enumerate(endings) if ending.how == "done"), None)
    failures = [ending for ending in endings[first_done or 0 :] if ending.how == "failed"]
    if failures:
        return failures[0].status, f"{failures[0].node} ended with {failures[0].status}"
    if first_done is None:
        return EXIT_KILLED, "no node was left"
    done = sum(ending.how == "done" for ending in endings)
    return 0, f"the job finished on {done} node{'s' if done != 1 else ''}"
