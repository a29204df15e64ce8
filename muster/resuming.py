# SPDX-License-Identifier: Apache-2.0
"""The check that a script may start from the checkpoint that it has found.

It may not start from one older than the step that all ranks have saved: the directory is then not
the one that the pods share, and work would be lost. But a job that was deleted and created again
may find its directory empty, and train from scratch.
"""

from __future__ import annotations

import logging
from typing import Optional

from muster.draining import last_commit

log = logging.getLogger(__name__)


class CheckpointMissing(RuntimeError):
    """All ranks have saved a step, and the script would start from an earlier one."""


def check_start(step: int, where: object) -> int:
    """Check that ``step``, of the newest checkpoint in ``where``, is one to start from; return it.

    0 is no checkpoint. Raises ``CheckpointMissing`` if the last commit is newer and was made in
    this life of the job; logs a warning if a former life made it. Call it before
    ``muster.drain()``. Without a sidecar there is nothing to check.
    """
    global _started_from
    missing, of_former_life = shortfall(step, where)
    if missing and not of_former_life:
        raise CheckpointMissing(missing)
    if missing:
        log.warning("%s", missing)
    _started_from = step
    return step


def started_from() -> Optional[int]:
    """Return the step that ``check_start`` was given; None if it was not called.

    It may be later than the last commit: a checkpoint that no other rank has reported.
    """
    return _started_from


_started_from: Optional[int] = None


def shortfall(step: int, where: object) -> "tuple[str, bool]":
    """Return a sentence on the missing commit, if any, and whether a former life saved it."""
    committed = last_commit()
    if committed is None or step >= committed:
        return "", False
    return sentence(step, committed, where, committed.of_former_life), committed.of_former_life


def sentence(step: int, committed: int, where: object, of_former_life: bool) -> str:
    """Build the sentence on the missing commit: the possible causes, and what to do."""
    checkpoint = "the newest checkpoint in %s is of step %d" % (where, step)
    if not step:
        checkpoint = "there is no checkpoint in %s" % (where,)
    if of_former_life:
        begins = "resumes from that one" if step else "trains from scratch"
        return (
            "an earlier job of this name committed step %d, but %s: this job %s; to resume from"
            " step %d instead, give it the checkpoint directory of the earlier job"
            % (committed, checkpoint, begins, committed)
        )
    return (
        "all ranks of this job have saved step %d, and %s: either it is not the directory that all"
        " pods share, or it was emptied to train from scratch; share it, or run `muster forget` for"
        " this job and start it again; see docs/operations.md#a-job-is-created-again"
        % (committed, checkpoint)
    )
