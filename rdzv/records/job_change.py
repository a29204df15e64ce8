# SPDX-License-Identifier: Apache-2.0
"""The change of a job's values, in words."""

from __future__ import annotations

from rdzv.records.job import Job


def change_between(before: Job, after: Job) -> str:
    """Name each value that has changed, with what it was before; return empty text for none."""
    was, now = _values(before), _values(after)
    return ", ".join(
        f"{name} {'are' if name == 'sizes' else 'is'} {now[name]} (before: {was[name]})"
        for name in now
        if now[name] != was[name]
    )


def _values(job: Job) -> dict[str, str]:
    return {
        "min": str(job.min_workers),
        "max": str(job.max_workers),
        "desired": "none" if job.desired is None else str(job.desired),
        "sizes": ",".join(map(str, job.allowed_sizes)) or "any",
        "unit": str(job.unit),
        "gather": f"{job.gather_s:g}s",
    }
