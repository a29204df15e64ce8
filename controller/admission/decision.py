# SPDX-License-Identifier: Apache-2.0
"""The verdict on a pod that asks for a sidecar: a pure function of the pod and its owner.

A pod is never rejected: if it cannot be injected, it is admitted as it is, with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.access.names import NAMED_AFTER, RELEASE
from controller.access.reference import with_secret
from controller.admission.json_patch import Operation, difference
from controller.admission.manifest import manifest_of
from controller.admission.operator_containers import with_security_context
from controller.admission.owner import Owner
from controller.admission.whole import obstacle_of_others, obstacle_of_unread
from injection import sidecar
from injection.annotations import ANNOTATION
from injection.facts import starts_before
from injection.pod import inject_pod
from injection.settings import DOMAIN, TABLE, annotation
from rdzv.errors import ConfigError

WITHOUT = "admitted without Muster: "
_MIRROR = "kubernetes.io/config.mirror"
"""The annotation by which a kubelet shows the API server a static pod of its node."""
_NAMES = "|".join(sorted((one.flag.removeprefix("--") for one in TABLE.values()), key=len)[::-1])
_FLAG = re.compile(
    rf"(?<![\w-])--(?P<no>no-)?(?P<name>{_NAMES})(?P<variable> \(MUSTER_[A-Z_]+\))?(?![\w-])"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The operations that add the sidecar, warnings for kubectl, and the reason in a sentence."""

    patch: tuple[Operation, ...]
    warnings: tuple[str, ...]
    reason: str

    @property
    def injected(self) -> bool:
        """Whether the pod gets a sidecar by this verdict."""
        return bool(self.patch)


def decide(
    pod: Mapping[str, Any],
    namespace: str,
    owner: Owner | None,
    read: Mapping[str, Any] | None,
    environ: Mapping[str, str],
    *,
    access: bool = False,
    release: str = "",
) -> Verdict:
    """Plan the sidecar of a pod that is about to be created in ``namespace``.

    ``read``: the object that ``owner.read`` names, or None if it could not be read. ``environ``:
    the defaults for what neither pod nor owner specify, by the variables of ``muster inject``.
    ``access``: whether each job has a Secret of its own, and ``release``: which release keeps it.
    """
    if has_sidecar(pod):
        moved = behind_proxies(pod["spec"])
        return Verdict(tuple(difference(pod["spec"], moved, "/spec")), (), "it has its sidecar")
    if (obstacle := _obstacle(pod, owner, read, environ)) is not None:
        return without(obstacle)
    restricted = with_security_context(pod, owner)
    manifest, path, role = manifest_of(restricted, namespace, owner, read)
    try:
        if access:
            environ = with_secret(manifest, pod, namespace, environ)
        made = inject_pod(manifest, path, role, environ)
        if owner is not None and read is not None:
            others = obstacle_of_others(owner, namespace, read, environ)
            if others is not None:
                return without(in_words_of_a_pod(others))
    except ConfigError as error:
        faults = in_words_of_a_pod(str(error)).splitlines()
        return Verdict((), tuple(WITHOUT + line for line in faults), "; ".join(faults))
    after = {**restricted, **made.template}
    annotations = dict(after["metadata"]["annotations"])
    if release:
        annotations[RELEASE] = release
    if access and annotation("job") not in annotations:
        annotations[NAMED_AFTER] = manifest["metadata"]["name"]
    after["metadata"] = {**after["metadata"], "annotations": annotations}
    complete = owner is None or owner.read is None or read is not None
    # Without the owner the plan lacks facts: its warnings would be guesses.
    notes = [note for note in made.notes if note.level == "warning"] if complete else []
    warnings = tuple(map(in_words_of_a_pod, notes))
    return Verdict(tuple(difference(pod, after)), warnings, "its sidecar is put in")


def without(reason: str) -> Verdict:
    """Return the verdict that admits a pod as it is, for one reason."""
    return Verdict((), (WITHOUT + reason,), reason)


def _obstacle(
    pod: Mapping[str, Any],
    owner: Owner | None,
    read: Mapping[str, Any] | None,
    environ: Mapping[str, str],
) -> str | None:
    """Return why a pod is never injected, whatever its settings; None if there is no reason."""
    if _MIRROR in ((pod.get("metadata") or {}).get("annotations") or {}):
        return "it mirrors a static pod of its node, which has no Secret and cannot be changed"
    if owner is None:
        return None
    if owner.obstacle is None and owner.must_be_read and read is None:
        return f"{owner.kind} {owner.name} cannot be read, so what its launcher runs is not known"
    if owner.obstacle is None and read is None:
        return obstacle_of_unread(owner, pod, environ)
    return owner.obstacle


def has_sidecar(pod: Mapping[str, Any]) -> bool:
    """Return whether ``muster inject`` or an earlier admission has added the sidecar already."""
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    first = (pod.get("spec") or {}).get("initContainers") or []
    return ANNOTATION in annotations and any(one.get("name") == sidecar.NAME for one in first)


def behind_proxies(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the pod spec with its sidecar behind a mesh's native proxy.

    A mesh whose webhook runs later, or a manifest with the sidecar in it, may have it otherwise.
    """
    inits = spec["initContainers"]
    index = next(number for number, one in enumerate(inits) if one.get("name") == sidecar.NAME)
    behind = starts_before(spec)
    if index >= behind:
        return spec
    moved = [*inits[:index], *inits[index + 1 : behind], inits[index], *inits[behind:]]
    return {**spec, "initContainers": moved}


def in_words_of_a_pod(text: str) -> str:
    """Replace each flag in ``text`` by the setting's annotation: nobody has typed a flag here."""
    return _FLAG.sub(_annotation, text)


def _annotation(flag: re.Match[str]) -> str:
    name = f"{DOMAIN}{flag['name']}"
    if flag["no"]:
        name += ': "false"'
    return f"the annotation {name}" if flag["variable"] else name
