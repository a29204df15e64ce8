# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of a job, as its store has them: the newest round of each, and its nodes."""

from __future__ import annotations

from collections.abc import Iterable

from launcher_shim.c10d.rounds.records import Node, Round
from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.keys import GenerationKeys
from rdzv.records.world import WorldChange
from rdzv.snapshot import Places
from rdzv.store import KeyValue


@dataclass(frozen=True, slots=True)
class RunView:
    """One torch rendezvous: its newest round, and the nodes that take part or wait."""

    run_id: str
    round: Round
    nodes: tuple[Node, ...]
    change: WorldChange | None = None
    """The newest change of a world that changes in place; None if it never was one."""

    @property
    def in_place(self) -> str:
        """Whether its world changes in place, in one sentence; empty if nothing was tried."""
        change = self.change
        if change is None or change.round != self.round.number or self.round.closed:
            return ""
        if change.phase == "fall-back":
            return f"{self.run_id} changes by a save and a restart: {change.reason}"
        world = self.round.world
        return f"{self.run_id} changes in place: its ranks are in world {world}" if world else ""

    @property
    def state(self) -> str:
        """The state of the round, in a word or two."""
        if self.round.closed:
            return f"closed ({self.round.closed})"
        if self.round.finishing:
            return "finishing"
        return "training" if self.round.complete else "forming"

    @property
    def places(self) -> Places:
        """The members that have a place in the round, and those that ask for one."""
        frozen = {seat.member: seat for seat in self.round.frozen}
        gone = {
            node.member
            for node in self.nodes
            if node.state == "left" or node.seat != frozen.get(node.member)
        }
        return Places(
            frozenset(frozen) - gone,
            frozenset(node.member for node in self.nodes if node.state == "asking"),
        )


def runs_of(keys: GenerationKeys, kvs: Iterable[KeyValue]) -> tuple[RunView, ...]:
    """Return the runs of a generation, by their ids; omit unreadable records."""
    rounds: dict[str, Round] = {}
    nodes: dict[str, list[Node]] = {}
    changes: dict[str, WorldChange] = {}
    for kv in kvs:
        if not kv.key.startswith(keys.runs):
            continue
        run_id = keys.run_id_of(kv.key)
        run = keys.run(run_id)
        try:
            if kv.key == run.round:
                rounds[run_id] = Round.from_kv(kv)
            elif kv.key.startswith(run.nodes):
                nodes.setdefault(run_id, []).append(Node.from_kv(kv))
            elif kv.key == run.world:
                changes[run_id] = WorldChange.from_kv(kv)
        except RecordError:
            continue
    return tuple(
        RunView(
            run_id,
            rounds.get(run_id, Round()),
            tuple(nodes.get(run_id, ())),
            changes.get(run_id),
        )
        for run_id in sorted(rounds.keys() | nodes.keys())
    )
