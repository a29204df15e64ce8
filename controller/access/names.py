# SPDX-License-Identifier: Apache-2.0
"""The names of a job's Secret, role and users: pure.

A user name contains the job and one certificate's issue. So no two certificates share a user, no
user is created twice for different ones, and deleting a user revokes exactly one certificate.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import unquote

from agent.config import parsers as texts
from injection.settings import DOMAIN
from rdzv.keys import JobKeys

RELEASE = DOMAIN + "release"
"""The label of a job's Secret, and the annotation of a pod, with the release that serves the job.
Two releases in one cluster, each with an etcd of its own, leave each other's jobs alone by it."""

NAMED_AFTER = DOMAIN + "named-after"
"""The annotation of a pod with the name of the object that its job is named after. The label has
only the beginning of a long one, and may be the user's."""

ROLE_PREFIX = "controller/"
"""Prefix of the controller's roles; those of ``muster store-role`` lack it and are left alone."""
USER_PREFIX = "muster."
"""Prefix of user names, ``muster.DIGEST.ISSUE``: a common name has at most 64 characters."""

_DIGEST_LENGTH = 24
_SUFFIX = "-muster-store"
_SUBDOMAIN = re.compile(
    r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", re.ASCII
)
_USER = re.compile(r"muster\.([0-9a-f]{24})\.[0-9a-f]{1,20}", re.ASCII)


def is_a_name(job: str) -> bool:
    """Return whether ``job`` is a valid job name."""
    try:
        return texts.name(job) == job
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, order=True)
class JobName:
    """One job, by its namespace and its name."""

    namespace: str
    job: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.job}"

    @property
    def keys(self) -> JobKeys:
        """The job's keys in the store."""
        return JobKeys(self.namespace, self.job)

    @property
    def secret(self) -> str:
        """The name of the Secret with the job's client certificate, in its namespace."""
        return secret_name(self.job)

    @property
    def role(self) -> str:
        """The job's role in the store."""
        return ROLE_PREFIX + self.keys.prefix.strip("/")

    @property
    def digest(self) -> str:
        """The part that the names of all the job's users share."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:_DIGEST_LENGTH]

    def user(self, issue: str) -> str:
        """Return the user of one certificate; ``issue`` is a random hexadecimal number."""
        return f"{USER_PREFIX}{self.digest}.{issue}"

    def owns(self, user: str) -> bool:
        """Return whether ``user`` belongs to this job."""
        return digest_of(user) == self.digest


def secret_name(job: str) -> str:
    """Return the Secret's name for a job; it is unique within the job's namespace."""
    if len(job) <= 200 and _SUBDOMAIN.fullmatch(job):
        return job + _SUFFIX
    return f"muster-store-{hashlib.sha256(job.encode()).hexdigest()[:32]}"


def digest_of(user: str) -> str | None:
    """Return the digest of the job that a user belongs to; None if it is not the controller's."""
    match = _USER.fullmatch(user)
    return match and match[1]


def job_of(role: str) -> JobName | None:
    """Return the job that a role belongs to; None if the role is not the controller's."""
    if not role.startswith(ROLE_PREFIX):
        return None
    parts = role.removeprefix(ROLE_PREFIX).split("/")
    if len(parts) != 4 or not all(parts):
        return None
    found = JobName(unquote(parts[2]), unquote(parts[3]))
    return found if found.role == role else None
