# SPDX-License-Identifier: Apache-2.0
"""A job for drills whose nodes are drained, and the account of its steps: none lost or repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rdzv.records.drain import Drain
from tests.support.releases.frozen import environ_of
from tests.support.sidecars.processes import PATIENT
from tests.support.training.pods import END_TIMEOUT_S, ROOT, Node
from tests.support.training.step_log import World, step_lines
from tests.support.training.torchruns import FORM_TIMEOUT_S as FORM_TIMEOUT_S
from tests.support.training.torchruns import STEP_LOOP as STEP_LOOP
from tests.support.training.torchruns import Torchruns

SCRIPT = ROOT / "tests" / "support" / "scripts" / "drain_loop.py"
DRAINED_STATUS = 143
GRACE_S = "90"
"""Where nothing is to expire."""
STEPS_BETWEEN = 10


@dataclass(frozen=True)
class Account:
    """What became of every step that a job has made."""

    lost: list[int]
    twice: list[int]
    steps: int


def account_of(steps: Path) -> Account:
    """Account for the step lines in a directory."""
    made: dict[int, set[int]] = defaultdict(set)
    for _, step, world in step_lines(steps):
        made[step].add(world)
    last = max(made, default=0)
    return Account(
        lost=[step for step in range(1, last + 1) if step not in made],
        twice=sorted(step for step, worlds in made.items() if len(worlds) > 1),
        steps=last,
    )


class Job(Torchruns):
    """Such pods, drained by SIGTERM: no step is lost, none is trained twice."""

    # -- drains

    def trains(self, nodes: int) -> World:
        """Start nodes, and wait until all of them have made steps."""
        self.add(nodes)
        world = self.world_of(self.nodes.values())
        self.goes_on(world, STEPS_BETWEEN)
        return world

    @contextmanager
    def saves_held(self) -> Iterator[None]:
        """Let every save that begins in the block last until the block is over."""
        gate = self.directory / "gate"
        gate.touch()
        try:
            yield
        finally:
            gate.unlink()

    @contextmanager
    def agents_frozen(self) -> Iterator[None]:
        """SIGSTOP every torchrun for as long as the block lasts; the workers go on."""
        agents = set()
        for node in self.nodes.values():
            assert node.launcher is not None
            children = Path(f"/proc/{node.launcher.pid}/task/{node.launcher.pid}/children")
            agents |= set(map(int, children.read_text().split()))
        self.tell(f"the torchruns {sorted(agents)} are frozen")
        for pid in agents:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in agents:
                os.kill(pid, signal.SIGCONT)
            self.tell("the torchruns go on")

    def drain_of(self, node: Node) -> Drain | None:
        """The newest drain of the node's pod, as the store has it."""
        drains = self.witness.sight.membership.drains.values()
        found = [drain for drain in drains if drain.member == node.name]
        return max(found, key=lambda drain: drain.created_revision, default=None)

    def all_noted(self, nodes: Sequence[Node]) -> None:
        """Wait until the drains of these are on record."""
        self.until(lambda: all(map(self.drain_of, nodes)), 120, "the drains are on record")

    def first_step(self, node: Node) -> int:
        """The first step that was made on a node."""
        logs = self.steps.directory.glob(f"{node.name}.*")
        return min(int(log.read_text().split()[1]) for log in logs)

    def outcomes(self) -> list[str]:
        """How the drains ended that the history tells of."""
        return [str(entry.details["outcome"]) for entry in self.history()]

    # -- notices, as each way gives them

    def terminate(self, node: Node) -> None:
        """End the pod as the kubelet does: preStop hook of the sidecar, SIGTERM to muster-run."""
        self.tell(f"{node.name}: the pod is deleted")
        node.notify()
        self.sigterm(node)

    def sigterm(self, node: Node) -> None:
        """SIGTERM to muster-run alone."""
        assert node.launcher is not None
        self.tell(f"{node.name}: SIGTERM to muster-run")
        node.launcher.send_signal(signal.SIGTERM)

    def by_hand(self, node: Node, *arguments: str, program: Path = ROOT) -> subprocess.Popen[str]:
        """``muster drain NODE``, of this Muster."""
        self.tell(f"{node.name}: muster drain {' '.join(arguments)}")
        return subprocess.Popen(
            [
                *(sys.executable, *PATIENT, "drain", node.name),
                *("--namespace", self.keys.namespace, "--job", self.name),
                *("--etcd-endpoints", ",".join(self.endpoints), *arguments),
            ],
            cwd=program,
            env=environ_of(program),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def operator(self, node: Node, program: Path = ROOT) -> None:
        """``muster drain --wait``, of this Muster, to its end."""
        process = self.by_hand(node, "--wait", program=program)
        said, _ = process.communicate(timeout=2 * END_TIMEOUT_S)
        assert process.returncode == 0, said
        assert said.splitlines()[-1].startswith("released"), said

    def hold(self, node: Node) -> None:
        """``muster-hold`` as a preStop hook of the container; SIGTERM comes when it returns."""
        self.tell(f"{node.name}: muster-hold")
        program = str(node.run_dir / "bin" / "muster-hold")
        environ = {**os.environ, "MUSTER_RUN_DIR": str(node.run_dir)}
        subprocess.run([program], env=environ, timeout=END_TIMEOUT_S, check=True)
        self.sigterm(node)

    # -- what must follow

    def gone(self, node: Node) -> int:
        """Wait until the container has ended; end the rest of the pod; return its status."""
        launcher, sidecar = node.launcher, node.sidecar
        assert launcher is not None
        assert sidecar is not None
        self.until(lambda: launcher.poll() is not None, END_TIMEOUT_S, f"{node.name} ends")
        left = self.processes(node.name) - {sidecar.pid}
        assert not left, f"{node.name} has ended, its processes {left} have not"
        self.stop_sidecar(node)
        del self.nodes[node.name]
        return int(launcher.returncode)

    def released(self, node: Node) -> Drain:
        """Wait until the drain of ``node`` has an outcome."""
        self.until(
            lambda: (drain := self.drain_of(node)) is not None and drain.outcome,
            END_TIMEOUT_S,
            f"the drain of {node.name} ends",
        )
        drain = self.drain_of(node)
        assert drain is not None
        return drain

    def committed(self, *nodes: Node, ranks: int) -> int:
        """Wait until these are drained; assert that all ranks saved one step; return it."""
        drains = [self.released(node) for node in nodes]
        assert {drain.outcome for drain in drains} == {"committed"}
        (step,) = {drain.step for drain in drains}
        assert step is not None
        saved = set()
        for path in (self.directory / "saves").iterdir():
            lines = map(str.split, path.read_text().splitlines())
            saved |= {int(rank) for _, at, rank, *_ in lines if int(at) == step}
        assert saved == set(range(ranks))
        return step

    def nothing_lost(self) -> Account:
        """Assert that every step was made once, in one world, and that no restart was burnt."""
        told = account_of(self.steps.directory)
        assert told.lost == [], f"steps lost: {told.lost}"
        assert told.twice == [], f"steps trained twice: {told.twice}"
        assert self.restarts_burnt() <= 0
        self.never_two_worlds()
        return told

    # -- in a row

    def drain_and_replace(
        self, world: World, leavers: Sequence[Node], notice: Notice, replace: int
    ) -> World:
        """Tell ``leavers`` to go, all at once; ``replace`` others come; the next world steps."""
        commits, before = len(self.witness.commits), self.round.number
        # Several are drained before the save for the first of them is over.
        with self.saves_held() if len(leavers) > 1 else nullcontext():
            for node in leavers:
                notice(self, node)
            self.all_noted(leavers)
        self.committed(*leavers, ranks=world.size)
        served = {c.epoch for _, c in self.witness.commits[commits:] if c.phase == "done"}
        assert len(served) == 1, f"drains at once shared no commit: epochs {served}"
        staying = [node for node in self.nodes.values() if node not in leavers]
        smaller = self.world_of(staying, not_=world)
        assert smaller.began_s > world.ended_s
        assert self.round.number == before + 1
        self.goes_on(smaller, STEPS_BETWEEN)
        for node in leavers:
            if notice is Job.operator:
                self.kill_node(node)
            else:
                assert self.gone(node) == DRAINED_STATUS
        if not replace:
            return smaller
        self.add(replace)
        again = self.world_of(self.nodes.values(), not_=smaller)
        self.goes_on(again, STEPS_BETWEEN)
        return again

    def a_row_of_drains(self, drains: int) -> None:
        """Drain one node after another, by each way in turn; every fifth time two at once."""
        world = self.trains(3)
        for turn in range(drains):
            notice = (Job.terminate, Job.operator, Job.sigterm)[turn % 3]
            leavers = [self.nodes[world.workers[0].node]]
            if turn % 3 == 1:
                leavers = [self.nodes[max(self.nodes)]]
            if turn % 5 == 4:
                world = self.trains(1)
                notice = Job.sigterm  # the two commands would not come at once
                leavers = [self.nodes[name] for name in sorted(self.nodes)[:2]]
            world = self.drain_and_replace(world, leavers, notice, replace=1)
        told = self.nothing_lost()
        assert told.steps > 2 * STEPS_BETWEEN * drains
        assert set(self.outcomes()) == {"committed"}
        assert len(self.outcomes()) >= drains


Notice = Callable[[Job, Node], object]

RunJob = Callable[..., AbstractContextManager[Job]]
"""The fixture that makes jobs."""


@contextmanager
def draining_job(
    run_job: RunJob,
    endpoints: Sequence[str],
    *,
    script_environ: dict[str, str] | None = None,
    sidecar_environ: dict[str, str] | None = None,
    **settings: Any,
) -> Iterator[Job]:
    """A job that trains ``drain_loop.py``, under ``muster-run`` where not told otherwise."""
    with run_job(
        list(endpoints),
        **{"wrapped": True, "lease_s": 30.0, "script": SCRIPT} | settings,
        script_environ=dict(script_environ or {}),
        sidecar_environ={"MUSTER_GRACE_S": GRACE_S} | (sidecar_environ or {}),
    ) as job:
        # Read when a torchrun is started.
        job.script_environ["DRAIN_LOOP_GATE"] = str(job.directory / "gate")
        yield job
