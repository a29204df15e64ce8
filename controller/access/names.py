# SPDX-License-Identifier: Apache-2.0
"""What belongs to one job: the names of its Secret, its role and its users. Pure.

A user is named for the job and for one certificate. So no two certificates share a user, no user is
made twice for different ones, and to remove a user is to take one certificate's rights away.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import unquote

from agent.config import parsers as texts
from rdzv.keys import JobKeys

ROLE_PREFIX = "controller/"
"""Before the names of the controller's roles: those of ``muster store-role`` are not touched."""
USER_PREFIX = "muster."
"""A user name is ``muster.DIGEST.ISSUE``: the name in a certificate has 64 characters at most."""

_DIGEST_LENGTH = 24
_SUFFIX = "-muster-store"
_SUBDOMAIN = re.compile(
    r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", re.ASCII
)
_USER = re.compile(r"muster\.([0-9a-f]{24})\.[0-9a-f]{1,20}", re.ASCII)


def is_a_name(job: str) -> bool:
    """Whether a job can be named so."""
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
        """Its keys in the store."""
        return JobKeys(self.namespace, self.job)

    @property
    def secret(self) -> str:
        """The Secret of its namespace with its certificate."""
        return secret_name(self.job)

    @property
    def role(self) -> str:
        """Its role in the store."""
        return ROLE_PREFIX + self.keys.prefix.strip("/")

    @property
    def digest(self) -> str:
        """What its users' names have in common."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:_DIGEST_LENGTH]

    def user(self, issue: str) -> str:
        """The user of one certificate; ``issue`` is a random hexadecimal number."""
        return f"{USER_PREFIX}{self.digest}.{issue}"

    def owns(self, user: str) -> bool:
        """Whether a user is one of this job's."""
        return digest_of(user) == self.digest


def secret_name(job: str) -> str:
    """A Secret's name for a job of its namespace; no two jobs share one."""
    if len(job) <= 200 and _SUBDOMAIN.fullmatch(job):
        return job + _SUFFIX
    return f"muster-store-{hashlib.sha256(job.encode()).hexdigest()[:32]}"


def digest_of(user: str) -> str | None:
    """Which job a user belongs to; None for one that the controller has not made."""
    match = _USER.fullmatch(user)
    return match and match[1]


def job_of(role: str) -> JobName | None:
    """Which job a role belongs to; None for one that the controller has not made."""
    if not role.startswith(ROLE_PREFIX):
        return None
    parts = role.removeprefix(ROLE_PREFIX).split("/")
    if len(parts) != 4 or not all(parts):
        return None
    found = JobName(unquote(parts[2]), unquote(parts[3]))
    return found if found.role == role else None
