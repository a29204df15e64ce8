# SPDX-License-Identifier: Apache-2.0
"""The messages between the API server and a webhook: AdmissionReview, version 1."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.admission.decision import Verdict
from rdzv.errors import ConfigError

WARNING_LENGTH = 250
"""Maximum length of one warning; the API server truncates longer ones in the middle of a word."""
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
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"this is no AdmissionReview of a pod that is made: {error}") from error


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
