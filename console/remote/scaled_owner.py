# SPDX-License-Identifier: Apache-2.0
"""The object whose count makes a job's pods, its claim by one operation, and the pods; pure.

The claim is an annotation of the owner, written by compare. A pod is the API server's view and the
store's beside each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agent.verdict.view import moment
from console.remote.pods import JobPod
from controller.owner_kinds import Owner
from injection.counts import below
from injection.kinds import KINDS, Kind, Scaling, kind_of
from rdzv.errors import ConfigError

ANNOTATION = "muster.dev/scaling"

GRACE_S = 60.0
"""Time beyond its deadline that a claim holds: for its last writes, and for clocks that differ."""

TRAINS = frozenset({"training", "finishing"})
"""Activities of a member that has a place in a world."""

TAKES_PART = frozenset({"listed", "standby"})
"""States of a member that a world may have."""


@dataclass(frozen=True, slots=True)
class ScaledOwner:
    """An owner and its count.

    ``count``: the pods that it asks for, of those that train; ``fixed`` of them have a template
    that is not scaled, as a PyTorchJob's Master. ``first``: the lowest index of its pods.
    ``path``: of the object in the API. ``minimum``: the smallest count that it takes. ``uid``: of
    the object. ``kind`` and ``way``: its kind, and how the count of that is changed.
    """

    kind: str
    name: str
    path: str
    count: int
    way: Scaling
    uid: str = ""
    first: int = 0
    fixed: int = 0
    minimum: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def ordinal(self) -> bool:
        """Whether its pods have indexes, and it drops the highest."""
        return self.way.by_index

    @property
    def template(self) -> str:
        """The path of the template whose pods are scaled."""
        return f"{self.way.numbers[0].rpartition('.')[0]}.template"

    def change(self, count: int) -> tuple[str, dict[str, Any]]:
        """Return the path and the merge patch by which its pods become ``count``."""
        number = count - self.fixed
        if self.way.by_scale:
            return f"{self.path}/scale", {"spec": {"replicas": number}}
        patch: dict[str, Any] = {}
        for path in self.way.numbers:
            *words, last = path.split(".")
            there = patch
            for word in words:
                there = there.setdefault(word, {})
            there[last] = number
        return self.path, patch

    def count_in(self, read: Mapping[str, Any]) -> int:
        """Return the count in the same object as it was read again."""
        number = _at(read, self.way.numbers[0])
        return self.fixed + (number if type(number) is int else 1)


def scaled_owner(owner: Owner | None, path: str | None, read: Mapping[str, Any]) -> ScaledOwner:
    """Return an owner that can be scaled, as ``read`` at ``path``.

    Raises ``ConfigError`` with the one command that does it for any other.
    """
    if owner is None:
        raise ConfigError(
            "its pods have no controller, which could make or end others: kubectl delete pod NAME"
            " ends one, after a save"
        )
    kind = kind_of(owner.api_version, owner.kind) or Kind(())
    if path is None or kind.scaled is None:
        command = kind.by_hand or f"kubectl edit {owner.kind.lower()}/{{name}}"
        raise ConfigError(
            f"muster does not change the count of a {owner.kind}: use"
            f" {command.format(name=owner.name)}; muster drain POD before saves first"
        )
    numbers = [_number(owner, read, one) for one in kind.scaled.numbers]
    _check(owner, read, numbers)
    parts = [] if kind.counts is None else list(kind.counts(read))
    fixed = max(0, sum(part.pods for part in parts) - numbers[0])
    return ScaledOwner(
        owner.kind,
        owner.name,
        path,
        numbers[0] + fixed,
        kind.scaled,
        str((read.get("metadata") or {}).get("uid", "")),
        _at(read, kind.scaled.first, 0) if kind.scaled.first else 0,
        fixed,
        max(kind.scaled.least, fixed),
    )


def _check(owner: Owner, read: Mapping[str, Any], numbers: Sequence[int]) -> None:
    """Refuse an object whose numbers of pods cannot be changed together, a Job's."""
    if len(numbers) < 2:
        return
    if below(read, "spec").get("completionMode") != "Indexed":
        raise ConfigError(
            f"Job {owner.name} is not Indexed, and chooses itself which pods go: kubectl patch job"
            f' {owner.name} --type=merge -p \'{{"spec":{{"parallelism":N}}}}\' changes its count'
        )
    if len(set(numbers)) > 1:
        parallelism, completions = numbers
        raise ConfigError(
            f"Job {owner.name} has {completions} completions and a parallelism of {parallelism}:"
            " both are scaled together, and Kubernetes takes that only if they are equal"
        )


def _number(owner: Owner, read: Mapping[str, Any], path: str) -> int:
    holder = path.split(".")[-2]
    if holder != "spec" and not isinstance(_at(read, path.rpartition(".")[0]), Mapping):
        raise ConfigError(f"{owner.kind} {owner.name} has no {holder}, which could be scaled")
    number = _at(read, path)
    return number if type(number) is int else 1


def _at(found: Any, path: str, otherwise: Any = None) -> Any:
    """Return the value at a path; ``otherwise`` if there is none."""
    for word in path.split("."):
        found = found.get(word) if isinstance(found, Mapping) else None
    return otherwise if found is None else found


@dataclass(frozen=True, slots=True)
class OperationClaim:
    """One operation: ``what`` it does, ``by`` whom, until when it holds; ``token`` tells it apart.

    ``most``: the job's max, which the operation has lowered and is to set back; None if not.
    """

    what: str
    by: str
    until_unix_s: float
    token: str
    most: int | None = None


