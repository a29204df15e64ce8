# SPDX-License-Identifier: Apache-2.0
"""A job's Secret: its names, the ``Grant`` that it has, and the jobs whose pods use it.

A user name contains the job and one certificate's issue. So no two certificates share a user, no
user is created twice for different ones, and deleting a user revokes exactly one certificate. The
jobs are those that the API server shows; requests to the webhook do not count: anybody in the
cluster can send one, and could have Secrets created in any namespace.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

from controller.access.decision import Grant
from controller.certificates import ClientPair
from controller.cluster.api import ClusterApi, Object
from controller.cluster.collection import Collection
from injection.kinds import job_label
from injection.settings import DOMAIN, LABEL, annotation
from rdzv import settings as texts
from rdzv.keys import JobKeys
from rdzv.reconcile import Loop, Outlook

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
_USER_NAME = re.compile(r"muster\.([0-9a-f]{24})\.[0-9a-f]{1,20}", re.ASCII)

MANAGED_BY, MANAGER = "app.kubernetes.io/managed-by", "muster-controller"
KEYS = ("ca.crt", "tls.crt", "tls.key")
ROTATE = DOMAIN + "rotate"
"""The annotation that requests a new certificate, with any value; the next write removes it."""

_JOB = DOMAIN + "job"
_USER, _NEXT, _FORMER = (DOMAIN + f"store-user{word}" for word in ("", "-next", "-former"))
_ISSUED, _UNUSED = DOMAIN + "store-issued", DOMAIN + "unused-since"

_YEARS = range(1970, 3000)
"""Years that are accepted in annotations: others are forged, and arithmetic could overflow."""

_OURS = frozenset({_JOB, _USER, _NEXT, _FORMER, _ISSUED, _UNUSED, ROTATE})

GATHER_S = 0.1
"""Delay to batch changes: pods of one job come together."""

_PODS = f"/api/v1/pods?labelSelector={quote(LABEL)}"


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
    match = _USER_NAME.fullmatch(user)
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


Fault = Callable[[ClientPair, str], str]
"""A function that returns the reason why a user cannot use a certificate; empty if it can."""


def is_ours(secret: Object) -> bool:
    """Return whether the Secret's label names the controller as its manager."""
    labels = (secret.get("metadata") or {}).get("labels") or {}
    return bool(labels.get(MANAGED_BY) == MANAGER)


def other_release(secret: Object, release: str) -> str:
    """Return the release that the Secret belongs to; empty if that is ``release``, or unknown."""
    its = str(((secret.get("metadata") or {}).get("labels") or {}).get(RELEASE, ""))
    return "" if its == release else its


def grant_of(
    secret: Object, job: JobName, authority: bytes, fault: Fault, release: str = ""
) -> Grant:
    """Parse a job's Secret; ``authority`` is that of the store's members, as PEM.

    Its annotations are not trusted, as any user who may write Secrets of the namespace can change
    them: a user that is not the job's own is ignored, so nobody gets a certificate of another job.
    """
    metadata = secret.get("metadata") or {}
    notes: Mapping[str, Any] = metadata.get("annotations") or {}
    users = {
        key: str(notes.get(key) or "") if job.owns(str(notes.get(key))) else ""
        for key in (_USER, _NEXT, _FORMER)
    }
    issued, unused = _time(notes.get(_ISSUED)), _time(notes.get(_UNUSED))
    found = _data(secret)
    why = ""
    if not users[_USER] or issued is None:
        why = "its annotations were changed"
    elif found is None or found[0] != authority:
        why = "the authority of the store is another one"
    else:
        why = fault(ClientPair(found[1], found[2]), users[_USER])
    return Grant(
        str(metadata.get("resourceVersion", "")),
        users[_USER],
        issued or datetime.min.replace(tzinfo=UTC),
        users[_NEXT],
        users[_FORMER],
        unused,
        ROTATE in notes,
        why,
        secret.get("immutable") is True,
        is_ours(secret) and str((metadata.get("labels") or {}).get(RELEASE, "")) == release,
    )


