# SPDX-License-Identifier: Apache-2.0
"""The object that created a pod, as far as the pod shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from injection.kinds import FRAMEWORKS, KINDS, OF_VERSIONS, PLAIN_PATH, PodSigns, kind_of


@dataclass(frozen=True, slots=True)
class Owner:
    """An object with a pod template, and the path of this pod's template in it.

    ``read``: the object to read from the API for the rest, if the pod does not show enough; it may
    another object, as a pod of a JobSet is created by a Job. None: the pod shows enough.
    ``obstacle``: why its pods are not injected. ``must_be_read``: the pod alone never shows enough.
    """

    api_version: str
    kind: str
    name: str
    path: str
    read: Reference | None = None
    obstacle: str | None = None
    must_be_read: bool = False

    @property
    def group(self) -> str:
        """The API group."""
        return self.api_version.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to an object of the API."""

    api_version: str
    kind: str
    name: str
    uid: str


def owner_of(pod: Mapping[str, Any]) -> Owner | None:
    """Return the object that the pods of one job share; None for a pod without a controller."""
    metadata = pod.get("metadata") or {}
    labels: Mapping[str, str] = metadata.get("labels") or {}
    references = metadata.get("ownerReferences") or []
    maker = next((one for one in references if one.get("controller")), None)
    if maker is None:
        return None
    made_by = Reference(maker["apiVersion"], maker["kind"], maker["name"], maker.get("uid", ""))
    ways = _ways(made_by, labels)
    if ways:
        kind, shown = max(ways, key=lambda way: len(way[1].marks))
        return _shown(kind, shown, made_by, pod)
    owner = Owner(made_by.api_version, made_by.kind, made_by.name, PLAIN_PATH)
    if owner.group not in FRAMEWORKS:
        return owner
    known = " and ".join(kind for group, kind in KINDS if group == owner.group)
    why = f"a {owner.kind} of {owner.group} does not train through Muster: it knows {known}"
    return replace(owner, obstacle=why)


def _ways(maker: Reference, labels: Mapping[str, str]) -> list[tuple[str, PodSigns]]:
    """Return the kinds that a pod of this maker may be of, and how such a pod shows it."""
    of_maker = maker.api_version.rpartition("/")[0], maker.kind
    own = kind_of(maker.api_version, maker.kind)
    ways = [(maker.kind, one) for one in own.shown if one.maker is None] if own else []
    for (*_, kind), row in (*KINDS.items(), *OF_VERSIONS.items()):
        ways += [(kind, one) for one in row.shown if one.maker == of_maker]
    return [(kind, one) for kind, one in ways if _has(labels, one.marks)]


def _has(labels: Mapping[str, str], marks: Iterable[tuple[str, str]]) -> bool:
    return all(label in labels and value in ("", labels[label]) for label, value in marks)


def _shown(kind: str, shown: PodSigns, maker: Reference, pod: Mapping[str, Any]) -> Owner:
    """Return the owner that a pod shows in this way."""
    metadata = pod.get("metadata") or {}
    labels: Mapping[str, str] = metadata.get("labels") or {}
    name = labels.get(shown.named, "") if shown.named else maker.name
    if shown.suffix:
        name = name.removesuffix("-" + labels[shown.suffix])
    part = next((labels[label] for label in shown.parts if labels.get(label)), "")
    if shown.ending and metadata.get("name", "").endswith(f"-{shown.ending}"):
        part = shown.ending
    why = None
    if shown.made and (part not in shown.only or maker.name != shown.made.format(name=name)):
        why = f"its labels are of {kind} {name}, and {maker.kind} {maker.name} is not its launcher"
    elif shown.only and part not in shown.only:
        only = " or ".join(shown.only)
        why = f"no label of a pod of {kind} {name} says whether it is {only}"
    part = part or shown.otherwise or "worker"
    return Owner(
        shown.version or maker.api_version,
        kind,
        name,
        shown.path.format(part=part, Part=part.capitalize()),
        maker if shown.read else None,
        why,
        shown.must_be_read,
    )


def maker_of(owner: Owner, read: Mapping[str, Any]) -> Reference | None:
    """Return the owner itself if ``read`` is the batch Job that it has made; None if it is not.

    The pod of a launcher has the UID of that Job alone, and the Job that of the MPIJob.
    """
    references = (read.get("metadata") or {}).get("ownerReferences") or []
    for one in references:
        maker = Reference(one["apiVersion"], one["kind"], one["name"], one.get("uid", ""))
        if one.get("controller") and (maker.kind, maker.name) == (owner.kind, owner.name):
            return maker
    return None