def claim_patch(claim: OperationClaim | None) -> dict[str, Any]:
    """Return the merge patch that writes a claim to an owner, or takes it away."""
    value = None if claim is None else json.dumps(asdict(claim))
    return {"metadata": {"annotations": {ANNOTATION: value}}}


def claim_of(owner: Mapping[str, Any]) -> OperationClaim | None:
    """Return the claim that an owner has; None without one, or with one that cannot be read."""
    notes = (owner.get("metadata") or {}).get("annotations") or {}
    try:
        found = json.loads(notes[ANNOTATION])
        most = found.get("most")
        return OperationClaim(
            str(found["what"]),
            str(found["by"]),
            float(found["until_unix_s"]),
            str(found["token"]),
            most if type(most) is int else None,
        )
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def claim_refusal(held: OperationClaim | None, now_unix_s: float) -> str:
    """Return why no other operation may begin now, in one sentence; empty if one may."""
    if held is None or held.until_unix_s <= now_unix_s:
        return ""
    return (
        f"{held.by} runs {held.what} on it, until {moment(held.until_unix_s)} at the latest: wait"
        " for that"
    )


@dataclass(frozen=True, slots=True)
class ScaledPod:
    """One pod of a job.

    ``index``: -1 without one. ``node``: empty before it is placed. ``template``: the path of its
    own in its owner; ``launcher``: that of a launcher; ``fixed``: one whose pods are not scaled.
    ``maker``: the object that made it. ``pending``: no container of it has started; ``why``.
    ``over``: all of its containers have ended. ``created_s``: Unix time, 0.0 if unknown. ``cost``:
    its deletion cost, if a scale-in gives it one. ``state`` and ``doing``: those of its member in
    the store, empty without one. ``step``: the last one that it has reported. ``waits``: the share
    of its time that its slowest rank waits for others; None if unknown.
    """

    name: str
    uid: str = ""
    index: int = -1
    node: str = ""
    template: str = ""
    launcher: bool = False
    fixed: bool = False
    maker: str = ""
    pending: bool = False
    why: str = ""
    ready: bool = True
    deleting: bool = False
    over: bool = False
    created_s: float = 0.0
    cost: int = 0
    spot: bool = False
    state: str = ""
    doing: str = ""
    step: int | None = None
    waits: float | None = None

    @property
    def trains(self) -> bool:
        """Whether it has a place in a world."""
        return self.doing in TRAINS

    @property
    def is_silent(self) -> bool:
        """Whether it is a central launcher's host, no rank of which has reported anything."""
        return self.takes_part and self.doing == "ready"

    @property
    def takes_part(self) -> bool:
        """Whether it is a member that a world may have, and all its containers are ready."""
        return self.ready and not self.deleting and self.state in TAKES_PART

    @property
    def described(self) -> str:
        """Its activity, in a few words."""
        if not self.state:
            # The scheduler's first sentence says what is missing, the others what it tried.
            why = self.why.partition(". ")[0]
            return f"not started ({why})" if why else "not a member yet"
        step = "" if self.step is None else f" at step {self.step:,}"
        return f"{self.doing or self.state}{step}"


def scaled_pod(pod: JobPod) -> ScaledPod:
    """Reduce a pod to what scaling needs."""
    owner, template = pod.owner, pod.owner.path if pod.owner else ""
    kind = (kind_of(owner.api_version, owner.kind) if owner else None) or Kind(())
    return ScaledPod(
        name=pod.name,
        uid=pod.uid,
        index=_index(pod.labels, pod.name, kind),
        node=pod.node,
        template=template,
        launcher=bool(template) and template == kind.launcher,
        maker=pod.maker[1] if pod.maker else "",
        pending=pod.phase == "Pending",
        why=pod.why_pending,
        ready=pod.ready,
        deleting=pod.deleting,
        over=pod.phase in ("Succeeded", "Failed"),
        created_s=pod.created_unix_s,
        spot=bool(pod.spot),
    )


def joined(
    pods: Iterable[ScaledPod], owner: ScaledOwner, members: Iterable[Mapping[str, Any]]
) -> tuple[ScaledPod, ...]:
    """Return the pods that ``owner`` counts, with their members as ``muster status`` has them.

    Pods whose containers have ended are left out.
    """
    by_name = {str(one.get("name")): one for one in members}
    found = []
    for pod in pods:
        if pod.over or pod.launcher:
            continue
        member = by_name.get(pod.name, {})
        step, waits = member.get("step"), member.get("waits")
        found.append(
            replace(
                pod,
                fixed=pod.template not in ("", owner.template),
                state=str(member.get("state") or ""),
                doing=str(member.get("doing") or ""),
                step=step if type(step) is int else None,
                waits=waits if type(waits) in (int, float) else None,
            )
        )
    return tuple(sorted(found, key=lambda pod: (pod.index, pod.created_s, pod.name)))


def _index(labels: Mapping[str, str], name: str, kind: Kind) -> int:
    """Return the index by a label, whichever object made the pod, or by its name."""
    of_label = (row.index_label for row in KINDS.values() if row.index_label in labels)
    label = next(of_label, None)
    number = labels[label] if label else ""
    pattern = kind.scaled.index if kind.scaled is not None else None
    if not number and pattern is not None and (found := pattern.search(name)):
        number = found[1]
    return int(number) if number.isdecimal() else -1
