# SPDX-License-Identifier: Apache-2.0
"""What is held against members costs no running world its place."""

from __future__ import annotations

from collections.abc import Callable

from launcher_shim.c10d.rounds.records import Node, Seat
from rdzv.keys import RunKeys
from rdzv.mirror import Mirror
from rdzv.records.job import HistoryEntry
from rdzv.snapshot import Snapshot, listing_of
from tests.simulation.liveness import is_healthy
from tests.simulation.pods import SimulatedJob


class QuarantineInvariants:
    """Looks at each world beside the one that it replaces, in the store's ``truth``."""

    def __init__(self, job: SimulatedJob, truth: Mirror, break_: Callable[[str], None]) -> None:
        self._job = job
        self._truth = truth
        self._break = break_

    def replaced(
        self, before: Snapshot, keys: RunKeys, former: tuple[Seat, ...], new: tuple[Seat, ...]
    ) -> None:
        """Hold a world that is no larger than the one before to a reason other than marks."""
        if len(new) > len(former) or self._job.sizes.largest(len(former)) != len(former):
            return
        staying = {seat.member for seat in new}
        marked = listing_of(before).quarantined
        missing = {seat.member for seat in former} - staying
        if missing and missing <= marked and all(self._is_there(keys, seat) for seat in former):
            self._break(f"I11: a world of {former} is replaced by {sorted(staying)} for {marked}")

    def waits(self, before: Snapshot, entry: HistoryEntry) -> None:
        """A job waits for its failed starts only if no world without those that failed can form."""
        self._job.timeline.add(entry.member, entry.why)
        listed = {member.name for member in listing_of(before).listed}
        sound = [
            pod.name
            for pod in self._job.present()
            if is_healthy(pod) and pod.name in listed and pod.worlds and not pod.failures
        ]
        if self._job.sizes.largest(len(sound)):
            self._break(f"I11: a world waits, and {sound} have not failed")

    def _is_there(self, keys: RunKeys, seat: Seat) -> bool:
        kv = self._truth.kvs.get(keys.node(seat.member))
        node = Node.from_kv(kv) if kv is not None else None
        return node is not None and node.nonce == seat.nonce and node.state != "left"
