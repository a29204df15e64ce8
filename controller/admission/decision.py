# SPDX-License-Identifier: Apache-2.0
"""The verdict on a pod that asks for a sidecar, and the AdmissionReview that tells it: pure.

It follows from the pod, its owner and the other parts of its job: a job is injected whole or not at
all. A pod is never rejected: if it cannot be injected, it is admitted as it is, with a warning.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from controller.access.secret import KEYS, NAMED_AFTER, RELEASE, is_a_name, secret_name
from controller.owner_kinds import Owner, manifest_of
from injection import sidecar
from injection.annotations import ANNOTATION
from injection.facts import starts_before
from injection.kinds import Kind, kind_of
from injection.placement import inject_pod
from injection.settings import ASKS, DOMAIN, TABLE, annotation
from injection.workloads import Template, Workload
from injection.yaml_tree import child, node_of, text_of, value_of
from rdzv.errors import ConfigError

OTHERS = (
    "{part} of {kind} {name} cannot be injected, and a job is injected whole or not at all: {why}"
)
LABELS = (
    "{part} and {other} of {kind} {name} do not agree on the label {label}: give both the same, for"
    " a job is injected whole or not at all"
)
UNREAD = (
    "{kind} {name} cannot be read, so whether its workers can be injected is not known: allow the"
    " controller to read it, or give {least} and {most} to both of its templates"
)

_SECURITY = "securityContext"

_JOB, _SECRET = TABLE["job"].variable, TABLE["etcd_secret"].variable
_KEYS = TABLE["etcd_secret_keys"].variable
_OWN = ("etcd_secret", "etcd_endpoints")

WITHOUT = "admitted without Muster: "
_MIRROR = "kubernetes.io/config.mirror"
"""The annotation by which a kubelet shows the API server a static pod of its node."""
_NAMES = "|".join(sorted((one.flag.removeprefix("--") for one in TABLE.values()), key=len)[::-1])
_FLAG = re.compile(
    rf"(?<![\w-])--(?P<no>no-)?(?P<name>{_NAMES})(?P<variable> \(MUSTER_[A-Z_]+\))?(?![\w-])"
)

WARNING_LENGTH = 250
"""Maximum length of one warning; the API server truncates longer ones in the middle of a word."""
UID_WITHIN = 512
"""Number of bytes at the beginning of a request in which its UID is."""
_UID = re.compile(rb'"request":\s?\{\s?"uid":\s?"([A-Za-z0-9-]{1,64})"', re.ASCII)
WARNINGS_MAX = 12
"""Maximum number of warnings; together they may have 4096 characters."""


def obstacle_of_others(
    owner: Owner, namespace: str, read: Mapping[str, Any], environ: Mapping[str, str]
) -> str | None:
    """Return why another part of the pod's job cannot be injected; None if all parts can.

    A launcher whose workers have no sidecar waits for them for ever. Pods come one by one, so
    each verdict looks at all templates of the owner: a job is injected whole, or not at all.
    """
    about = {"apiVersion": owner.api_version, "kind": owner.kind}
    manifest = {**read, **about, "metadata": {"name": owner.name, "namespace": namespace}}
    parts = Workload(node_of(manifest)).templates()
    own = next((part for part in parts if part.path == owner.path), None)
    if read.get("kind") != owner.kind or own is None:
        return None
    named = {"kind": owner.kind, "name": owner.name}
    for other in parts:
        if other.path == owner.path or _is_injected(other):
            continue
        if _label_of_part(other) != _label_of_part(own):
            return LABELS.format(
                part=_name_of_part(other), other=_name_of_part(own), label=ASKS, **named
            )
        try:
            inject_pod(manifest, other.path, other.role, environ)
        except ConfigError as error:
            why, *_ = str(error).splitlines()
            return OTHERS.format(part=_name_of_part(other), why=why, **named)
    return None


def obstacle_of_unread(
    owner: Owner, pod: Mapping[str, Any], environ: Mapping[str, str]
) -> str | None:
    """Return why a launcher is not injected if its object cannot be read; None if it may be.

    Its own command has the size of the job, and its workers' pods do not.
    """
    kind = kind_of(owner.api_version, owner.kind) or Kind(())
    if kind.launcher is None or owner.path != kind.launcher:
        return None
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    bounds = ("min_nodes", "max_nodes")
    if all(annotation(one) in annotations or environ.get(TABLE[one].variable) for one in bounds):
        return None
    least, most = map(annotation, bounds)
    return UNREAD.format(kind=owner.kind, name=owner.name, least=least, most=most)


def _is_injected(part: Template) -> bool:
    return ANNOTATION in (value_of(child(part.node, "metadata", "annotations")) or {})


def _label_of_part(part: Template) -> str:
    return text_of(child(part.node, "metadata", "labels", ASKS))


def _name_of_part(part: Template) -> str:
    return part.path.split(".")[-2]


def with_security_context(pod: Mapping[str, Any], owner: Owner | None) -> Mapping[str, Any]:
    """Return the pod with the operator's container as restricted as the user's.

    It gets the security context of the template's first container. The pod is returned unchanged if
    that container has none, or the operator's has one already.
    """
    kind = kind_of(owner.api_version, owner.kind) if owner is not None else None
    name = kind.delivered if kind is not None else ""
    spec: Mapping[str, Any] = pod.get("spec") or {}
    inits: list[Mapping[str, Any]] = spec.get("initContainers") or []
    containers: list[Mapping[str, Any]] = spec.get("containers") or []
    users = containers[0].get(_SECURITY) if containers else None
    if not name or not users:
        return pod
    completed = [
        {**one, _SECURITY: users} if one.get("name") == name and not one.get(_SECURITY) else one
        for one in inits
    ]
    return {**pod, "spec": {**spec, "initContainers": completed}} if inits else pod


Operation = dict[str, Any]


def difference(before: Any, after: Any, path: str = "") -> Iterator[Operation]:
    """Yield the operations, in an order in which they can be applied."""
    if before == after and type(before) is type(after):
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in [*before, *(key for key in after if key not in before)]:
            below = f"{path}/{_escaped(key)}"
            if key not in after:
                yield {"op": "remove", "path": below}
            elif key not in before:
                yield {"op": "add", "path": below, "value": after[key]}
            else:
                yield from difference(before[key], after[key], below)
        return
    if isinstance(before, list) and isinstance(after, list) and before:
        # Muster puts items into lists in one place: the patch adds them there, and shows no more.
        new = len(after) - len(before)
        if new >= 0:
            pairs = zip(before, after, strict=False)
            same = next((n for n, (old, now) in enumerate(pairs) if old != now), len(before))
            for value in reversed(after[same : same + new]):
                yield {"op": "add", "path": f"{path}/{same}", "value": value}
            for index in range(same, len(before)):
                yield from difference(before[index], after[index + new], f"{path}/{index + new}")
            return
    yield {"op": "replace", "path": path, "value": after}


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


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


@dataclass(frozen=True, slots=True)
class Review:
    """The API server's question about one pod."""

    uid: str
    namespace: str
    pod: Mapping[str, Any]


def read_review(body: bytes) -> Review:
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


def answer_to(uid: str, verdict: Verdict) -> bytes:
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
