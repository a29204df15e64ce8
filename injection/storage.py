# SPDX-License-Identifier: Apache-2.0
"""The storage of a container's checkpoints: whether it outlives the pod, as far as a spec shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from injection.facts import listed

NO_STORAGE = (
    "container {name} mounts no volume that outlives its pod: a checkpoint on its own disk is gone"
    " with the pod that wrote it: mount one that all pods share, or save to object storage"
)

_WITH_THE_POD = frozenset(
    {
        "emptyDir",
        "ephemeral",
        "configMap",
        "secret",
        "projected",
        "downwardAPI",
        "image",
        "gitRepo",
    }
)
"""Kinds of volumes that end with their pod, or that nothing is written to."""
_OF_SECRETS = "secrets-store.csi.k8s.io"
_OF_THE_NODE = re.compile(r"/(dev|etc|lib|proc|run|sys|usr|var/run)(/.*)?")
_OBJECT_STORE = re.compile(
    r"\b(s3[an]?|gs|gcs|az|abfss?|wasbs?|oss|cos|obs|hdfs|swift|tos|r2)://", re.ASCII
)


def lasts(pod: Mapping[str, Any], container: Mapping[str, Any]) -> bool:
    """Return whether a container may save where a checkpoint outlives its pod.

    That is a volume, or an object store that its command or a variable names. A claim of one pod
    alone, as a StatefulSet makes it, is none: the other pods do not find it.
    """
    volumes = {one.get("name"): one for one in listed(pod, "volumes")}
    mounts = (volumes.get(one.get("name")) for one in listed(container, "volumeMounts"))
    if any(one is not None and _outlives(one) for one in mounts):
        return True
    words = [*listed(container, "command"), *listed(container, "args")]
    variables = [one.get("value") for one in listed(container, "env")]
    return any(_OBJECT_STORE.search(str(text)) for text in (*words, *variables))


def _outlives(volume: Mapping[str, Any]) -> bool:
    kinds = {key for key, value in volume.items() if key != "name" and value is not None}
    if kinds & _WITH_THE_POD:
        return False
    driver = (volume.get("csi") or {}).get("driver")
    path = str((volume.get("hostPath") or {}).get("path", ""))
    return bool(kinds) and driver != _OF_SECRETS and not _OF_THE_NODE.fullmatch(path)
