# SPDX-License-Identifier: Apache-2.0
"""The reference from a pod to its job's Secret: set at admission, before the Secret exists.

The Secret's name follows from the job's. The kubelet waits for a Secret that a pod refers to, so
the webhook need not, and makes no call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.access.names import is_a_name, secret_name
from controller.access.secret import KEYS
from injection.settings import TABLE, annotation
from rdzv.errors import ConfigError

_JOB, _SECRET = TABLE["job"].variable, TABLE["etcd_secret"].variable
_KEYS = TABLE["etcd_secret_keys"].variable
_OWN = ("etcd_secret", "etcd_endpoints")


def with_secret(
    manifest: Mapping[str, Any],
    pod: Mapping[str, Any],
    namespace: str,
    environ: Mapping[str, str],
) -> Mapping[str, str]:
    """Return the settings with the job's own Secret; the job's name is not among them.

    Only a person names a job by a setting. The settings are unchanged if the pod or the chart names
    a Secret, or if the pod names an etcd. Raises ``ConfigError`` for a job that can have no Secret:
    of another namespace, or named after an object by a name that no job can have.
    """
    notes: Mapping[str, str] = (pod.get("metadata") or {}).get("annotations") or {}
    if environ.get(_SECRET) or any(annotation(name) in notes for name in _OWN):
        return environ
    told = manifest["metadata"].get("name") if manifest.get("kind") != "Pod" else None
    job = str(notes.get(annotation("job")) or environ.get(_JOB) or told or "")
    if notes.get(annotation("namespace"), namespace) != namespace:
        raise ConfigError(
            f"the annotation {annotation('namespace')} names another namespace than the pod's: its"
            " records are for its own pods alone; leave it out, or name a Secret by the annotation"
            f" {annotation('etcd_secret')}"
        )
    if job == told and not is_a_name(job):
        raise ConfigError(
            f"the name of the pod's object, {TABLE['job'].quote(job)}, is none that a job can have:"
            f" name the job by the annotation {annotation('job')}"
        )
    # Without a name the plan is refused for that alone: a Secret is not missing.
    return {**environ, _SECRET: secret_name(job or "job"), _KEYS: ",".join(KEYS)}
