# SPDX-License-Identifier: Apache-2.0
"""What must hold while the network keeps a whole world from the store, and another one may form."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rdzv.drain.gate import ON_CUT_S
from rdzv.records.drain import LastCommit
from rdzv.snapshot import Snapshot
from tests.simulation.pods import SimulatedJob
from tests.simulation.ranks import Rank, RoundId, World

HELD_S = 2.0
"""Until a sidecar has shown a gate that it wants to show, and the rank has looked at it."""


class SplitInvariants:
    """I1 for worlds that cannot know of each other: each writes to paths of its own.

    A path is a save tag and a step. Where the job says ``--on-cut=hold``, no rank begins a step
    once its pod has had no lease for ``ON_CUT_S``.
    """

    def __init__(self, job: SimulatedJob, break_: Callable[[str], None]) -> None:
        self._job = job
        self._break = break_
        self._paths: dict[tuple[str, int], World] = {}
        self._gone_since_s: dict[str, float] = {}
        self._went_back = False

    def committed(self, before: Snapshot, after: Snapshot) -> None:
        """Look at one revision."""
        now = self._job.loop.time()
        for name in before.members.keys() - after.members.keys():
            self._gone_since_s[name] = now
        for name in after.members.keys() & self._gone_since_s.keys():
            del self._gone_since_s[name]
        last, former = after.last_commit, before.last_commit
        if last is not None and last != former and not last.forgotten:
            self._check_tag(last, former)

    def restored(self) -> None:
        """The store has gone back: of two worlds of one number the order is unknown."""
        self._went_back = True

    def forget(self, round: RoundId) -> None:
        """The number of this round is given out once more, as nobody knows of it."""
        self._paths = {path: w for path, w in self._paths.items() if w.round != round}

    def have_been_away(self, members: Collection[str], seconds: float) -> bool:
        """Whether none of ``members`` has had a lease in the store for so long."""
        latest_s = self._job.loop.time() - seconds
        return all(self._gone_since_s.get(name, latest_s + 1) <= latest_s for name in members)

    def wrote(self, rank: Rank, tag: str, step: int) -> None:
        """A rank has saved its part of a step."""
        other = self._paths.setdefault((tag, step), rank.world)
        if other is not rank.world:
            self._break(
                f"I1: {rank.pod.name} of round {rank.round[1]} writes to {tag} of step {step},"
                f" as round {other.round[1]} did"
            )

    def loads(self, rank: Rank, last: LastCommit) -> None:
        """A rank is to load this save."""
        if (last.tag, last.step) not in self._paths and not self._went_back:
            self._break(f"I1: {rank.pod.name} is to load {last.tag} of step {last.step}")

    def begins(self, rank: Rank, step: int) -> None:
        """A rank begins a step."""
        pod, now = rank.pod, self._job.loop.time()
        gone_since_s = self._gone_since_s.get(pod.name)
        if pod.shape.on_cut != "hold" or gone_since_s is None or pod.sidecar is None:
            return
        leaseless_s = now - max(gone_since_s, pod.began_s)
        if leaseless_s > ON_CUT_S + HELD_S:
            self._break(
                f"I1: {pod.name} begins step {step} and has had no lease for {leaseless_s:.1f} s"
            )

    def _check_tag(self, last: LastCommit, former: LastCommit | None) -> None:
        world = self._paths.get((last.tag, last.step))
        if self._went_back:
            return
        if world is None or world.round != (last.run, last.round):
            self._break(f"I1: {last} is on record, and its world has written no such path")
        elif former is not None and former.run == last.run and last.tag < former.tag:
            self._break(f"I1: the tag goes back, from {former.tag} to {last.tag}")
