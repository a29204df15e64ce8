# SPDX-License-Identifier: Apache-2.0
"""The history and the seats of a job, asked for in one of its sidecars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from console.remote.followed import FollowedCommand, last_object, object_in
from console.remote.pods import JobPod
from console.remote.sidecar import ask
from controller.cluster.api import ClusterApi
from rdzv.errors import ClusterUnavailable
from rdzv.records.history import HistoryEntry

ANSWER_S = 30.0
"""Timeout of a question: a Python starts in a container whose processor may be throttled."""


def entries_in(text: str) -> list[HistoryEntry]:
    """Read the lines of ``muster history --json``; what another version writes is left out."""
    found = []
    for line in text.splitlines():
        said = object_in(line)
        if said is None:
            continue
        try:
            found.append(
                HistoryEntry(
                    said["what"],
                    str(said["member"]),
                    str(said["why"]),
                    float(said["at_unix_s"]),
                    dict(said["details"]),
                    int(said["revision"]),
                )
            )
        except (ArithmeticError, ValueError, KeyError, TypeError):
            continue
    return found


@dataclass(frozen=True, slots=True)
class Seats:
    """The ranks of each member, and the members of present worlds by round, in rank order."""

    slots: Mapping[str, int] = field(default_factory=dict)
    worlds: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


def seats_in(text: str) -> Seats:
    """Read them from ``muster status --json``."""
    said = last_object(text) or {}
    try:
        return Seats(
            {str(one["name"]): int(one["slots"]) for one in said["members"]},
            {int(one["round"]): tuple(map(str, one["nodes"])) for one in said["runs"]},
        )
    except (ArithmeticError, ValueError, KeyError, TypeError):
        return Seats()


async def history_of(api: ClusterApi, pods: Sequence[JobPod]) -> list[HistoryEntry]:
    """Ask for the history; raises as ``ask`` does, and ``ClusterUnavailable`` if it fails there."""
    ran = await ask(api, pods, ["history", "--json"], timeout_s=ANSWER_S)
    if ran.status != 0:
        raise ClusterUnavailable(f"muster history in a sidecar ended with {ran.status}: {ran.err}")
    return entries_in(ran.out)


async def seats_of(api: ClusterApi, pods: Sequence[JobPod]) -> Seats:
    """Ask for the seats; raises as ``ask`` does."""
    ran = await ask(api, pods, ["status", "--json"], timeout_s=ANSWER_S)
    return seats_in(ran.out)


async def follow_history(
    api: ClusterApi,
    present: Callable[[], Sequence[JobPod]],
    took_in: Callable[[Sequence[HistoryEntry]], None],
    fail: Callable[[str], None],
) -> None:
    """Pass on the history and what is added to it, until cancelled; an entry may come again.

    ``present``: the pods that may be asked; ``fail`` gets why none says anything.
    """
    argv = ("history", "--json", "--watch")

    def took_line(line: str) -> None:
        took_in(entries_in(line))

    await FollowedCommand("muster logs", argv, present, took_line, fail).run(api)
