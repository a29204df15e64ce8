# SPDX-License-Identifier: Apache-2.0
"""The value of the label by which pods of a job are found: ``muster.dev/job``. Pure."""

from __future__ import annotations

import hashlib
import re

LENGTH_MOST = 63
"""Characters that Kubernetes takes for a label's value."""

_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_DIGEST_LENGTH = 16


def job_label(job: str) -> str:
    """The job's name, or, where no label can have it, its beginning and a digest of all of it."""
    if _VALUE.fullmatch(job):
        return job
    digest = hashlib.sha256(job.encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"{job[: LENGTH_MOST - _DIGEST_LENGTH - 1].rstrip('._-')}-{digest}"
