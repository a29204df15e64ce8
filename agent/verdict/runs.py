# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of a job, as its store has them: the newest round of each, and its nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from launcher_shim.c10d.rounds.records import Node, Round
from rdzv.errors import RecordError
from rdzv.keys import GenerationKeys
from rdzv.listing import Places
from rdzv.store import KeyValue


@dataclass(frozen=True, slots=True)
class RunView:
    """One torch rendezvous: its newest round, and the nodes that take part or wait."""

    run_id: str
    round: Round
    nodes: tuple[Node, ...]

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
        except RecordError:
            continue
    return tuple(
        RunView(run_id, rounds.get(run_id, Round()), tuple(nodes.get(run_id, ())))
        for run_id in sorted(rounds.keys() | nodes.keys())
    )
