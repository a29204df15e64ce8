# SPDX-License-Identifier: Apache-2.0
"""The messages between the API server and a webhook: AdmissionReview, version 1."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.admission.decision import Verdict
from rdzv.errors import ConfigError

WARNING_LENGTH = 250
"""Maximum length of one warning; the API server truncates longer ones in the middle of a word."""
UID_WITHIN = 512
"""Number of bytes at the beginning of a request in which its UID is."""
_UID = re.compile(rb'"request":\s?\{\s?"uid":\s?"([A-Za-z0-9-]{1,64})"', re.ASCII)
WARNINGS_MAX = 12
"""Maximum number of warnings; together they may have 4096 characters."""


@dataclass(frozen=True, slots=True)
class Review:
    """The API server's question about one pod."""

    uid: str
    namespace: str
    pod: Mapping[str, Any]


def read(body: bytes) -> Review:
    """Parse a request; raises ``ConfigError`` if it is not the creation of a pod."""
    try:
        message = json.loads(body)
        request = message["request"]
        pod = request["object"]
        if not isinstance(pod["spec"], dict) or not isinstance(pod.get("metadata") or {}, dict):
            raise TypeError("its spec or its metadata is no mapping")
        uid, namespace = str(request["uid"]), str(request.get("namespace") or "default")
        return Review(uid, namespace, pod)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"this is no AdmissionReview of a pod that is made: {error}") from error


def uid_of(body: bytes) -> str:
    """Find the UID of a request that is too large to parse; raises ``ConfigError``.

    The API server writes it before the object.
    """
    found = _UID.search(body, 0, UID_WITHIN)
    if found is None:
        raise ConfigError("this is no AdmissionReview of the API server: its UID is not the first")
    return found[1].decode()


def answer(uid: str, verdict: Verdict) -> bytes:
    """Build the response: it allows the pod, whatever the verdict."""
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if verdict.patch:
        text = json.dumps(verdict.patch).encode()
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(text).decode()}
    if verdict.warnings:
        shown = [_cut(f"muster: {warning}") for warning in verdict.warnings[:WARNINGS_MAX]]
        response["warnings"] = shown
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
    return json.dumps(review).encode()


def _cut(text: str) -> str:
    return text if len(text) <= WARNING_LENGTH else text[: WARNING_LENGTH - 1] + "…"
