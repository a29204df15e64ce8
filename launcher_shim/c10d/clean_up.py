# SPDX-License-Identifier: Apache-2.0
"""Clean-up in the store after connections, rounds and runs that are over.

Whenever a round forms, the one before gets a line in the history, and the keys that no client reads
go, those of earlier runs, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from time import time

from launcher_shim.c10d.rounds.mirrored_run import MirroredRun, precedence
from launcher_shim.c10d.rounds.records import Node, Round, first_round
from launcher_shim.c10d.rounds.rendezvous import Rendezvous
from launcher_shim.c10d.rounds.stages import (
    SHARED_RUN,
    is_exit_barrier,
    round_key,
    round_prefix,
    torch_run_id,
)
from launcher_shim.c10d.values.operations import Kv
from launcher_shim.tcpstore import wire
from rdzv.errors import RecordError, StoreError
from rdzv.job import JobClient
from rdzv.keys import GenerationKeys
from rdzv.members.registrar import Registrar
from rdzv.reconcile import Loop, Outlook
from rdzv.records.drain import LastCommit
from rdzv.records.job import HistoryEntry
from rdzv.store import KeyValue, WatchEvent

log = logging.getLogger(__name__)

CLEAN_UP_S = 120.0
"""Total time for retries of deletions of keys of closed connections, in seconds: longer than most
outages."""

CLEAN_UP_PAUSE_S = 0.5
"""The pause between two attempts."""


async def clean_up(
    registrar: Registrar, generation: int | None, work: Callable[[], Awaitable[None]]
) -> None:
    """Retry ``work``, which must be idempotent, until it succeeds, for ``CLEAN_UP_S`` at most.

    ``generation``: the one whose keys it drops; None for whichever the member is in by then. Once
    the member is registered in another generation, these keys are gone.
    """
    registered = registrar.registered
    reason = ""
    try:
        async with asyncio.timeout(CLEAN_UP_S):
            while True:
                await registered.wait()
                if generation not in (None, registrar.generation):
                    return
                try:
                    await work()
                except StoreError as error:
                    reason = str(error)
                else:
                    return
                await asyncio.sleep(CLEAN_UP_PAUSE_S)
    except TimeoutError:
        if not registered.is_set():
            reason = "the member is not registered"
    log.info("gave up deleting the keys of a closed connection: %s", reason or "the store is slow")


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


MEMBERS_MAX = 32
"""The largest world whose members are named in the history, which is to stay small."""

KEPT = 1
"""The number of runs before the present one that keep the keys that launchers stored."""


class PastRounds(Loop):
    """The clean-up after past rounds of one run, by the sidecar of a round's first node only.

    Clean-ups run in ``tasks``, and may end after this.

    Whenever a round forms, the keys of the runs before are cleaned up, too.
    """

    def __init__(
        self, client: JobClient, kv: Kv, rendezvous: Rendezvous, tasks: asyncio.TaskGroup
    ) -> None:
        super().__init__()
        self._tasks = tasks
        self._client = client
        self._kv = kv
        self._rendezvous = rendezvous
        self._forgotten_round = -1
        self._noted = (-1, "")
        self._formed_round = -1

    async def step(self) -> Outlook:
        """Clean up after a round that has formed, or was closed."""
        current = self._rendezvous.round
        first = [seat.member for seat in current.frozen[:1]] == [self._rendezvous.member]
        # A round that a restored store has lost belongs in its history once it is written back.
        if first and current.complete and current.mod_revision > 0:
            self._note(current)
            self._forget_old(current)
            self._forget_past_runs(current)
        return Outlook(self._rendezvous.news)

    def _note(self, current: Round) -> None:
        """Write a round that has formed, or was closed, to the history."""
        now = (current.number, current.closed)
        if now == self._noted:
            return
        self._noted = now
        last = self._client.membership.snapshot().commit_to_start_from
        entry = HistoryEntry(
            "closed" if current.closed else "round",
            self._rendezvous.member,
            f"closed by {current.closed}" if current.closed else "all expected nodes have joined",
            time(),
            world_details(self._rendezvous.run_id, current, last),
        )
        noting = self._client.note(entry, current.mod_revision)
        self._tasks.create_task(noting, name=f"note round {current.number}")

    def _forget_old(self, current: Round) -> None:
        """Delete the keys that launchers stored for rounds two or more back.

        All of them: the first node of an earlier round may have been away from the store.
        """
        newest = current.number - 2
        if newest <= self._forgotten_round:
            return
        self._forgotten_round = newest
        run_id = torch_run_id(self._rendezvous.run_id)
        rounds = (round_key(key, run_id) for key in self._kv.cells.existing())
        old = {newest, *(of[0] for of in rounds if of is not None and of[0] < newest)}
        prefixes = [round_prefix(run_id, number) for number in sorted(old)]
        forgetting = _forget(*(partial(self._kv.forget, prefix) for prefix in prefixes))
        self._tasks.create_task(forgetting, name=f"forget {run_id}")

    def _forget_past_runs(self, current: Round) -> None:
        """Delete the keys that launchers stored in runs that ended well, two or more back."""
        if current.number == self._formed_round:
            return
        self._formed_round = current.number
        keys = self._client.keys.in_generation(self._kv.keys.generation)
        gone = surplus(keys, self._client.mirror.under(keys.runs), self._rendezvous.run_id)
        if gone:
            forgetting = _forget(partial(self._kv.forget_records, gone))
            self._tasks.create_task(forgetting, name="forget past runs")


def world_details(run_id: str, current: Round, last: LastCommit | None) -> dict[str, object]:
    """Return the details of a world in the history. ``last``: the save that it starts from.

    ``members`` are in rank order. ``saved_round`` is the round all of whose ranks made that save
    for a change of the world: it lost no step if it ended there.
    """
    details: dict[str, object] = {
        "run_id": run_id,
        "round": current.number,
        "nodes": len(current.frozen),
    }
    if len(current.frozen) <= MEMBERS_MAX:
        details["members"] = [seat.member for seat in current.frozen]
    if last is not None and last.is_of(run_id):
        details["step"] = last.step
        if not last.periodic:
            details["saved_round"] = last.round
    return details


async def _forget(*deletions: Callable[[], Awaitable[None]]) -> None:
    try:
        for delete in deletions:
            await delete()
    except StoreError as error:
        log.info("cannot delete the keys of past rounds before the next round: %s", error)


def surplus(keys: GenerationKeys, kvs: Iterable[KeyValue], present: str) -> list[str]:
    """Find the keys to delete now that a world has formed in the run ``present``: pure.

    As for rounds, they are those of runs two or more back: a node that was cut off in the exit
    barrier of the run before may still come back to it. The round stays, with the launch lines and
    the nodes that reached the exit barrier: a container that is started again still has to learn
    that the run has ended well, and whether its own work was done.
    """
    kvs = tuple(kvs)
    ended: list[tuple[int, str]] = []
    taken: set[str] = set()
    for kv in kvs:
        if (name := keys.run_of_round(kv.key)) is not None:
            if name not in (present, SHARED_RUN) and _ended_well(kv):
                ended.append((kv.mod_revision, name))
        elif kv.key.startswith(keys.runs):
            name = keys.run_id_of(kv.key)
            if name and kv.key.startswith(keys.run(name).nodes) and _takes_part(kv):
                taken.add(name)
    past = [name for _, name in sorted(ended)[:-KEPT] if name not in taken]
    return [kv.key for name in past for kv in kvs if _is_surplus(keys, name, kv.key)]


def _is_surplus(keys: GenerationKeys, name: str, key: str) -> bool:
    run = keys.run(name)
    if key.startswith(run.kv):
        return not run.split(key)[1].startswith(wire.STAGE)
    if key.startswith(run.sums):
        return not is_exit_barrier(run.split(key)[1])
    return key.startswith((run.queues, run.operations))


def _ended_well(kv: KeyValue) -> bool:
    try:
        return Round.from_kv(kv).closed == "success"
    except RecordError:
        return False


def _takes_part(kv: KeyValue) -> bool:
    try:
        return Node.from_kv(kv).state != "left"
    except RecordError:
        return False
