# SPDX-License-Identifier: Apache-2.0
"""Conversion between a job's Secret in the API and the ``Grant`` that the decision uses."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from controller.access.certificates import ClientPair
from controller.access.decision import Grant
from controller.access.names import RELEASE, JobName
from controller.cluster.api import Object
from injection.job_label import job_label
from injection.settings import DOMAIN, LABEL

MANAGED_BY, MANAGER = "app.kubernetes.io/managed-by", "muster-controller"
KEYS = ("ca.crt", "tls.crt", "tls.key")
ROTATE = DOMAIN + "rotate"
"""The annotation that requests a new certificate, with any value; the next write removes it."""

_JOB = DOMAIN + "job"
_USER, _NEXT, _FORMER = (DOMAIN + f"store-user{word}" for word in ("", "-next", "-former"))
_ISSUED, _UNUSED = DOMAIN + "store-issued", DOMAIN + "unused-since"

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


_YEARS = range(1970, 3000)
"""Years that are accepted in annotations: others are forged, and arithmetic could overflow."""

_OURS = frozenset({_JOB, _USER, _NEXT, _FORMER, _ISSUED, _UNUSED, ROTATE})


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
