# SPDX-License-Identifier: Apache-2.0
"""Takes the steps of a small world: all of them from every state, or one at random after another.

A model says which steps there are from a state and what must hold; it raises ``Broken`` at whatever
does not, and is told here by which steps it came about.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
S = TypeVar("S")


class Broken(AssertionError):
    """Something that must hold does not."""


class Model(Protocol[S]):
    """A world of states ``S``. A step is its name and the state after it."""

    @property
    def rare(self) -> float:
        """How often a random walk takes one of the other steps, where something goes on."""

    def start(self) -> S:
        """The first state."""

    def begin_walk(self) -> None:
        """A random walk begins."""

    def offered(
        self, state: S, random: Random | None
    ) -> tuple[list[tuple[str, S]], Iterator[tuple[str, S]]]:
        """What goes on by itself, sooner or later; and what may happen besides.

        The latter are faults, and what people do: all of them, or some by ``random``.
        """

    def check_end(self, state: S) -> None:
        """Check a state in which nothing goes on by itself."""

    def key(self, state: S) -> Hashable:
        """Under which two states are one."""

    def pick(self, random: Random, state: S, steps: list[tuple[str, S]]) -> tuple[str, S]:
        """One of what goes on by itself, in a random walk."""


@dataclass
class Explored:
    """How much was seen. ``exhausted``: there was nothing else to see."""

    states: int = 0
    ends: int = 0
    exhausted: bool = False


def steps(model: Model[S], state: S, explored: Explored | None = None) -> Iterator[tuple[str, S]]:
    """All steps; a state in which nothing goes on by itself is checked."""
    going_on, others = model.offered(state, None)
    if not going_on:
        model.check_end(state)
        if explored is not None:
            explored.ends += 1
    return chain(going_on, others)


def explore(model: Model[S], states_max: int, first: S | None = None) -> Explored:
    """Take every step from every state, each state once; raises ``Broken`` with the way there."""
    explored = Explored()
    state = model.start() if first is None else first
    seen = {model.key(state)}
    names = ["start"]
    try:
        way = [steps(model, state, explored)]
        while way:
            found = next(way[-1], None)
            if found is None:
                way.pop()
                names.pop()
                continue
            name, state = found
            key = model.key(state)
            if key in seen:
                continue
            if len(seen) >= states_max:
                break
            seen.add(key)
            names.append(name)
            way.append(steps(model, state, explored))
    except Broken as broken:
        raise _told(broken, names) from None
    explored.states = len(seen)
    explored.exhausted = not way
    return explored


def _told(broken: Broken, names: list[str]) -> Broken:
    return Broken(f"{broken}, after {len(names)} steps: {'; '.join(names)}")


def walk(model: Model[S], random: Random, first: S | None = None, *, steps_max: int = 3000) -> int:
    """Take one random step after the other until nothing is left to do; return how many."""
    state, names = model.start() if first is None else first, ["start"]
    model.begin_walk()
    try:
        while len(names) <= steps_max:
            going_on, besides = model.offered(state, random)
            if not going_on:
                model.check_end(state)
            others = list(besides)
            if others and (not going_on or random.random() < model.rare):
                name, state = random.choice(others)
            elif going_on:
                name, state = model.pick(random, state, going_on)
            else:
                return len(names)
            names.append(name)
    except Broken as broken:
        raise _told(broken, names) from None
    raise Broken(f"no end after {steps_max} steps: {'; '.join(names[-40:])}")


def after(model: Model[S], *labels: str) -> S:
    """Take the steps so named, in this order."""
    state = model.start()
    for label in labels:
        offered = dict(steps(model, state))
        assert label in offered, f"{label} is none of {sorted(offered)}"
        state = offered[label]
    return state


def states_without_an_end(model: Model[S], states_max: int) -> list[str]:
    """States, by how they were reached, from which no order of steps leads to an end."""
    first = model.start()
    known: dict[Any, int] = {first: 0}
    reached, before, todo, ends = ["start"], [list[int]()], [first], []
    for at, state in enumerate(todo):
        found = list(steps(model, state))
        if not found:
            ends.append(at)
        for label, later in found:
            if later not in known:
                if len(known) >= states_max:
                    raise Broken(f"more than {states_max} states")
                known[later] = len(todo)
                todo.append(later)
                reached.append(label)
                before.append([])
            before[known[later]].append(at)
    fine = set(ends)
    while ends:
        for at in before[ends.pop()]:
            if at not in fine:
                fine.add(at)
                ends.append(at)
    return [reached[at] for at in range(len(todo)) if at not in fine]


def first_broken(
    model: Model[S], seeds: Iterable[int], first: S | None = None, *, steps_max: int = 3000
) -> str:
    """What random orders find wrong, the first of them; empty where they find nothing."""
    for seed in seeds:
        try:
            walk(model, Random(seed), first, steps_max=steps_max)
        except Broken as broken:
            return str(broken)
    return ""


def put(items: tuple[T, ...], at: int, item: T) -> tuple[T, ...]:
    """``items`` with another one in a place."""
    return (*items[:at], item, *items[at + 1 :])
