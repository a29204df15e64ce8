# SPDX-License-Identifier: Apache-2.0
"""What must hold of rounds: one at a time, each frozen once, and the same to all who are in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launcher_shim.c10d.nodes import Node, Round, Seat
from rdzv.draining import granted
from rdzv.model import Snapshot
from rdzv.store import WatchEvent
from rdzv.watching import Mirror
from tests.chaos.simulation.nodes import KEYS
from tests.chaos.simulation.pods import Pod, SimulatedJob
from tests.chaos.simulation.torchrun import RUN, Torchrun


class RoundInvariants:
    """I1, I2 and I5, as far as rounds go. ``may_close``: somebody was told to close the run.

    ``may_form``: something happened for which a world may have to form again. ``formed_s``: when
    somebody was handed a world last. ``at_freeze`` is called with the next round that is frozen,
    once.
    """

    def __init__(self, job: SimulatedJob, truth: Mirror, break_: Callable[[str], None]) -> None:
        self.frozen: dict[int, tuple[Seat, ...]] = {}
        self.round = Round()
        self.may_close = False
        self.may_form = True
        self.formed_s = 0.0
        self.at_freeze: Callable[[Round], None] | None = None
        self._job = job
        self._truth = truth
        self._break = break_
        self._rounds: dict[str, Round] = {}

    def committed(self, before: Snapshot, events: Sequence[WatchEvent]) -> None:
        """Look at one revision; ``before``: the membership as it was."""
        for event in events:
            key = event.kv.key
            if event.kind == "put" and key.endswith(f"/c10d/{RUN}/round"):
                self._wrote_round(before, key, Round.from_kv(event.kv))

    def _wrote_round(self, before: Snapshot, key: str, new: Round) -> None:
        known = self._rounds.get(key)
        self._rounds[key] = self.round = new
        if known is not None and new.age < known.age:
            self._break(f"I1: round {new.number} is written over the later {known.number}")
        if new.closed and not self.may_close:
            self._break(f"I5: the run is closed by {new.closed}, though nobody was told to")
        if not new.complete:
            return
        frozen = self.frozen.setdefault(new.number, new.frozen)
        if frozen != new.frozen:
            self._break(f"I1: round {new.number} is frozen twice: {frozen} and {new.frozen}")
        if known is None or (known.number, known.complete) != (new.number, True):
            self._check_freeze(before, new)
            if self.at_freeze is not None:
                act, self.at_freeze = self.at_freeze, None
                act(new)

    def _check_freeze(self, before: Snapshot, new: Round) -> None:
        shape = self._job.shape
        if not shape.least <= len(new.frozen) <= shape.most:
            self._break(f"I1: a world of {len(new.frozen)} is formed, of {shape}")
        generation = before.job.generation if before.job else 1
        keys = KEYS.in_generation(generation).run(RUN)
        draining = {d.member for d in before.drains.values() if before.has_name(d)}
        for seat in new.frozen:
            if seat.member in draining:
                self._break(f"I2: {seat.member} drains and is frozen into round {new.number}")
            kv = self._truth.kvs.get(keys.node(seat.member))
            node = Node.from_kv(kv) if kv is not None else None
            if node is not None and (node.seat != seat or node.state != "asking"):
                self._break(f"{seat} is frozen into round {new.number} and asked for none: {node}")
        for number in [n for n in self.frozen if n < new.number]:
            if self._trains_whole(before, number):
                self._break(f"I1: round {new.number} is formed while all of {number} train on")

    def _trains_whole(self, before: Snapshot, number: int) -> bool:
        """Whether everybody who was in that round is, and somebody of them may train on."""
        pods = [self._job.pods[seat.member] for seat in self.frozen[number]]
        inside = [p for p in pods if p.torchrun is not None and p.torchrun.round == number]
        return len(inside) == len(pods) and not all(_may_go(before, pod) for pod in pods)

    def formed(self, torchrun: Torchrun, number: int, rank: int, size: int) -> None:
        """A torchrun was handed a world."""
        name = torchrun.pod.name
        frozen = self.frozen.get(number)
        if frozen is None:
            self._break(f"I1: {name} is in round {number}, which nobody completed")
        elif len(frozen) != size or frozen[rank].member != name:
            self._break(f"I1: {name} is {rank} of {size} in round {number}, which is {frozen}")
        self.formed_s = self._job.loop.time()
        if not self.may_form:
            self._break(f"I5: {name} had to form round {number} for an outage")

    def gave_up(self, torchrun: Torchrun, why: str) -> None:
        """A torchrun ended by itself."""
        if not self.may_close:
            self._break(f"I5: the torchrun of {torchrun.pod.name} gave up: {why}")


def _may_go(snapshot: Snapshot, pod: Pod) -> bool:
    drain = snapshot.drains.get(pod.pod_uid)
    return drain is not None and granted(snapshot.commit, drain)
