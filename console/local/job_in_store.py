# SPDX-License-Identifier: Apache-2.0
"""The job of a run in its store: its history, rounds and outages, put on the timeline.

The store is an embedded one or the user's etcd.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from agent.verdict.view import JobView, present_view
from console.job.reading import outage_cause
from console.local.payload import Closing
from console.local.settings import LocalSettings
from console.local.timeline import FINISHED, Timeline
from launcher_shim.c10d.rounds.records import Round
from rdzv.errors import RecordError
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.mirror import Mirror
from rdzv.records.drain import NO_CURSOR
from rdzv.records.job import HistoryEntry
from rdzv.sentences import counted
from rdzv.store import KeyValue, WatchEvent
from rdzv.store.access import Access
from rdzv.store.etcd.client import open_store
from rdzv.store.memory.server import EmbeddedServer

LOADING_S = 5.0
"""Time after a round has formed at which a world without a step is said to load."""

_WITHOUT_SAVE = {
    "expired": "it ran out of time before all ranks had saved",
    "uncommitted": "there was nothing to save, or a rank takes no part in saving",
}
"""The outcomes of a drain after which steps may be trained again."""


class RoundFollower:
    """A follower of one run; ``take_in`` is a listener of the mirror. ``slots``: ranks per node."""

    def __init__(self, keys: JobKeys, run_id: str, slots: int, timeline: Timeline) -> None:
        self._keys = keys
        self._run_id = run_id
        self._slots = slots
        self._timeline = timeline
        self.round = Round()
        self.world = Round()
        """The newest complete round: a worker's error is often read once the next one is open."""
        self.began_s: float | None = None
        """The time at which the newest complete round formed, in seconds of the timeline."""
        self.last_rank_0 = ""
        """The member with rank 0 in the newest complete round; empty before the first."""
        self._failure: Closing | None = None
        self._loading: int | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The members of the present round, in the order of their ranks; empty while it is open."""
        if not self.round.complete:
            return ()
        return tuple(seat.member for seat in self.round.frozen)

    def ranks_of(self, node: str, *, newest_world: bool = False) -> range:
        """Return the ranks of a node in the present round; empty if it is not in it.

        ``newest_world``: in the newest complete round, also while the next one is open.
        """
        world = self.world if newest_world else self.round
        nodes = [seat.member for seat in world.frozen] if world.complete else []
        if node not in nodes:
            return range(0)
        first = nodes.index(node) * self._slots
        return range(first, first + self._slots)

    @property
    def closing(self) -> Closing | None:
        """The closing of the run by its launchers, or None.

        A failure counts until a world has formed again: other nodes ask for one soon after it.
        """
        return self._closing() or self._failure

    def _closing(self) -> Closing | None:
        if not self.round.closed:
            return None
        members = frozenset(seat.member for seat in self.round.frozen)
        return Closing(self.round.closed == "success", members)

    def take_in(self, events: Sequence[WatchEvent]) -> None:
        """Put the watch's events on the timeline; a record that cannot be read is shown as such."""
        for event in events:
            if event.kind == "delete":
                continue
            try:
                if event.kv.key.startswith(self._keys.history):
                    entry = HistoryEntry.from_kv(event.kv)
                    if entry.what in ("round", "closed", "failed"):
                        continue  # the round's record and the launcher's log have more details
                    self._timeline.record("membership", *_moment_of(entry))
                elif self._is_round(event.kv.key):
                    self._see_round(event.kv)
            except RecordError as error:
                self._timeline.record("membership", "corrupt", "", str(error))

    def note_loading(self, last_step_s: float) -> None:
        """Put on the timeline, once a round, that its world has made no step for long.

        ``last_step_s``: when a step was seen last, 0.0 for never. A script that reports none gets
        one line.
        """
        if not self.nodes or self.round.closed or self.began_s is None:
            return
        age_s = self._timeline.now_s() - self.began_s
        said = self._loading == self.round.number or (self._loading is not None and not last_step_s)
        if said or age_s < LOADING_S or last_step_s >= self.began_s:
            return
        self._loading = self.round.number
        ranks = counted(len(self.nodes) * self._slots, "rank")
        why = f"a world of {ranks} loads: no step since it formed {age_s:.0f} s ago"
        self._timeline.record("round", "loading", f"{self.round.shown}", why)

    def _is_round(self, key: str) -> bool:
        generation = key.removeprefix(f"{self._keys.prefix}g/").partition("/")[0]
        if not generation.isdecimal():
            return False
        return key == self._keys.in_generation(int(generation)).run(self._run_id).round

    def _see_round(self, kv: KeyValue) -> None:
        before, self.round = self.round, Round.from_kv(kv)
        if self.round.complete:
            self.world = self.round
            self._failure = self._closing()
        self._timeline.record_round(0 if self.round.closed else len(self.nodes) * self._slots)
        succeeded = self.round.closed == "success"
        if self.round.closed and not before.closed:
            self._timeline.record("round", "closed", "", FINISHED if succeeded else "job failed")
        elif self.round.complete and (before.number, before.complete) != (self.round.number, True):
            self.began_s = self._timeline.now_s()
            count = len(self.nodes)
            self.last_rank_0 = self.nodes[0]
            self._timeline.record(
                "round",
                "round",
                f"{self.round.shown}",
                f"{counted(count, 'node')}, {counted(count * self._slots, 'rank')}:"
                f" {', '.join(self.nodes)}",
            )


