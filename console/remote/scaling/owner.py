# SPDX-License-Identifier: Apache-2.0
"""The object whose count makes a job's pods, and how that count is changed; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.owner_kinds import Owner
from injection.counts import below
from injection.kinds import Kind, Scaling, kind_of
from rdzv.errors import ConfigError


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
