# SPDX-License-Identifier: Apache-2.0
"""What befalls the job of a launch line, one event after another, and the steps that each costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from tests.support.launchers.rows import FIRST_STAGE_STEPS, PREPARED, Row
from tests.support.training.job import (
    DRAINED_STATUS,
    FORM_TIMEOUT_S,
    STEPS_BETWEEN,
    Job,
    RunJob,
    account_of,
    draining_job,
)
from tests.support.training.pods import Node
from tests.support.training.step_log import World, step_lines

EVERY = 20
"""Steps between two periodic saves."""
FORM_S = 2 * FORM_TIMEOUT_S
"""For a world to form, also after a first stage."""
WELL = "0 lost"
SAVED = "since the last save"


@dataclass
class Life:
    """A job, and the events of the columns."""

    job: Job

    def __post_init__(self) -> None:
        self._seen = 0
        self._world: World | None = None

    def cost(self) -> int:
        """Return how many steps were lost since the last time of asking.

        They are those that a world had made and the next one begins below.
        """
        made: dict[int, set[int]] = {}
        for _, step, world in sorted(step_lines(self.job.steps.directory)):
            made.setdefault(world, set()).add(step)
        worlds = list(made.values())
        lost = 0
        for before, after in pairwise(worlds[max(self._seen - 1, 0) :]):
            begins, due = min(after), max(before) + 1
            assert begins <= due, f"the steps from {due} to {begins - 1} are left out"
            lost += due - begins
        self._seen = len(worlds)
        return lost

    def steps(self, nodes: int) -> None:
        """Wait until so many nodes make steps in a world that was not there before."""
        job = self.job
        assert len(job.nodes) == nodes
        self._world = job.world_of(job.nodes.values(), FORM_S, not_=self._world)
        job.goes_on(self._world, STEPS_BETWEEN)
        job.never_two_worlds()

    def none_lost(self) -> str:
        lost = self.cost()
        assert lost == 0, f"{lost} steps lost"
        return WELL

    def saved_kept(self) -> str:
        lost = self.cost()
        assert lost < 2 * EVERY, f"{lost} steps lost, saved every {EVERY}"
        return SAVED

    def grow(self, nodes: int) -> None:
        """Let so many nodes train from the beginning."""
        if nodes:
            self.job.add(nodes)
            self.steps(nodes)

    # -- columns

    def train(self) -> str:
        self.grow(2)
        return self.none_lost()

    def join(self) -> str:
        self.job.add()
        self.steps(3)
        return self.none_lost()

    def kill(self) -> str:
        self.job.kill_node(self._first())
        self.steps(2)
        return self.saved_kept()

    def restart(self) -> str:
        node = self._first()
        self.job.kill_agent_with_workers(node)
        self.job.start_launcher(node)
        self.steps(2)
        return self.saved_kept()

    def drain(self) -> str:
        leaver = self._first()
        left = len(self.job.nodes) - 1
        self.job.terminate(leaver)
        assert self.job.released(leaver).outcome == "committed", self.job.released(leaver)
        assert self.job.gone(leaver) == DRAINED_STATUS
        self.steps(left)
        return self.none_lost()

    def ends(self) -> str:
        """End the training: all containers end with 0, and so does that of a pod that comes now."""
        job = self.job
        job.stop_training()
        assert set(job.launchers_end()) == {0}, "a container does not end with 0"
        job.until(lambda: job.round.closed == "success", 60, "it is closed by success")
        job.add()
        assert set(job.launchers_end()) == {0}, "a pod that comes after the end fails"
        return WELL

    def second_stage(self) -> str:
        came = self.train()
        first = account_of(self.job.directory / PREPARED)
        assert (first.steps, first.lost) == (FIRST_STAGE_STEPS, []), f"the first stage: {first}"
        return came

    def joins_second_stage(self) -> str:
        """Let a pod come in the second stage, which skips the first one; end the job."""
        trained = {*(self.job.directory / PREPARED).iterdir()}
        self.join()
        assert {*(self.job.directory / PREPARED).iterdir()} == trained, "it ran the first stage"
        return self.ends()

    def _first(self) -> Node:
        """The node of rank 0."""
        return self.job.nodes[self.job.steps.worlds()[-1].workers[0].node]


class Event(NamedTuple):
    """What befalls a job, in a column of the table; ``nodes``: how many train before it."""

    column: str
    befalls: Callable[[Life], str]
    nodes: int


EVENTS = (
    Event("train", Life.train, 0),
    Event("join", Life.join, 2),
    Event("kill", Life.kill, 3),
    Event("container restart", Life.restart, 2),
    Event("drain", Life.drain, 2),
    Event("late pod", Life.ends, 1),
)
STAGES = (
    Event("second stage", Life.second_stage, 0),
    Event("late pod", Life.joins_second_stage, 2),
)
COLUMNS = ("train", "drain", "join", "kill", "late pod", "second stage", "container restart")


@contextmanager
def living(
    rows: Sequence[Row],
    run_job: RunJob,
    endpoints: Sequence[str],
    *,
    stages: bool = False,
    **settings: Any,
) -> Iterator[Life]:
    """A job whose pods are started by one line, or in turn by several.

    ``stages``: each line is the second of two stages.
    """
    with draining_job(run_job, endpoints, **{"least": 1, "most": 4} | settings) as job:
        for row in rows:
            job.script_environ |= row.environ(job.directory)
        job.script_environ["DRAIN_LOOP_ALL_EVERY"] = str(EVERY)

        def line(node: Node) -> list[str]:
            number = int(node.name.removeprefix("node-"))
            row, image = rows[number % len(rows)], node.run_dir / "image"
            return row.command(number, image, job.directory, stages=stages)

        job.line = line
        yield Life(job)


def outcomes(row: Row, run_job: RunJob, endpoints: Sequence[str]) -> dict[str, str]:
    """Run a row; return what came of it, by column.

    A job in which an event failed is ended, and the next event befalls another one.
    """
    found: dict[str, str] = {}
    for events, stages in ((EVENTS, False), (STAGES, True)):
        with ExitStack() as stack:
            life: Life | None = None
            for event in events:
                try:
                    if life is None:
                        life = stack.enter_context(living([row], run_job, endpoints, stages=stages))
                        life.grow(event.nodes)
                    came = event.befalls(life)
                except AssertionError as error:
                    first, *_ = str(error).splitlines() or [repr(error)]
                    came = f"fails: {first}"
                    stack.close()
                    life = None
                if found.get(event.column, WELL) == WELL:
                    found[event.column] = came
    return found
