# SPDX-License-Identifier: Apache-2.0
"""One simulation: a seed in, a timeline and a verdict out, the same ones each time."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from unittest.mock import patch

from tests.simulation.invariants import Invariants
from tests.simulation.planted import planted
from tests.simulation.plot import Plot
from tests.simulation.plots import BY_NAME, PLOTS
from tests.simulation.pods import SimulatedJob
from tests.simulation.story import Story
from tests.simulation.timeline import Timeline
from tests.support.clocks.virtual import SimulatedLoop

POLL_S = (0.25, 0.25)
"""A sidecar looks at ranks that save a few times less often than in earnest: it costs most."""

LOOK_S = 0.25
"""So does one whose ranks are in a world that changes in place."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``failure`` is None where everything held. ``told``: the events that happened."""

    seed: int
    mutation: str
    plot: str
    timeline: Timeline
    failure: BaseException | None
    turns: int
    checks: int
    virtual_s: float
    told: frozenset[str]

    def report(self) -> str:
        """The timeline, what failed, and how to see it again."""
        command = f"scripts/simulate {self.seed}"
        if self.plot:
            command += f" --plot {self.plot}"
        if self.mutation:
            command += f" --planted {self.mutation}"
        verdict = "everything held"
        if self.failure is not None:
            verdict = f"{type(self.failure).__name__}: {self.failure}"
        return (
            f"{self.timeline.text()}\n\n"
            f"seed {self.seed}: {verdict}\n"
            f"{self.virtual_s:.1f} s of virtual time, {self.turns} turns, {self.checks} checks;"
            f" timeline {self.timeline.digest()[:16]}\n"
            f"replay it with: {command}"
        )


def simulate(seed: int, mutation: str = "", plot: str = "") -> Outcome:
    """Run one simulation. ``mutation`` names a bug to be planted first.

    ``plot``: the name of one, instead of that which the seed draws.
    """
    with alone(), planted(mutation):
        return _simulate(seed, mutation, plot)


def plot_of(seed: int) -> str:
    """Which plot the story of a seed has."""
    return _plot(Random(seed)).name


def _plot(random: Random) -> Plot:
    return random.choices(PLOTS, [plot.weight for plot in PLOTS])[0]


def _simulate(seed: int, mutation: str, asked: str) -> Outcome:
    random = Random(seed)
    plot = _plot(random)
    plot = BY_NAME.get(asked, plot)
    loop = SimulatedLoop(Random(random.random()))
    pods = random.choice(plot.pods)
    shape = plot.shape(random, pods)
    job = SimulatedJob(loop, shape, Random(random.random()))
    job.timeline.add("story", f"seed {seed}: {pods} pods, {shape}")
    invariants = Invariants(job)
    job.timeline.add("story", f"plot: {plot.name}")
    story = Story(job, invariants, Random(random.random()), plot)
    failure: BaseException | None = None
    try:
        loop.run_until_complete(story.run(pods, events=random.randint(*plot.length)))
    except (Exception, ExceptionGroup) as error:
        failure = error
    outcome = Outcome(
        seed=seed,
        mutation=mutation,
        plot=asked,
        timeline=job.timeline,
        failure=failure,
        turns=loop.turns,
        checks=invariants.checks,
        virtual_s=loop.time(),
        told=frozenset(story.told),
    )
    loop.end()
    return outcome


@contextmanager
def alone() -> Iterator[None]:
    """Let nothing of this process reach the simulation, nor of the simulation this process."""
    collecting, silence = gc.isenabled(), logging.root.manager.disable
    # What is collected runs code, at a moment that no seed decides.
    gc.disable()
    logging.disable(logging.CRITICAL)
    try:
        with ExitStack() as stack:
            for name, value in {
                "agent.drain.gate_writer.POLL_S": POLL_S,
                "agent.world_keeper.TRAIN_LOOK_S": LOOK_S,
                "agent.world_keeper.CHANGE_LOOK_S": LOOK_S / 5,
            }.items():
                stack.enter_context(patch(name, value))
            yield
    finally:
        logging.disable(silence)
        if collecting:
            gc.enable()
