# SPDX-License-Identifier: Apache-2.0
"""The templates of an object and the pods that it asks for of each; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TemplateCount:
    """One pod template of an object, and the number of pods created from it."""

    template: Mapping[str, Any]
    pods: int


Count = Callable[[Mapping[str, Any]], Iterator[TemplateCount]]
"""Returns the parts whose pods train, of an object."""


def of_replicas(path: str, *, needs_number: bool = False) -> Count:
    """Return the count by ``replicas`` beside ``template`` at ``path``; ``*`` is every entry.

    ``needs_number``: the API server fills the number in, so an object without it is not whole.
    """

    def counted(owner: Mapping[str, Any]) -> Iterator[TemplateCount]:
        for replica in _at(owner, path.split(".")):
            if "replicas" in replica or not needs_number:
                yield TemplateCount(below(replica, "template"), count(replica, "replicas"))

    return counted


def of_job(owner: Mapping[str, Any]) -> Iterator[TemplateCount]:
    """Yield the part of a batch Job; no more pods run at a time than have to complete."""
    spec = below(owner, "spec")
    if "parallelism" in spec:
        yield _of_job(spec)


def of_jobs(owner: Mapping[str, Any]) -> Iterator[TemplateCount]:
    """Yield the parts of an object with ``replicatedJobs``."""
    for job in below(owner, "spec").get("replicatedJobs") or []:
        part = _of_job(below(below(job, "template"), "spec"))
        yield TemplateCount(part.template, part.pods * count(job, "replicas"))


def of_groups(owner: Mapping[str, Any]) -> Iterator[TemplateCount]:
    """Yield the parts of groups of pods; a leader without a template of its own is a worker."""
    spec = below(owner, "spec")
    groups, group = count(spec, "replicas"), below(spec, "leaderWorkerTemplate")
    if not group:
        return
    size, leader = count(group, "size"), group.get("leaderTemplate")
    if leader is not None:
        yield TemplateCount(below(group, "leaderTemplate"), groups)
        size -= 1
    yield TemplateCount(below(group, "workerTemplate"), groups * size)


def below(found: Any, key: str) -> Mapping[str, Any]:
    """Return the mapping at a key; an empty one if there is none."""
    there = found.get(key) if isinstance(found, Mapping) else None
    return there if isinstance(there, Mapping) else {}


def count(found: Any, key: str, otherwise: int = 1) -> int:
    """Return a number of pods; ``otherwise``, the API server's or operator's default, if unset."""
    number = found.get(key) if isinstance(found, Mapping) else None
    return number if type(number) is int else otherwise


def _of_job(spec: Mapping[str, Any]) -> TemplateCount:
    pods = count(spec, "parallelism")
    return TemplateCount(below(spec, "template"), min(pods, count(spec, "completions", pods)))


def _at(found: Any, words: list[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the mappings at a path."""
    if not words:
        if isinstance(found, Mapping):
            yield found
        return
    first, *rest = words
    if isinstance(found, Mapping):
        for value in found.values() if first == "*" else [found.get(first)]:
            yield from _at(value, rest)
