# SPDX-License-Identifier: Apache-2.0
"""I11: while the store refuses writes, a formed world trains on.

Nothing could replace it: neither a lost sidecar nor a newcomer may end it. It may end by what
happens to its own torchruns, or by what was written before the first refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from launcher_shim.c10d.rounds.records import Node, Round
from rdzv.mirror import Mirror
from rdzv.records.drain import Commit
from tests.simulation.nodes import KEYS
from tests.simulation.pods import SimulatedJob
from tests.simulation.torchrun import Torchrun

STILL_S = 60.0
"""For so long at most a world stands still: for a hold or a park that the store does not end."""


@dataclass(frozen=True, slots=True)
class _World:
    """A world that the store can no longer replace, and the torchruns that train in it."""

    round: Round
    torchruns: Mapping[str, Torchrun]
    since_s: float


class KeptWorlds:
    """Looks every second whether a world that was there at the first refusal trains on."""

    def __init__(self, job: SimulatedJob, truth: Mirror, break_: Callable[[str], None]) -> None:
        self._job = job
        self._truth = truth
        self._break = break_
        self._refuses = False
        self._world: _World | None = None

    def look(self, round: Round, trained_s: float) -> None:
        """Look at the newest round; ``trained_s`` is when any rank ended a step last."""
        if not self._job.engine.full:
            self._refuses, self._world = False, None
            return
        if not self._refuses:
            self._refuses, self._world = True, self._formed(round)
        world, now = self._world, self._job.loop.time()
        if world is None or self._is_disturbed(world):
            self._world = None
        elif now > max(world.since_s, trained_s) + STILL_S:
            self._break(
                f"I11: the store refuses writes, and {sorted(world.torchruns)}, who trained, have"
                f" stood still for {STILL_S:.0f} s"
            )

    def _formed(self, round: Round) -> _World | None:
        """The world of ``round``, if all of it train and nothing on record ends it."""
        job, commit = self._job, self._job.invariants.snapshot.commit
        if not round.complete or round.closed or round.finishing or job.paused:
            return None
        run = self._job.invariants.rounds.run
        if commit is not None and commit.is_of(run, round.number) and _ends(commit):
            return None
        keys = KEYS.in_generation(1).run(run)
        torchruns = {}
        for seat in round.frozen:
            kv = self._truth.kvs.get(keys.node(seat.member))
            torchrun = job.pod(seat.member).torchrun
            if kv is None or not round.is_world_of(Node.from_kv(kv)) or torchrun is None:
                return None
            if torchrun.round != round.number or torchrun.rank is None:
                return None
            torchruns[seat.member] = torchrun
        return _World(round, torchruns, job.loop.time())

    def _is_disturbed(self, world: _World) -> bool:
        """Whether it ends for what has become of its pods themselves."""
        for name, torchrun in world.torchruns.items():
            pod = self._job.pod(name)
            if pod.gone or pod.torchrun is not torchrun or torchrun.sticks:
                return True
            if torchrun.rank is not None and torchrun.rank.finished:
                return True
        return False


def _ends(commit: Commit) -> bool:
    """Whether its round was to end before the first refusal."""
    return bool(commit.granted) or commit.admitted or commit.refused
