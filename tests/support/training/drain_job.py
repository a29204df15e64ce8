# SPDX-License-Identifier: Apache-2.0
"""A job whose nodes are drained, and the account of its steps: none lost, none trained twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rdzv.records.drain import Drain
from tests.support.releases.frozen import environ_of
from tests.support.sidecars.processes import PATIENT
from tests.support.training.job import Job, RunJob
from tests.support.training.pods import END_TIMEOUT_S, ROOT, Node
from tests.support.training.step_log import World, step_lines

SCRIPT = ROOT / "tests" / "support" / "scripts" / "drain_loop.py"
DRAINED_STATUS = 143
GRACE_S = "90"
"""Where nothing is to expire."""
STEPS_BETWEEN = 10

Notice = Callable[[Job, Node], object]


@dataclass(frozen=True)
class Account:
    """What became of every step that a job has made."""

    lost: list[int]
    twice: list[int]
    steps: int


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


@contextmanager
def saves_held(job: Job) -> Iterator[None]:
    """Let every save that begins in the block last until the block is over."""
    gate = job.directory / "gate"
    gate.touch()
    try:
        yield
    finally:
        gate.unlink()


@contextmanager
def agents_frozen(job: Job) -> Iterator[None]:
    """SIGSTOP every torchrun for as long as the block lasts; the workers go on."""
    agents = set()
    for node in job.nodes.values():
        assert node.launcher is not None
        children = Path(f"/proc/{node.launcher.pid}/task/{node.launcher.pid}/children")
        agents |= set(map(int, children.read_text().split()))
    job.tell(f"the torchruns {sorted(agents)} are frozen")
    for pid in agents:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in agents:
            os.kill(pid, signal.SIGCONT)
        job.tell("the torchruns go on")


def trains(job: Job, nodes: int) -> World:
    """Start nodes, and wait until all of them have made steps."""
    job.add(nodes)
    world = job.world_of(job.nodes.values())
    job.goes_on(world, STEPS_BETWEEN)
    return world


def first_step(job: Job, node: Node) -> int:
    """The first step that was made on a node."""
    logs = job.steps.directory.glob(f"{node.name}.*")
    return min(int(log.read_text().split()[1]) for log in logs)


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


def drain_of(job: Job, node: Node) -> Drain | None:
    """The newest drain of the node's pod, as the store has it."""
    drains = job.witness.sight.membership.drains.values()
    found = [drain for drain in drains if drain.member == node.name]
    return max(found, key=lambda drain: drain.created_revision, default=None)


# -- notices, as each way gives them


def notify(node: Node) -> None:
    """The sidecar's preStop hook."""
    subprocess.run(
        [sys.executable, *PATIENT, "notice", "--run-dir", str(node.run_dir)],
        cwd=node.program,
        env=environ_of(node.program),
        stdout=subprocess.DEVNULL,
        timeout=END_TIMEOUT_S,
        check=True,
    )


def terminate(job: Job, node: Node) -> None:
    """End the pod as the kubelet does: the sidecar's preStop hook, and SIGTERM to muster-run."""
    job.tell(f"{node.name}: the pod is deleted")
    notify(node)
    sigterm(job, node)


def sigterm(job: Job, node: Node) -> None:
    """SIGTERM to muster-run alone."""
    assert node.launcher is not None
    job.tell(f"{node.name}: SIGTERM to muster-run")
    node.launcher.send_signal(signal.SIGTERM)