def _moment_of(entry: HistoryEntry) -> tuple[str, str, str]:
    """Return what happened, to whom, and why; the entry of a drain is about its end."""
    outcome, step = entry.details.get("outcome"), entry.details.get("step")
    if entry.what != "drain":
        return entry.what, entry.member, entry.why
    if outcome == "cancelled":
        return "cancelled", entry.member, entry.why
    at_step = "" if step is None else f" at step {step}"
    if (sentence := _WITHOUT_SAVE.get(str(outcome))) is not None:
        return "released", entry.member, f"{outcome}: {sentence} ({entry.why})"
    samples = entry.details.get("samples")
    # The place of a script without a cursor is its own affair.
    kept = f"; samples: {samples}" if samples not in (None, "", NO_CURSOR) else ""
    return "released", entry.member, f"{outcome}{at_step}: {entry.why}{kept}"


class FollowedJob:
    """The job as its client sees it."""

    def __init__(self, endpoints: str, client: JobClient) -> None:
        self.endpoints = endpoints
        self._client = client
        self._seen = (-1, present_view(client))

    @property
    def view(self) -> JobView:
        """The job as the store had it last; built again only after a change."""
        sequence = self._client.mirror.sequence
        if self._seen[0] != sequence:
            self._seen = (sequence, present_view(self._client))
        return self._seen[1]

    @property
    def outage(self) -> str:
        """The reason why the store does not answer; empty while it does, and before the start."""
        mirror = self._client.mirror
        if not mirror.loaded or mirror.healthy(mirror.clock()):
            return ""
        return outage_cause(self._client.watching.trouble)


@asynccontextmanager
async def following(settings: LocalSettings, rounds: RoundFollower) -> AsyncIterator[FollowedJob]:
    """Serve a store or use the user's, and let ``rounds`` follow the job in it."""
    # The run reports an outage as a moment.
    for one in (Mirror, JobClient):
        logging.getLogger(one.__module__).setLevel(logging.ERROR)
    async with AsyncExitStack() as stack:
        access = settings.access
        if access is None:
            server = await stack.enter_async_context(EmbeddedServer("127.0.0.1:0"))
            access = Access((server.endpoint,))
        store = open_store(access)
        stack.push_async_callback(store.close)
        keys = JobKeys(settings.namespace, settings.job)
        client = JobClient.of(store, keys, clock=time.monotonic)
        stack.callback(client.mirror.subscribe(rounds.take_in))
        await stack.enter_async_context(client.following())
        yield FollowedJob(",".join(access.endpoints), client)


@dataclass(slots=True)
class Outages:
    """A follower of the store: it reports each outage once, and its end."""

    _since_s: float | None = None

    def see(self, now_s: float, why: str) -> tuple[str, str] | None:
        """Take in the reason why the store does not answer, empty if it does; return the news.

        The news are what happened, in a word, and a sentence; None if nothing has changed.
        """
        if why and self._since_s is None:
            self._since_s = now_s
            return "outage", f"the store does not answer ({why}); worlds that have formed train on"
        if not why and self._since_s is not None:
            took_s, self._since_s = now_s - self._since_s, None
            return "back", f"the store answers again after {took_s:.0f} s"
        return None


def awaited(view: JobView | None, coming: str) -> str:
    """Say what a job waits for that has fewer nodes than the smallest world; empty if it has not.

    ``coming``: the next event, with its time; empty for none.
    """
    rules = view.snapshot.rules if view is not None else None
    if view is None or rules is None or rules.paused:
        return ""
    here, least = len(view.listing.listed), rules.policy.smallest
    states = {member.name: state for member, state, _ in view.members()}
    if here >= least or "draining" in states.values():
        return ""
    idle = [name for name, state in states.items() if state == "drained"]
    left = f"{counted(here, 'node')} left" if here else "no node is left"
    sentences = [f"nothing can train: {left} (min {least})"]
    if idle:
        are = "is" if len(idle) == 1 else "are"
        sentences.append(
            f"{_listed(idle)} {are} drained (muster drain {idle[0]} --cancel takes it back)"
        )
    if not coming and here:
        sentences.append(f"muster set --min {here} trains with fewer")
    sentences.append(f"next: {coming}" if coming else "Ctrl-C ends the run")
    return "; ".join(sentences)


def _listed(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