def object_of(
    held: Object | None,
    job: JobName,
    grant: Grant,
    pair: ClientPair | None,
    authority: bytes,
    release: str = "",
) -> Object:
    """Build the Secret that holds ``grant``; without a new ``pair`` it keeps its certificate."""
    before = held or {}
    metadata = dict(before.get("metadata") or {})
    notes = {k: v for k, v in (metadata.get("annotations") or {}).items() if k not in _OURS}
    said = {
        _JOB: job.job,
        _USER: grant.user,
        _NEXT: grant.next,
        _FORMER: grant.former,
        _ISSUED: grant.issued.isoformat(timespec="seconds"),
        _UNUSED: grant.unused_since and grant.unused_since.isoformat(timespec="seconds"),
        ROTATE: "asked" if grant.rotate_asked else "",
    }
    ours = {
        MANAGED_BY: MANAGER,
        LABEL: job_label(job.job),
        **({RELEASE: release} if release else {}),
    }
    labels = {**(metadata.get("labels") or {}), **ours}
    metadata |= {
        "name": job.secret,
        "namespace": job.namespace,
        "labels": labels,
        "annotations": {**notes, **{key: value for key, value in said.items() if value}},
    }
    data = dict(before.get("data") or {})
    if pair is not None:
        values = zip(KEYS, (authority, pair.certificate, pair.key), strict=True)
        data = {key: base64.b64encode(value).decode() for key, value in values}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": metadata,
        "data": data,
        **({"immutable": True} if grant.immutable else {}),
    }


def _data(secret: Object) -> tuple[bytes, bytes, bytes] | None:
    data = secret.get("data") or {}
    try:
        ca, certificate, key = (base64.b64decode(data[name], validate=True) for name in KEYS)
    except (KeyError, TypeError, binascii.Error):
        return None
    return ca, certificate, key


def _time(text: Any) -> datetime | None:
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return found if found.tzinfo is not None and found.year in _YEARS else None


def job_of_pod(pod: Object, release: str = "") -> JobName | None:
    """Return a pod's job if the pod uses the Secret that ``release`` keeps of that job, else None.

    A pod that names no release got its reference to the Secret from a person.
    """
    metadata = pod.get("metadata") or {}
    notes: dict[str, Any] = metadata.get("annotations") or {}
    said = notes.get(annotation("job")) or notes.get(NAMED_AFTER)
    job = said or (metadata.get("labels") or {}).get(LABEL)
    # Any user may put any text into a pod: a name that no job can have gets nothing.
    if not job or not is_a_name(str(job)):
        return None
    if notes.get(annotation("etcd_secret")) != secret_name(str(job)):
        return None
    if notes.get(RELEASE, release) != release:
        return None
    return JobName(str(metadata.get("namespace")), str(job))


class JobsWithPods(Loop):
    """The jobs of a release that have pods.

    ``changed`` is called with a job when its first pod comes and when its last one goes.
    """

    def __init__(self, api: ClusterApi, release: str = "") -> None:
        super().__init__()
        self.changed: Callable[[JobName], None] = lambda job: None
        self.known = asyncio.Event()
        """Set after the first complete list; before, the absence of a job's pods proves nothing."""
        of_pod = partial(job_of_pod, release=release)
        self._pods = Collection(api, _PODS, of_pod, metadata=True)
        self._jobs: frozenset[JobName] = frozenset()

    def __contains__(self, job: JobName) -> bool:
        return job in self._jobs

    def all(self) -> frozenset[JobName]:
        """Return every job that has a pod."""
        return self._jobs

    async def run(self) -> None:
        """Follow the pods until cancelled."""
        async with self._pods.following():
            await self._pods.changed_after(0)
            await super().run()

    async def step(self) -> Outlook:
        """Call ``changed`` with the jobs that have come or gone."""
        sequence = self._pods.sequence
        before, self._jobs = self._jobs, frozenset(self._pods.items.values())
        self.known.set()
        for job in before ^ self._jobs:
            self.changed(job)
        return Outlook(partial(self._pods.changed_after, sequence), burst_s=GATHER_S)
