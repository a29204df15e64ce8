# SPDX-License-Identifier: Apache-2.0
"""The value of the label by which pods of a job are found: ``muster.dev/job``. Pure."""

from __future__ import annotations

import hashlib
import re

LENGTH_MOST = 63
"""The longest value of a label that Kubernetes accepts, in characters."""

_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_DIGEST_LENGTH = 16


def job_label(job: str) -> str:
    """Return the job's name or, if no label can have it, its beginning and a digest of it all."""
    if _VALUE.fullmatch(job):
        return job
    digest = hashlib.sha256(job.encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"{job[: LENGTH_MOST - _DIGEST_LENGTH - 1].rstrip('._-')}-{digest}"
