# SPDX-License-Identifier: Apache-2.0
"""Mistakes to be planted in worlds that change in place: in the decision, the report, the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import agent.world_report
import rdzv.world
from muster.world import conduct
from muster.world.conduct import FORM, IDLE, LEAVE, Order, WorldRank
from rdzv.world import WorldDecision, WorldSnapshot

Patch = AbstractContextManager[Any]


@dataclass(frozen=True)
class Mutation:
    """A mistake. The exploration finds ``found`` in ``case``."""

    case: str
    found: str
    patches: Callable[[], Sequence[Patch]]


MUTATIONS: dict[str, Mutation] = {}
"""All of them, by name."""


def mutation(case: str, found: str) -> Callable[[Callable[[], Sequence[Patch]]], None]:
    """Enter a mistake under the name of the function that makes its patches."""

    def enter(patches: Callable[[], Sequence[Patch]]) -> None:
        MUTATIONS[patches.__name__.replace("_", "-")] = Mutation(case, found, patches)

    return enter


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Plant one for as long as the block runs."""
    with ExitStack() as stack:
        for one in MUTATIONS[name].patches():
            stack.enter_context(one)
        yield


def _decide(change: Callable[[WorldDecision, WorldSnapshot], WorldDecision]) -> list[Patch]:
    original = rdzv.world.decide

    def decide(now: float, since_s: float, snapshot: WorldSnapshot, policy: Any) -> WorldDecision:
        return change(original(now, since_s, snapshot, policy), snapshot)

    return [patch(f"{one}.decide", decide) for one in ("rdzv.world", "agent.world_keeper")]


def _obey(
    change: Callable[[str, WorldRank, WorldRank, Order], tuple[str, WorldRank]],
) -> list[Patch]:
    original = conduct.decide

    def decide(rank: WorldRank, order: Order) -> tuple[str, WorldRank]:
        verdict, after = original(rank, order)
        return change(verdict, rank, after, order)

    return [patch.object(conduct, "decide", decide)]


# --- the decision ---


@mutation("crash", "is tried again")
def number_tried_again() -> list[Patch]:
    """The number of a world that failed is tried once more."""

    def change(decision: WorldDecision, snapshot: WorldSnapshot) -> WorldDecision:
        new = decision.change
        if decision.action != "form" or new is None or snapshot.change.phase != "broken":
            return decision
        return replace(decision, change=replace(new, number=snapshot.change.number))

    return _decide(change)


@mutation("two-crashes", "is lost")
def state_of_the_rank_behind() -> list[Patch]:
    """After a loss, the state comes from the rank that is behind."""

    def change(decision: WorldDecision, snapshot: WorldSnapshot) -> WorldDecision:
        new = decision.change
        if decision.action != "form" or new is None:
            return decision
        known = [snapshot.reports[name] for name in new.seats if name in snapshot.members]
        behind = min((one for one in known if one.step >= 0), key=lambda one: one.step)
        return replace(decision, change=replace(new, step=behind.step, source=behind.member))

    return _decide(change)


@mutation("everything-of-three", "I13")
def any_rank_is_the_source() -> list[Patch]:
    """The state comes from the first rank, whatever it holds."""

    def change(decision: WorldDecision, snapshot: WorldSnapshot) -> WorldDecision:
        new = decision.change
        if decision.action != "form" or new is None:
            return decision
        return replace(decision, change=replace(new, source=new.seats[0]))

    return _decide(change)


@mutation("collective-fails-and-last-drain", "as it falls back")
def broken_ranks_fall_back() -> list[Patch]:
    """Ranks that have lost their group as the world falls back wait for a save for ever."""

    def change(decision: WorldDecision, snapshot: WorldSnapshot) -> WorldDecision:
        again = decision.action == "fall back" and snapshot.change.phase == "fall-back"
        return WorldDecision("keep", "changes need a restart") if again else decision

    return _decide(change)


# --- SIGTERM ---


@mutation("drain", "I7")
def sigterm_before_formed() -> list[Patch]:
    """A pod that leaves gets its SIGTERM as the others begin to form their world."""
    return [
        patch(
            "tests.support.models.worlds.lets_go",
            lambda job, place: job.change.phase == "form" or place not in job.members,
        )
    ]


# --- the report ---


@mutation("drain", "I11")
def vote_too_low() -> list[Patch]:
    """A vote does not count the step that a rank may have begun."""
    original = agent.world_report._vote

    def vote(parts: Any, change: Any, before: Any) -> Any:
        step, epoch = original(parts, change, before)
        fresh = before is None or before.voted != change.epoch
        return (max(one.step for one in parts) if step is not None and fresh else step), epoch

    return [patch.object(agent.world_report, "_vote", vote)]


# --- the rank ---


@mutation("join", "which has formed")
def formed_before_the_state() -> list[Patch]:
    """A rank says that it has formed a world before it has its state."""

    def change(
        verdict: str, before: WorldRank, after: WorldRank, order: Order
    ) -> tuple[str, WorldRank]:
        if verdict == conduct.JOIN and before.formed != order.number:
            return conduct.PUBLISH, before._replace(formed=order.number)
        return verdict, after

    return _obey(change)


@mutation("join-and-steps", "I13: a step in world")
def step_before_all_have_formed() -> list[Patch]:
    """A rank makes a step once it has formed the world, whatever the others have."""

    def change(
        verdict: str, before: WorldRank, after: WorldRank, order: Order
    ) -> tuple[str, WorldRank]:
        if order.phase == FORM and before.grouped and before.formed == order.number:
            return conduct.GO, before._replace(number=order.number)
        return verdict, after

    return _obey(change)


@mutation("two-crashes", "I13")
def torn_state_called_whole() -> list[Patch]:
    """A rank that takes a state calls its own whole, until it has that one."""
    original = conduct.begin_form
    return [
        patch.object(
            conduct,
            "begin_form",
            lambda rank, order, place: original(rank, order, place)._replace(step=rank.step),
        )
    ]


@mutation("half-a-step", "I13")
def half_a_step_called_whole() -> list[Patch]:
    """A rank whose optimizer has begun calls its state whole."""
    original = conduct.break_off
    return [patch.object(conduct, "break_off", lambda rank, step: original(rank, rank.step))]


@mutation("join-and-crash", "I11")
def newcomer_not_ready_again() -> list[Patch]:
    """A newcomer that has formed a world which did not come to be waits in it for ever."""

    def change(
        verdict: str, before: WorldRank, after: WorldRank, order: Order
    ) -> tuple[str, WorldRank]:
        if order.phase == IDLE and before.grouped:
            return conduct.WAIT, before
        return verdict, after._replace(ready=before.ready and after.ready)

    return _obey(change)


@mutation("drain-cancelled", "it ends for nothing")
def order_of_another_process() -> list[Patch]:
    """A fresh rank obeys what the rank before it was told."""

    def change(
        verdict: str, before: WorldRank, after: WorldRank, order: Order
    ) -> tuple[str, WorldRank]:
        return (conduct.PARK if order.phase == LEAVE else verdict), after

    return _obey(change)