def by_hand(job: Job, node: Node, *arguments: str, program: Path = ROOT) -> subprocess.Popen[str]:
    """``muster drain NODE``, of this Muster."""
    job.tell(f"{node.name}: muster drain {' '.join(arguments)}")
    return subprocess.Popen(
        [
            *(sys.executable, *PATIENT, "drain", node.name),
            *("--namespace", job.keys.namespace, "--job", job.name),
            *("--etcd-endpoints", ",".join(job.endpoints), *arguments),
        ],
        cwd=program,
        env=environ_of(program),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def operator(job: Job, node: Node, program: Path = ROOT) -> None:
    """``muster drain --wait``, of this Muster, to its end."""
    process = by_hand(job, node, "--wait", program=program)
    said, _ = process.communicate(timeout=2 * END_TIMEOUT_S)
    assert process.returncode == 0, said
    assert said.splitlines()[-1].startswith("released"), said


def hold(job: Job, node: Node) -> None:
    """``muster-hold`` as the training container's preStop hook; SIGTERM comes when it returns."""
    job.tell(f"{node.name}: muster-hold")
    program = str(node.run_dir / "bin" / "muster-hold")
    environ = {**os.environ, "MUSTER_RUN_DIR": str(node.run_dir)}
    subprocess.run([program], env=environ, timeout=END_TIMEOUT_S, check=True)
    sigterm(job, node)


# -- what must follow


def gone(job: Job, node: Node) -> int:
    """Wait until the container has ended; end the rest of the pod; return its status."""
    launcher, sidecar = node.launcher, node.sidecar
    assert launcher is not None
    assert sidecar is not None
    job.until(lambda: launcher.poll() is not None, END_TIMEOUT_S, f"{node.name} ends")
    left = job.processes(node.name) - {sidecar.pid}
    assert not left, f"{node.name} has ended, its processes {left} have not"
    job.stop_sidecar(node)
    del job.nodes[node.name]
    return int(launcher.returncode)


def released(job: Job, node: Node) -> Drain:
    """Wait until the drain of ``node`` has an outcome."""
    job.until(
        lambda: (drain := drain_of(job, node)) is not None and drain.outcome,
        END_TIMEOUT_S,
        f"the drain of {node.name} ends",
    )
    drain = drain_of(job, node)
    assert drain is not None
    return drain


def committed(job: Job, *nodes: Node, ranks: int) -> int:
    """Wait until these are drained; assert that all ranks saved one step; return it."""
    drains = [released(job, node) for node in nodes]
    assert {drain.outcome for drain in drains} == {"committed"}
    (step,) = {drain.step for drain in drains}
    assert step is not None
    saved = set()
    for path in (job.directory / "saves").iterdir():
        lines = map(str.split, path.read_text().splitlines())
        saved |= {int(rank) for _, at, rank, *_ in lines if int(at) == step}
    assert saved == set(range(ranks))
    return step


def nothing_lost(job: Job) -> Account:
    """Assert that every step was made once, in one world, and that no restart was burnt."""
    told = account_of(job.steps.directory)
    assert told.lost == [], f"steps lost: {told.lost}"
    assert told.twice == [], f"steps trained twice: {told.twice}"
    assert job.restarts_burnt() <= 0
    job.never_two_worlds()
    return told


def outcomes(job: Job) -> list[str]:
    """How the drains ended that the history tells of."""
    return [str(entry.details["outcome"]) for entry in job.history()]


def drain_and_replace(
    job: Job, world: World, leavers: Sequence[Node], notice: Notice, replace: int
) -> World:
    """Tell ``leavers`` to go, all at once; ``replace`` others come; the next world steps."""
    commits, before = len(job.witness.commits), job.round.number
    # Several are told before the save for the first of them is over.
    with saves_held(job) if len(leavers) > 1 else nullcontext():
        for node in leavers:
            notice(job, node)
        job.until(
            lambda: all(drain_of(job, node) for node in leavers), 120, "the drains are on record"
        )
    committed(job, *leavers, ranks=world.size)
    served = {c.epoch for _, c in job.witness.commits[commits:] if c.phase == "done"}
    assert len(served) == 1, f"drains at once shared no commit: epochs {served}"
    staying = [node for node in job.nodes.values() if node not in leavers]
    smaller = job.world_of(staying, not_=world)
    assert smaller.began_s > world.ended_s
    assert job.round.number == before + 1
    job.goes_on(smaller, STEPS_BETWEEN)
    for node in leavers:
        if notice is operator:
            job.kill_node(node)
        else:
            assert gone(job, node) == DRAINED_STATUS
    if not replace:
        return smaller
    job.add(replace)
    again = job.world_of(job.nodes.values(), not_=smaller)
    job.goes_on(again, STEPS_BETWEEN)
    return again


def a_row_of_drains(job: Job, drains: int) -> None:
    """Drain one node after another, by each way in turn; every fifth time two at once."""
    world = trains(job, 3)
    for turn in range(drains):
        notice = (terminate, operator, sigterm)[turn % 3]
        leavers = [job.nodes[world.workers[0].node]]
        if turn % 3 == 1:
            leavers = [job.nodes[max(job.nodes)]]
        if turn % 5 == 4:
            world = trains(job, 1)
            notice = sigterm  # the two commands would not come at once
            leavers = [job.nodes[name] for name in sorted(job.nodes)[:2]]
        world = drain_and_replace(job, world, leavers, notice, replace=1)
    told = nothing_lost(job)
    assert told.steps > 2 * STEPS_BETWEEN * drains
    assert set(outcomes(job)) == {"committed"}
    assert len(outcomes(job)) >= drains
