# SPDX-License-Identifier: Apache-2.0
"""The rounds of all runs in one generation, and the choice of the runs that a sidecar follows.

A run is followed as soon as its round is stored, whether or not a launcher here takes part in it: a
drain depends on the nodes that train in any run. It is no longer followed once it was closed by
success, no torchrun of this pod is in it, and another run counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher_shim.c10d.rounds.drain_view import precedence
from launcher_shim.c10d.rounds.mirrored_run import MirroredRun
from launcher_shim.c10d.rounds.records import Round, first_round
from launcher_shim.c10d.stages import SHARED_RUN
from rdzv.keys import GenerationKeys
from rdzv.store import KeyValue, WatchEvent

FOLLOWED_MAX = 16
"""Maximum number of runs that are followed without a torchrun of this pod, newest first. Each costs
tasks, and any client with rights in the store may write any number of rounds."""


class KnownRounds:
    """The rounds of one generation as the mirror has them, and rounds that the store has lost."""

    def __init__(self, keys: GenerationKeys, kvs: Sequence[KeyValue], revision: int) -> None:
        self._keys = keys
        self._runs: dict[str, MirroredRun] = {}
        self.apply([WatchEvent("put", kv) for kv in kvs], revision)

    def apply(self, events: Sequence[WatchEvent], revision: int) -> bool:
        """Apply one batch of the mirror's, now at ``revision``; return whether it has a round."""
        touched = False
        for event in events:
            name = self._keys.run_of_round(event.kv.key)
            if name is None or name == SHARED_RUN:
                continue
            run = self._runs.get(name) or MirroredRun(self._keys.run(name))
            run.went_back(revision, [event])
            run.apply(event)
            if run.round.age > first_round(self._keys.generation).age:
                # Otherwise the record is unreadable, and no round of this run was known before.
                self._runs[name] = run
                touched = True
        return touched

    def of(self, name: str) -> Round | None:
        """Return the round of a run; None if none is known."""
        run = self._runs.get(name)
        return run.round if run is not None else None

    @property
    def any_closed(self) -> bool:
        """Whether a run was closed."""
        return any(run.round.closed for run in self._runs.values())

    @property
    def trained(self) -> bool:
        """Whether a world has ever formed."""
        return any(run.round.complete or not run.round.is_first for run in self._runs.values())

    def ended_well(self, name: str) -> bool:
        """Return whether a run was closed by success."""
        current = self.of(name)
        return current is not None and current.closed == "success"

    def names(self) -> tuple[str, ...]:
        """Return the runs whose round is known."""
        return tuple(self._runs)

    def followed(self) -> tuple[str, ...]:
        """Return the runs to follow, even without a torchrun here: those not over, up to a bound.

        The newest is the first. Runs whose round the store has lost come right after the newest,
        so that it is written back.
        """
        runs = self._runs
        newest_first = sorted(
            runs, key=lambda name: precedence(name, runs[name].round), reverse=True
        )
        wanted = newest_first[:1]
        wanted += [name for name in newest_first if runs[name].lacks_round]
        wanted += [name for name in newest_first if not self.ended_well(name)]
        return tuple(dict.fromkeys(wanted))[:FOLLOWED_MAX]
