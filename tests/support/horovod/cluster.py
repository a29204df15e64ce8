# SPDX-License-Identifier: Apache-2.0
"""A Horovod job for drills: real sidecars, agents and horovodrun, and what can befall them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from console.local.launch_line import read_launch_line
from console.local.payload import CentralLauncher, ExecHost, Payload
from console.local.processes import NODE_MARK, RUN_MARK, children
from console.local.settings import LAUNCHER, LocalSettings
from launcher_shim.exit_status import EXIT_DONE
from launcher_shim.hosts import token_of
from launcher_shim.rundir import layout
from rdzv.records.policy import JobPolicy
from rdzv.store.access import Access
from tests.support.horovod.steps import Step, read_steps
from tests.support.ports import free_ports
from tests.support.training.pods import END_TIMEOUT_S, ROOT, Node, Pods

SCRIPT = ROOT / "tests" / "support" / "scripts" / "horovod_steps.py"
GLOO_TIMEOUT_S = 120
"""For a worker to wait for one that imports torch, on cores that are shared."""
FORM_TIMEOUT_S = 2.0 * GLOO_TIMEOUT_S
"""For a world to form, also after a wait for one that is gone."""


def horovod_folder() -> str:
    """The folder of horovodrun and of a python that has it; builds it if it is not there."""
    named = os.environ.get("MUSTER_TEST_HOROVOD")
    if named:
        return named
    program = ROOT / "scripts" / "toolchain" / "horovod"
    made = subprocess.run([program, sys.executable], stdout=subprocess.PIPE, text=True, check=True)
    return made.stdout.strip()


class HorovodCluster(Pods):
    """``with HorovodCluster(...) as job``; nothing of it outlives the block.

    ``wrapped``: horovodrun is under ``muster-run``, as in a pod.
    """

    def __init__(
        self,
        directory: Path,
        endpoints: Sequence[str],
        *,
        nodes: int,
        least: int,
        most: int,
        slots: int = 1,
        gloo_timeout_s: int = GLOO_TIMEOUT_S,
        lease_s: float = 4.0,
        grace_s: float = 30.0,
        wrapped: bool = False,
    ) -> None:
        run = uuid.uuid4().hex
        words = [
            *("horovodrun", "--gloo-timeout-seconds", str(gloo_timeout_s)),
            *("--slots-per-host", str(slots), "python", str(SCRIPT)),
        ]
        settings = LocalSettings(
            run=run,
            namespace="drills",
            job=f"job-{run[:8]}",
            line=read_launch_line(words, {}),
            nodes=nodes,
            policy=JobPolicy(least, most, gather_s=2.0),
            restarts=0,
            lease_ttl_s=lease_s,
            checkpoints=directory / "checkpoints",
            access=Access(tuple(endpoints)),
            native=False,
            grace_s=grace_s,
        )
        self._steps, self._gates = directory / "steps", directory / "gates"
        for made in (self._steps, self._gates):
            made.mkdir(parents=True)
        super().__init__(directory, settings, endpoints, (RUN_MARK, NODE_MARK))
        self.losses = 0
        self._wrapped = wrapped
        self._leaving: dict[str, Node] = {}
        self._lives = itertools.count()

    def __enter__(self) -> Self:
        try:
            self.add(*(f"node-{index}" for index in range(self.settings.nodes)), launch=True)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for node in self._leaving.values():
            self._reap(node)

    # -- what befalls it

    def add(self, *names: str, launch: bool = False) -> None:
        """Start nodes, empty ones, also under the name of one that is gone."""
        all_names = ((LAUNCHER,) if launch else ()) + names
        for name in all_names:
            self.begin(name)
        self.finish(*all_names[::-1])

    def begin(self, name: str) -> Node:
        """Start a node's sidecar."""
        life = next(self._lives)
        run_dir, uid = self.directory / "run" / str(life), f"{self.settings.run}-{life}"
        self.nodes[name] = node = Node(name, run_dir, uid, self._payload(name).role)
        node.pod = replace(node.pod, tunnel_port=free_ports(1)[0])
        self.start_sidecar(node)
        return node

    def _payload(self, name: str) -> Payload:
        if name == LAUNCHER:
            return CentralLauncher(self.settings)
        return ExecHost(self.settings)

    def finish(self, *names: str) -> None:
        """Start agents, or horovodrun, once the sidecars of all are ready."""
        nodes = [self.nodes[name] for name in names]
        self.until_ready(*nodes)
        for node in nodes:
            self._start_launcher(node)

    def _start_launcher(self, node: Node) -> None:
        pod = node.pod
        process = self._payload(node.name).prepare(pod.name, pod.uid, pod.run_dir, pod.c10d_port)
        path = process.environment["PATH"].replace(
            os.environ["PATH"], f"{horovod_folder()}:{os.environ['PATH']}"
        )
        environ = {
            **process.environment,
            "PATH": path,
            "STEPS_DIR": str(self._steps),
            "GATES_DIR": str(self._gates),
        }
        command = process.command
        if node.name == LAUNCHER and self._wrapped:
            command = (str(node.run_dir / layout.PROGRAMS / layout.MUSTER_RUN), "--", *command)
        node.launcher = self.spawn(node, command, environ, "launcher")

    def leave(self, *names: str) -> None:
        """Let nodes go gently: they drain, their workers leave, then they end."""
        self.begin_to_leave(*names)
        self.end_leaving(*names)

    def begin_to_leave(self, *names: str) -> None:
        """Give notice to nodes, one right after the other."""
        for name in names:
            self.nodes[name].notify()
        for name in names:
            self.tell(f"{name}: leaves")
            self._leaving[name] = self.nodes.pop(name)

    def end_leaving(self, *names: str) -> None:
        """Wait until the workers of nodes that leave have left, and end the nodes."""
        for name in names:
            node = self._leaving[name]
            self.until_no_worker(node)
            assert node.launcher is not None
            node.launcher.terminate()
            assert node.launcher.wait(END_TIMEOUT_S) == EXIT_DONE
            assert node.sidecar is not None
            node.sidecar.terminate()
            node.sidecar.wait(END_TIMEOUT_S)
            del self._leaving[name]

    def kill(self, *names: str) -> None:
        """SIGKILL whole nodes, all at the same time."""
        self.losses += 1
        self.kill_nodes(*(self.nodes[name] for name in names))

    def shut_gate(self, node: str) -> None:
        """Keep workers that will be started on ``node`` from joining."""
        (self._gates / token(self.nodes[node])).touch()

    def open_gate(self, node: Node) -> None:
        """Let them join."""
        (self._gates / token(node)).unlink()

    def until_gate(self, node: str, sign: str) -> None:
        """Wait until a worker on ``node`` ``waits`` at the gate, or has ``joined``."""
        path = self._gates / f"{token(self.nodes[node])}.{sign}"
        self.until(path.exists, FORM_TIMEOUT_S, f"a worker on {node}: {sign}")

    # -- what is seen of it

    @property
    def launcher(self) -> Node:
        """The launcher's node."""
        return self.nodes[LAUNCHER]

    def workers(self, node: Node) -> set[int]:
        """The node's processes but its sidecar, its muster-run and its agent."""
        own = {process.pid for process in (node.sidecar, node.launcher) if process is not None}
        agent = children(node.launcher.pid) if node.launcher is not None else set()
        return self.processes(node.name) - own - agent

    def until_no_worker(self, node: Node) -> None:
        """Wait until the workers of a node have left."""
        self.until(lambda: not self.workers(node), END_TIMEOUT_S, f"{node.name} has no worker left")

    def hosts(self) -> list[str]:
        """The nodes that the launcher's host list gives slots, in its order."""
        return self.launcher.hosts()

    def steps(self) -> list[Step]:
        """Every step that was applied, in the order of time."""
        return read_steps(self._steps)

    def world(self) -> dict[str, list[int]]:
        """The ranks of each host in the newest whole step of the last second; empty without."""
        recent: dict[int, list[Step]] = {}
        since_s = time.monotonic() - 1.0
        for step in self.steps():
            if step.at_s > since_s:
                recent.setdefault(step.number, []).append(step)
        for _, same in sorted(recent.items(), reverse=True):
            if len(same) == same[0].size:
                ranks: dict[str, list[int]] = {}
                for step in sorted(same, key=lambda step: step.rank):
                    ranks.setdefault(step.host, []).append(step.rank)
                return ranks
        return {}

    def training(self) -> list[str]:
        """The names of the nodes that train now, that of rank 0 first; waits for a whole step."""
        world: dict[str, list[int]] = {}

        def stepped() -> bool:
            nonlocal world
            world = self.world()
            return bool(world)

        self.until(stepped, FORM_TIMEOUT_S, "a whole step is made")
        return [host.partition(".")[0] for host in world]

    def host_of_rank_0(self) -> str:
        """The name of the node that hosts rank 0 now."""
        return self.training()[0]

    def until_world(self, *names: str) -> None:
        """Wait until exactly these nodes, in their present lives, make steps together."""
        wanted = {token(self.nodes[name]) for name in names}
        slots = self.settings.line.slots

        def formed() -> bool:
            world = self.world()
            return set(world) == wanted and all(len(ranks) == slots for ranks in world.values())

        self.until(formed, FORM_TIMEOUT_S, f"{', '.join(names)} train together")
        self.tell(f"{', '.join(names)} train together at step {self.newest}")

    @property
    def newest(self) -> int:
        """The newest step that anybody has applied."""
        return max((step.number for step in self.steps()), default=0)

    def goes_on(self, steps: int = 20) -> None:
        """Wait until so many more steps are made."""
        goal = self.newest + steps
        self.until(lambda: self.newest >= goal, END_TIMEOUT_S, f"{steps} more steps are made")

    def no_step_for(self, duration_s: float) -> bool:
        """Whether nobody applies a step for so long, from now on."""
        before, end_s = self.newest, time.monotonic() + duration_s
        while time.monotonic() < end_s:
            time.sleep(0.1)
            if self.newest > before:
                return False
        return True

    def assert_nothing_lost_or_doubled(self) -> None:
        """Every step was applied once by every rank of its world; a loss may cost one step.

        In that one, some had applied it and others had not: they restore the last commit.
        """
        # Files are read one after another while training goes on: what came before a step that
        # somebody has applied by now is in all of them, and what comes later may be under way.
        newest = self.newest
        steps = self.steps()
        assert [step for step in steps if step.weight != step.number] == []
        assert {step.number for step in steps} >= set(range(1, newest + 1))
        times = Counter((step.host, step.pid, step.number) for step in steps)
        doubled = {number for (_, _, number), count in times.items() if count > 1}
        applied = Counter(step.number for step in steps if step.number < newest)
        sizes = {step.number: step.size for step in steps}
        odd = doubled | {number for number, count in applied.items() if count != sizes[number]}
        self.tell(f"steps at odds: {sorted(odd)} after {self.losses} losses")
        assert len(odd) <= self.losses, f"steps at odds: {sorted(odd)}; losses: {self.losses}"

    def moments(self) -> Iterator[tuple[float, str]]:
        yield from super().moments()
        size = 0
        for step in self.steps():
            if step.size != size:
                size = step.size
                yield step.at_s, f"step {step.number} in a world of {size}"


def token(node: Node) -> str:
    """A node's name to Horovod."""
    return token_of(node.name, node.pod.uid)


class Roster:
    """The nodes of a job that should train now, by what becomes of them."""

    def __init__(self, job: HorovodCluster, *names: str) -> None:
        self.job = job
        self.names = set(names)
        self.changes = 0
        job.until_world(*names)

    def rank_0(self) -> str:
        return self.job.host_of_rank_0()

    def other(self) -> str:
        return min(self.names - {self.rank_0()})

    def settle(self, changes: int = 1) -> None:
        """Wait until those who should train do."""
        self.changes += changes
        self.job.until_world(*self.names)
        self.job.goes_on(10)

    def add(self, *names: str) -> None:
        self.job.add(*names)
        self.names |= set(names)
        self.settle(len(names))

    def leave(self, *names: str) -> None:
        self.names -= set(names)
        self.job.leave(*names)
        self.settle(len(names))

    def kill(self, *names: str) -> None:
        self.names -= set(names)
        self.job.kill(*names)
        self.settle(len(names))
