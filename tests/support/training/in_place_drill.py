# SPDX-License-Identifier: Apache-2.0
"""Changes of a world in place, one after another in one job, and the account of all its steps."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from agent.rundir.reports import read_ranks
from launcher_shim.c10d.rounds.stages import SHARED_RUN
from rdzv.records.world import WorldChange
from tests.support.training.job import DRAINED_STATUS, FORM_TIMEOUT_S, Job
from tests.support.training.pods import END_TIMEOUT_S, ROOT, Node

SCRIPT = ROOT / "tests" / "support" / "scripts" / "in_place_loop.py"
KINDS = (
    *("join", "drain", "worker", "torchrun", "node", "stop"),
    *("two", "sidecar in a form", "store in a form"),
)
"""The kinds of change. ``stop``: a whole pod stands still until it counts as lost, and comes back.
``two``: at once."""

FEWEST, MOST = 2, 5
AWAY_S = 3.0
"""Time for which the store is away."""

LONG = 10
"""Worlds of a process that should not have grown in them."""

GROWTH_KIB, SPARE_DESCRIPTORS = 16 * 1024, 4


@dataclass(frozen=True)
class Made:
    """One step of one rank."""

    at_s: float
    step: int
    rank: int
    size: int
    world: int
    loss: float
    checksum: int
    used: Used


@dataclass(frozen=True)
class Used:
    """The memory and the descriptors of a process."""

    resident_kib: int
    descriptors: int


@dataclass
class Life:
    """The account of one process. ``node``: its pod."""

    node: str
    pid: int
    steps: list[Made] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """What one change has come to. ``fell_back``: the cause, empty if it happened in place."""

    kind: str
    what: str
    took_s: float
    worlds: int
    fell_back: str = ""
    restarted: tuple[str, ...] = ()
    """Survivors whose worker is another process afterwards."""

    def __str__(self) -> str:
        how = f"fell back: {self.fell_back}" if self.fell_back else "in place"
        restarted = f", restarted: {', '.join(self.restarted)}" if self.restarted else ""
        return (
            f"{self.kind:18} {self.took_s:6.2f} s {self.worlds} worlds  {self.what}: {how}"
            f"{restarted}"
        )


class Drill:
    """One job and its changes. ``seed`` chooses who is struck."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job = job
        self.outcomes: list[Outcome] = []
        self.sidecars: dict[int, list[Used]] = {}
        """What each sidecar's process used after each change."""
        self._random = random.Random(seed)
        self._account = job.directory / "account"
        self._account.mkdir()
        job.script_environ |= {
            "IN_PLACE_DIR": str(self._account),
            "CHECKPOINT_DIR": str(job.directory / "saved"),
        }

    # -- what happens

    def begin(self, pods: int) -> None:
        """Start the job."""
        self.job.add(pods)
        self.settle()

    def change(self, kind: str, *, rank_0: bool) -> Outcome:
        """Let one change of this kind happen, and wait until all pods train in one world.

        ``rank_0``: whether the pod of rank 0 is the one that is struck.
        """
        job = self.job
        seats = [seat.member for seat in job.round.frozen]
        victim = job.nodes[seats[0] if rank_0 else seats[-1]]
        before = {name: worker_of(node) for name, node in job.nodes.items()}
        changes, round_ = len(job.witness.changes), job.round.number
        began_s = time.monotonic()
        job.tell(f"change {len(self.outcomes) + 1}: {kind}, {victim.name}")
        what, struck, settled = self._act(kind, victim)
        settled()
        self.settle()
        seen = job.witness.changes[changes:]
        fell_back = next((one.reason for _, one in seen if one.phase == "fall-back"), "")
        if job.round.number != round_ and not fell_back:
            fell_back = f"round {job.round.number} without a word"
        forms = [at_s for at_s, one in seen if one.phase == "train" and one.number]
        restarted = tuple(
            name
            for name, pid in before.items()
            if name in job.nodes and name not in struck and worker_of(job.nodes[name]) != pid
        )
        outcome = Outcome(
            kind,
            f"{what}, rank 0" if rank_0 else what,
            (forms[0] if forms else time.monotonic()) - began_s,
            len(forms),
            fell_back,
            restarted,
        )
        self.outcomes.append(outcome)
        job.tell(str(outcome))
        with (job.directory / "drill.txt").open("a") as file:
            file.write(f"{outcome}\n")
        for node in job.nodes.values():
            if node.sidecar is not None:
                pid = node.sidecar.pid
                self.sidecars.setdefault(pid, []).append(used(pid))
        return outcome

    def _act(self, kind: str, victim: Node) -> tuple[str, set[str], Callable[[], object]]:
        """Strike; return what happened, to which pods, and what else is to be waited for."""
        job, name = self.job, victim.name
        if kind == "join":
            (new,) = job.add()
            return f"{new.name} joins", set(), _nothing
        if kind == "drain":
            job.terminate(victim)
            return f"{name} leaves", {name}, lambda: self._gone(victim)
        if kind == "worker":
            pid = worker_of(victim)
            job.tell(f"{name}: its worker {pid} is killed")
            os.kill(pid, signal.SIGKILL)
            return f"the worker of {name} is killed", {name}, lambda: self._another(victim, pid)
        if kind == "torchrun":
            pid = worker_of(victim)
            self._kill_torchrun(victim)
            return f"the torchrun of {name} is killed", {name}, lambda: self._another(victim, pid)
        if kind == "node":
            job.kill_node(victim)
            return f"{name} is killed", {name}, _nothing
        if kind == "stop":
            job.freeze(victim)
            return f"{name} stands still", {name}, lambda: self._comes_back(victim)
        if kind == "two":
            return self._two(victim)
        if kind == "sidecar in a form":
            return self._in_a_form(victim, "its sidecar is killed")
        assert kind == "store in a form"
        return self._in_a_form(victim, "the store is away")

    def _two(self, victim: Node) -> tuple[str, set[str], Callable[[], object]]:
        """Two changes at once: one pod leaves or is killed as another one joins or is killed."""
        job, name = self.job, victim.name
        if len(job.nodes) < MOST and self._random.random() < 0.6:
            (new,) = job.add()
            self._until_ready(new)
            job.terminate(victim)
            return f"{name} leaves as {new.name} joins", {name}, lambda: self._gone(victim)
        others = [one for one in job.nodes.values() if one is not victim]
        other = others[-1]
        if self._random.random() < 0.5:
            job.terminate(victim)
            job.kill_node(other)
            what = f"{name} leaves as {other.name} is killed"
            return what, {name, other.name}, lambda: self._gone(victim)
        pid = worker_of(other)
        os.kill(pid, signal.SIGKILL)
        job.terminate(victim)
        told = f"{name} leaves as the worker of {other.name} is killed"

        def settled() -> None:
            self._gone(victim)
            self._another(other, pid)

        return told, {name, other.name}, settled

    def _in_a_form(self, victim: Node, what: str) -> tuple[str, set[str], Callable[[], object]]:
        """A pod joins, or leaves, and ``what`` happens as the next world forms."""
        job = self.job
        sidecar = victim.sidecar
        assert sidecar is not None
        done = threading.Event()

        def strike(change: WorldChange) -> None:
            if change.phase != "form" or done.is_set():
                return
            done.set()
            if what.startswith("the store"):
                for node in job.nodes.values():
                    for proxy in node.proxies:
                        proxy.hold()
            else:
                sidecar.kill()

        job.witness.at_change = strike
        leaver = victim
        joins = len(job.nodes) < 4
        if joins:
            (new,) = job.add()
            told = f"{new.name} joins"
        else:
            leaver = next(one for one in job.nodes.values() if one is not victim)
            job.terminate(leaver)
            told = f"{leaver.name} leaves"
        job.until(done.is_set, FORM_TIMEOUT_S, "a world forms")
        job.witness.at_change = None
        job.tell(f"{victim.name}: {what} amid the form")
        if what.startswith("the store"):
            time.sleep(AWAY_S)
            job.mend_store()
        else:
            sidecar.wait(END_TIMEOUT_S)
            time.sleep(1.0)
            job.start_again(victim)
        if joins:
            return f"{told}; {victim.name}: {what}", set(), _nothing
        return f"{told}; {victim.name}: {what}", {leaver.name}, lambda: self._gone(leaver)

    def _kill_torchrun(self, node: Node) -> None:
        launcher = node.launcher
        assert launcher is not None
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        (torchrun,) = [int(one) for one in children]
        self.job.tell(f"{node.name}: its torchrun {torchrun} is killed")
        os.kill(torchrun, signal.SIGKILL)

    def _comes_back(self, node: Node) -> None:
        """Let a pod that stands still go on once the others train without it."""
        others = {name for name in self.job.nodes if name != node.name}
        self.settle(others)
        self.job.resume(node)

    def _gone(self, node: Node) -> None:
        assert self.job.gone(node) == DRAINED_STATUS

    def _another(self, node: Node, pid: int) -> None:
        """Wait for another worker; a container that ends is started again, as by a kubelet."""

        def there() -> bool:
            if node.launcher is not None and node.launcher.poll() is not None:
                self.job.start_launcher(node)
            return worker_of(node) not in (0, pid)

        self.job.until(there, FORM_TIMEOUT_S, f"{node.name} has a worker")

    def _until_ready(self, node: Node) -> None:
        """Wait until the worker of a newcomer waits to be taken in, or is in already."""

        def waits() -> bool:
            lines = read_ranks(node.run_dir / "progress")
            return any(
                line.in_world is not None and (line.in_world.ready or line.in_world.number > 0)
                for line in lines
            )

        self.job.until(waits, FORM_TIMEOUT_S, f"{node.name} waits to be taken in")

    def settle(self, names: Iterable[str] | None = None) -> None:
        """Wait until these pods, or all, train in one world that changes in place."""
        names = self.job.nodes if names is None else names
        in_world_of(self.job, *(self.job.nodes[name] for name in names))

    # -- what must hold

    def lives(self) -> list[Life]:
        """The account of every process."""
        found = []
        for path in sorted(self._account.iterdir()):
            node, _, pid = path.name.rpartition(".")
            whole, _, _ = path.read_text().rpartition("\n")
            steps = [_made(line) for line in whole.splitlines()]
            if steps:
                found.append(Life(node, int(pid), steps))
        return found

    def check(self) -> None:
        """Assert that each step counts once, and that all ranks have one state after each."""
        lives = self.lives()
        by_step: dict[int, list[tuple[Life, Made]]] = {}
        for life in lives:
            numbers = [one.step for one in life.steps]
            assert numbers == sorted(set(numbers)), f"{life.node} makes a step twice"
            for one in life.steps:
                by_step.setdefault(one.step, []).append((life, one))
        assert sorted(by_step) == list(range(1, max(by_step) + 1)), "a step is missing"
        for step, made in by_step.items():
            worlds = sorted({one.world for _, one in made})
            for world in worlds:
                states = {one.checksum for _, one in made if one.world == world}
                assert len(states) == 1, f"step {step} of world {world}: {len(states)} states"
            # A step that does not count is the last one of its process in that world.
            for life, one in made:
                if one.world != worlds[-1]:
                    later = [other for other in life.steps if other.step > step]
                    assert not any(other.world == one.world for other in later), (
                        f"{life.node}: step {step} made twice"
                    )

    def losses(self) -> list[float]:
        """The loss of each step, as the newest world has it."""
        found: dict[int, Made] = {}
        for life in self.lives():
            for one in life.steps:
                if one.step not in found or one.world >= found[one.step].world:
                    found[one.step] = one
        return [found[step].loss for step in sorted(found)]

    def undisturbed(self, steps: int) -> list[float]:
        """The loss of each step of one process that nothing befalls."""
        folder = self.job.directory / "undisturbed"
        folder.mkdir()
        environ = {
            **{key: value for key, value in os.environ.items() if key != "MUSTER_RUN_DIR"},
            "IN_PLACE_DIR": str(folder),
            "CHECKPOINT_DIR": str(folder / "saved"),
            "IN_PLACE_STEPS": str(steps),
            "IN_PLACE_STEP_S": "0",
        }
        done = subprocess.run(
            [sys.executable, str(SCRIPT)],
            env=environ,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=FORM_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        (path,) = [one for one in folder.iterdir() if one.is_file()]
        return [_made(line).loss for line in path.read_text().splitlines()]

    def folders(self) -> set[bytes]:
        """The numbers of worlds of which the store has keys."""
        job = self.job
        shared = job.keys.in_generation(job.generation).run(SHARED_RUN)
        names = [
            shared.split(key)[1]
            for key in job.witness.kvs()
            if key.startswith((shared.kv, shared.sums))
        ]
        return {name.split(b"/")[3] for name in names if name.startswith(b"/muster.world/")}

    def growth(self) -> list[str]:
        """What the processes of ten worlds or more used after a third of their time, and last."""
        found = []
        for life in self.lives():
            worlds = len({one.world for one in life.steps})
            if worlds >= LONG:
                taken = [one.used for one in life.steps]
                found.append(f"worker of {life.node}, {worlds} worlds: {grown(taken)}")
        for pid, taken in self.sidecars.items():
            if len(taken) >= LONG:
                found.append(f"sidecar {pid}, {len(taken)} changes: {grown(taken)}")
        return found

    def flat(self) -> None:
        """Assert that no process of many worlds grows."""
        lives = [life for life in self.lives() if len({one.world for one in life.steps}) >= LONG]
        series = [[one.used for one in life.steps] for life in lives]
        series += [taken for taken in self.sidecars.values() if len(taken) >= LONG]
        assert lives, "no process has lived through many worlds"
        for taken in series:
            early, last = taken[len(taken) // 3], taken[-1]
            assert last.resident_kib - early.resident_kib < GROWTH_KIB, grown(taken)
            # The number of its peers comes and goes with the size of the world.
            third = len(taken) // 3
            before, after = (
                max(one.descriptors for one in part) for part in (taken[:third], taken[-third:])
            )
            assert after - before <= SPARE_DESCRIPTORS, grown(taken)

    def report(self) -> str:
        """One line a change, and one a long life."""
        return "\n".join([*map(str, self.outcomes), *self.growth()])


def grown(taken: list[Used]) -> str:
    """What a process used after a third of its time, and last."""
    early, last = taken[len(taken) // 3], taken[-1]
    return (
        f"{early.resident_kib} -> {last.resident_kib} KiB,"
        f" {early.descriptors} -> {last.descriptors} descriptors"
    )


def used(pid: int) -> Used:
    """What a process uses now; nothing if it is not there."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return Used(pages * 4, len(os.listdir(f"/proc/{pid}/fd")))
    except (FileNotFoundError, ProcessLookupError):
        return Used(0, 0)


def in_world_of(job: Job, *nodes: Node) -> None:
    """Wait until the world of exactly these nodes has formed in place, and makes steps."""
    names = {node.name for node in nodes}

    def formed() -> bool:
        current, changes = job.round, job.witness.changes
        return (
            current.world > 0
            and {seat.member for seat in current.frozen} == names
            and bool(changes)
            and changes[-1][1].phase == "train"
        )

    job.until(formed, FORM_TIMEOUT_S, f"{sorted(names)} are in one world")
    at = max(line.step for node in nodes for line in read_ranks(node.run_dir / "progress"))
    job.until(
        lambda: all(
            any(line.step > at + 3 for line in read_ranks(node.run_dir / "progress"))
            for node in nodes
        ),
        FORM_TIMEOUT_S,
        "they make steps",
    )


def worker_of(node: Node) -> int:
    """The process of a node's worker; 0 for none."""
    lines = read_ranks(node.run_dir / "progress")
    return lines[0].pid if lines else 0


def plan(changes: int, seed: int) -> list[tuple[str, bool]]:
    """The kinds of so many changes, and whether each strikes rank 0: in the first round it does."""
    order = random.Random(seed)
    found: list[tuple[str, bool]] = []
    while len(found) < changes:
        turn = list(KINDS)
        order.shuffle(turn)
        found += [(kind, len(found) < 2 * len(KINDS)) for kind in turn]
    return found[:changes]


def _made(line: str) -> Made:
    at_s, step, rank, size, world, loss, checksum, resident, descriptors = line.split()
    place = (int(rank), int(size), int(world))
    taken = Used(int(resident), int(descriptors))
    return Made(float(at_s), int(step), *place, float(loss), int(checksum), taken)


def _nothing() -> None:
    """Nothing else is to be waited for."""
