# SPDX-License-Identifier: Apache-2.0
"""Annotations of a job's owner, for schedulers and people; pure."""

from __future__ import annotations

from datetime import UTC, datetime

from controller.jobs.state import JobState

PREFIX = "muster.dev/"
EVERY_S = 30.0
"""Minimum interval between two writes to one owner. Shorter: more writes to the API server, each
of which goes to every watcher of that object."""


def annotations_of(job: JobState) -> dict[str, str]:
    """Return the annotations that describe a job's state."""
    record, last = job.snapshot.job, job.snapshot.commit_to_start_from
    found: dict[str, str] = {}
    if record is not None:
        found[f"{PREFIX}members-wanted"] = str(record.desired or record.max_workers)
        found[f"{PREFIX}members-there"] = str(len(job.listing.listed))
    if last is not None:
        found[f"{PREFIX}last-commit-step"] = str(last.step)
        if last.at_unix_s:
            at = datetime.fromtimestamp(last.at_unix_s, UTC).isoformat(timespec="seconds")
            found[f"{PREFIX}last-commit-time"] = at.replace("+00:00", "Z")
    return found


def due_s(now: float, wanted: dict[str, str], held: dict[str, str], written_s: float) -> float:
    """Return the seconds until ``wanted`` is to be written; inf if ``held`` is equal."""
    if wanted == held:
        return float("inf")
    return max(0.0, written_s + EVERY_S - now)
