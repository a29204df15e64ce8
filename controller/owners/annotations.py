# SPDX-License-Identifier: Apache-2.0
"""What schedulers and people find at a job's owner: annotations; pure."""

from __future__ import annotations

from datetime import UTC, datetime

from controller.jobs.state import JobState

PREFIX = "muster.dev/"
EVERY_S = 30.0
"""Between two writes at one owner. Shorter: more writes to the API server, each of which all who
watch that object are told of."""


def annotations_of(job: JobState) -> dict[str, str]:
    """Annotations that say how a job is."""
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
    """In how many seconds ``wanted`` is to be written; inf where ``held`` says it already."""
    if wanted == held:
        return float("inf")
    return max(0.0, written_s + EVERY_S - now)
