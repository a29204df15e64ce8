# SPDX-License-Identifier: Apache-2.0
"""Dynamic shards, the pure part: each record exactly once in what the final weights contain."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rdzv.intervals import common, covers, length, lowest, normal, union, without
from rdzv.records.shards import OpenShards, Plan, PodShards, Saved, ShardWorld, TrainedShards
from rdzv.shards import decision
from rdzv.shards.decision import Ask, decide
from rdzv.shards.ledger import ShardLedger
from rdzv.store import KeyValue

PIECES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


def members(pieces: object) -> set[int]:
    return {number for low, high in pieces for number in range(low, high)}  # type: ignore[attr-defined]


@given(PIECES, PIECES, st.integers(0, 80))
def test_intervals_are_sets(
    one: list[tuple[int, int]], other: list[tuple[int, int]], n: int
) -> None:
    a, b = normal(one), normal(other)
    assert members(a) == members(one)
    assert members(union(a, b)) == members(a) | members(b)
    assert members(without(a, b)) == members(a) - members(b)
    assert members(common(a, b)) == members(a) & members(b)
    assert covers(a, b) == (members(a) >= members(b))
    assert sorted(members(lowest(a, n))) == sorted(members(a))[:n]
    assert length(a) == len(members(a))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(a))


@dataclass
class Rank:
    """One rank as the library is one: what it holds, and what it has trained by which step."""

    ask: Ask
    left: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    saves: list[tuple[int, list[int]]] = field(default_factory=list)
    alive: bool = True


def pieces(places: list[int]) -> tuple[tuple[int, int], ...]:
    return normal((place, place + 1) for place in places)


class Job:
    """A job of some ranks whose weights are the list of all that was trained into them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ledger = ShardLedger()
        self.worlds = 0
        self.ranks: list[Rank] = []
        self.step = 0
        self.weights: list[int] = []
        self.saved: dict[int, list[int]] = {0: []}
        self.common = 0
        self.largest = 0

    def form(self, size: int, start: int) -> None:
        self.worlds += 1
        self.step, self.weights = start, list(self.saved[start])
        self.saved = {step: one for step, one in self.saved.items() if step <= start}
        self.common = start
        self.ranks = [
            Rank(
                Ask(
                    *(f"pod-{rank}", f"uid-{self.worlds}-{rank}", f"world-{self.worlds}", size, 0),
                    *(self.plan, start),
                )
            )
            for rank in range(size)
        ]
        for rank in self.ranks:
            self.request(rank, 0, 0)

    def present(self) -> dict[str, str]:
        return {rank.ask.member: rank.ask.pod_uid for rank in self.ranks if rank.alive}

    def request(self, rank: Rank, epoch: int, want: int, answered: bool = True) -> decision.Answer:
        ask = replace(
            rank.ask,
            epoch=epoch,
            want=want,
            left=pieces(rank.left),
            used=pieces(rank.used),
            saves=tuple(Saved(step, pieces(places)) for step, places in rank.saves),
        )
        answer = decide(self.ledger, self.present(), ask)
        assert not answer.refused, answer.refused
        self.ledger = stored(answer.ledger)
        self.largest = max(self.largest, intervals_in(self.ledger))
        if answered and not answer.lost:
            rank.saves = []
            rank.left += [place for low, high in answer.given for place in range(low, high)]
        return answer

    def train(self, rank: Rank, count: int) -> None:
        trained, rank.left = rank.left[:count], rank.left[count:]
        rank.used += trained
        self.weights += trained

    def save(self, ranks: list[Rank]) -> None:
        """All ranks come to the boundary; ``ranks`` of them get as far as to tell of the save."""
        self.step += 1
        for rank in self.ranks:
            rank.saves.append((self.step, rank.used))
            rank.used = []
        told = [rank for rank in ranks if not self.request(rank, 0, 0).lost]
        self.saved[self.step] = list(self.weights)
        if len(told) == len(self.ranks):
            self.common = self.step


def stored(ledger: ShardLedger) -> ShardLedger:
    """Pass the ledger through the store: what is not in its records is lost."""

    def kv(key: str, value: bytes) -> KeyValue:
        return KeyValue(key, value, 1, 1, 1, 0)

    assert ledger.world is not None
    return ShardLedger(
        ShardWorld.from_kv(kv("world", ledger.world.to_json())),
        OpenShards.from_kv(kv("open", ledger.open.to_json())),
        TrainedShards.from_kv(kv("trained", ledger.trained.to_json())),
        {name: PodShards.from_kv(kv(name, pod.to_json())) for name, pod in ledger.pods.items()},
    )


def intervals_in(ledger: ShardLedger) -> int:
    held = [len(s.held) + len(s.used) + len(s.saves) for s in ledger.shares()]
    return len(ledger.open.again) + len(ledger.trained.places) + sum(held)


PLANS = st.builds(Plan, st.integers(1, 60), st.integers(1, 7), st.none())
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["ask", "lost answer", "train", "save", "half a save", "kill", "gone"]),
        st.integers(0, 5),
        st.integers(1, 12),
    ),
    max_size=60,
)


def live(plan: Plan, moves: list[tuple[str, int, int]], epochs: int) -> Job:
    """Let a job live through ``moves``, and then train what is left, undisturbed."""
    job = Job(plan)
    job.form(2, 0)
    for move, who, count in moves:
        rank = job.ranks[who % len(job.ranks)]
        if not rank.alive:
            job.form(1 + count % 4, job.common)
        elif move in ("ask", "lost answer"):
            job.request(rank, 0, count, answered=move == "ask")
        elif move == "train":
            job.train(rank, count)
        elif move == "save":
            job.save(job.ranks)
        elif move == "half a save":
            job.save(job.ranks[: who % len(job.ranks)])
        elif move == "kill":
            job.form(1 + count % 4, job.common)
        elif len(job.ranks) > 1:
            rank.alive = False
    if not all(rank.alive for rank in job.ranks):
        job.form(2, job.common)
    for epoch in range(epochs):
        finish(job, epoch)
    job.save(job.ranks)
    return job


def finish(job: Job, epoch: int) -> None:
    done = False
    while not done:
        trained = len(job.weights)
        for rank in job.ranks:
            job.train(rank, 5)
            answer = job.request(rank, epoch, 5)
            assert not answer.lost, answer.lost
            done = answer.done
        assert done or len(job.weights) > trained or any(rank.left for rank in job.ranks)


def check(plan: Plan, moves: list[tuple[str, int, int]], epochs: int = 1) -> None:
    job = live(plan, moves, epochs)
    assert sorted(job.weights) == list(range(epochs * plan.epoch_length))


@given(PLANS, MOVES, st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_each_record_is_once_in_the_history_of_the_final_weights(
    plan: Plan, moves: list[tuple[str, int, int]], epochs: int
) -> None:
    check(plan, moves, epochs)
