# SPDX-License-Identifier: Apache-2.0
"""What kind of story a simulation tells: how many pods, which events, and how often each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Literal

from rdzv.records.quarantine import Terms
from tests.simulation.nodes import JobShape

if TYPE_CHECKING:
    from tests.simulation.story import Story

Event = Callable[["Story"], None]
LATER_PODS = 8
"""The number of pods that come one after the other, where nodes keep coming."""
Shape = Callable[[Random, int], JobShape]
Launchers = Literal["steady", "absent", "crashing", "failing", "broken", "late"]
"""What becomes of a pod's launcher: it is there; it never starts; it dies soon after each start;
it dies soon after it is in a world; its workers raise the same error in each world before they have
started, and it goes on; it starts after a time for which torch's own launchers do not
wait."""


def roomy(random: Random, pods: int) -> JobShape:
    """At least a place for each pod, and one that the world can do without."""
    return JobShape(least=random.randint(1, pods - 1), most=random.randint(pods, pods + 1))


def tight(random: Random, pods: int) -> JobShape:
    """Often fewer places than pods: the others are spares. One pod at least may be missing."""
    most = random.randint(1, pods)
    return JobShape(least=random.randint(1, min(most, pods - 1)), most=most)


def in_twos(random: Random, pods: int) -> JobShape:
    """Two places: the others are spares."""
    return JobShape(least=random.randint(1, min(2, pods - 1)), most=min(2, pods))


def exact(random: Random, pods: int) -> JobShape:
    """A place for each pod, and all must be there."""
    return JobShape(least=pods, most=pods)


def any_shape(random: Random, pods: int) -> JobShape:
    """As many places as pods or more, or spares, or not one place that may stay empty."""
    most = random.randint(1, pods + 1)
    return JobShape(least=random.randint(1, min(most, pods)), most=most)


def patient(random: Random, pods: int) -> JobShape:
    """A place for each pod; ranks may wait once their pod has had no lease for long."""
    return replace(roomy(random, pods), on_cut=random.choice(("train", "hold")))


def held_on_cut(random: Random, pods: int) -> JobShape:
    """Often fewer places than pods; ranks wait once their pod has had no lease for long."""
    return replace(tight(random, pods), on_cut="hold")


def one_is_enough(random: Random, pods: int) -> JobShape:
    """A place for each pod, and a world may be of one."""
    return JobShape(least=1, most=pods)


def growing(random: Random, pods: int) -> JobShape:
    """Room for all that come later, too."""
    return JobShape(least=random.randint(1, pods), most=pods + LATER_PODS)


BRIEF_PAUSES = Terms(steps=10, first_s=10.0, longest_s=40.0)


def short_of_patience(random: Random, pods: int) -> JobShape:
    """A place for each pod; three worlds in a row without ten steps are too many."""
    return replace(one_is_enough(random, pods), quarantine=BRIEF_PAUSES)


def soon_tried(random: Random, pods: int) -> JobShape:
    """The same; a world without steps lasts for less than ranks load, and a try comes soon."""
    terms = replace(BRIEF_PAUSES, brief_s=8.0, trial_s=60.0)
    return replace(one_is_enough(random, pods), quarantine=terms)


def one_or_two(random: Random, pods: int) -> JobShape:
    """A place for each pod, and sometimes for one more; a world may be of one or two."""
    most = random.randint(pods, pods + 1)
    return JobShape(random.randint(1, min(2, pods)), most, quarantine=BRIEF_PAUSES)


def with_room(random: Random, pods: int) -> JobShape:
    """A place for each pod, and for one more; one may be missing, or none."""
    return JobShape(least=random.randint(1, pods), most=pods + 1)


def impatient(random: Random, pods: int) -> JobShape:
    """Any shape: no pod may be missing, or some may, or are spares."""
    return replace(any_shape(random, pods), quarantine=BRIEF_PAUSES)


@dataclass(frozen=True, slots=True)
class Plot:
    """One kind of story. ``trains``: with torchruns and ranks.

    ``healthy``: of its events none may cost a world that trains. ``ends``: the last step is near,
    and all is well at first. ``stages``: of so many torchruns in each container, one after the
    other. ``uploads``: after it some ranks have something left to do, which they
    end together. ``pods``: how many, one of these.
    ``length``: how many events, from and to. ``misfits``: what is wrong with the launchers of some
    pods, from the beginning to the end; as many as ``min`` and one at least are in order.
    ``start_s``: how long at most a rank imports, and loads, before it takes part.
    ``blocks``: over how many its pods are spread; 0: they know of no topology. ``shards``: its
    ranks train shards. ``in_place``: its worlds change in place. ``prologue``: what happened before
    the first pod came. ``machines``: its sidecars watch each other's machines. ``weight``: how
    often a seed that names no plot draws it, and how much of the long proof is of it.
    """

    name: str
    events: Mapping[Event, int]
    pods: tuple[int, ...]
    shape: Shape = roomy
    length: tuple[int, int] = (3, 6)
    trains: bool = True
    healthy: bool = False
    ends: bool = False
    stages: int = 1
    start_s: float = 0.0
    uploads: bool = False
    misfits: tuple[Launchers, ...] = ()
    blocks: int = 0
    shards: bool = False
    in_place: bool = False
    prologue: Event | None = None
    machines: bool = False
    weight: int = 1
