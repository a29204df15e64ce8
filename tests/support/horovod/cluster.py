# SPDX-License-Identifier: Apache-2.0
"""A Horovod job for drills: real sidecars, agents and horovodrun, and what can befall them.

Nodes are wired as ``muster local`` wires them, from its own settings, so that a drill may do to
them what no event of it does.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from console.local.launch.horovod_line import read_horovod_line
from console.local.launch.settings import (
    LAUNCHER,
    LocalSettings,
    Pod,
    sidecar_command,
    sidecar_environment,
)
from console.local.nodes.payload import ExecHost, Horovodrun, Payload
from console.local.processes.marked import children, end_all, marked, send, send_to_all
from launcher_shim.horovod.hosts import token_of
from rdzv.store.access import Access
from tests.support.ports import free_ports

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "support" / "scripts" / "horovod_steps.py"
GLOO_TIMEOUT_S = 120
"""For a worker to wait for one that imports torch, on cores that are shared."""
FORM_TIMEOUT_S = 2.0 * GLOO_TIMEOUT_S
"""For a world to form, also after a wait for one that is gone."""
READY_TIMEOUT_S = 120.0
"""For a sidecar to start, on cores that are shared, and to wait for what is left of old leases."""
END_TIMEOUT_S = 120.0
"""For a process to end that was told to."""

_SWEEPER = """
import sys, time
from console.local.processes.marked import children, end_all, marked
sys.stdin.read()
end_all(lambda: marked(sys.argv[1]), set(), time.monotonic() + 10)
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One step that one worker has applied. ``at_s`` is monotonic."""

    at_s: float
    node: str
    host: str
    pid: int
    rank: int
    size: int
    number: int
    weight: int


@dataclass
class Node:
    """One simulated pod: a sidecar, and an agent or horovodrun."""

    pod: Pod
    payload: Payload
    log_dir: Path
    sidecar: subprocess.Popen[bytes] | None = None
    main: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return self.pod.name

    @property
    def host(self) -> str:
        """Its name to Horovod."""
        return token_of(self.pod.name, self.pod.uid)

    def ready(self) -> bool:
        """Whether its sidecar says so."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.pod.http_port}/readyz", timeout=2
            ) as answer:
                return int(answer.status) == 200
        except (urllib.error.HTTPError, OSError):
            return False


class HorovodCluster:
    """``with HorovodCluster(...) as job``; nothing of it outlives the block."""

    def __init__(
        self,
        directory: Path,
        folder: str,
        endpoints: Sequence[str],
        *,
        nodes: int,
        least: int,
        most: int,
        slots: int = 1,
        gloo_timeout_s: int = GLOO_TIMEOUT_S,
        lease_s: float = 4.0,
        name: str = "",
        command: Sequence[str] = ("python", str(SCRIPT)),
    ) -> None:
        self.run = uuid.uuid4().hex
        self.directory = directory
        self.nodes: dict[str, Node] = {}
        self._leaving: dict[str, Node] = {}
        self.told: list[tuple[float, str]] = []
        self.losses = 0
        self._folder = folder
        self._endpoints = ",".join(endpoints)
        self._steps, self._gates = directory / "steps", directory / "gates"
        for made in (self._steps, self._gates, directory / "run", directory / "logs"):
            made.mkdir(parents=True)
        words = [
            *("horovodrun", "--gloo-timeout-seconds", str(gloo_timeout_s)),
            *("--slots-per-host", str(slots), *command),
        ]
        self._line = read_horovod_line(words, 1)
        self.settings = LocalSettings(
            run=self.run,
            namespace="drills",
            job=name or f"job-{self.run[:8]}",
            line=self._line,
            nodes=nodes,
            min_nodes=least,
            max_nodes=most,
            restarts=0,
            lease_ttl_s=lease_s,
            checkpoints=directory / "checkpoints",
            access=Access(tuple(endpoints)),
            native=False,
        )
        self._lives = itertools.count()
        self._sweeper = subprocess.Popen(
            [sys.executable, "-c", _SWEEPER, self.run],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self) -> HorovodCluster:
        return self

    def __exit__(self, *_: object) -> None:
        (self.directory / "timeline.txt").write_text(self.timeline())
        end_all(lambda: marked(self.run), set(), time.monotonic() + END_TIMEOUT_S)
        for node in (*self.nodes.values(), *self._leaving.values()):
            self._reap(node)
        self._sweeper.communicate(timeout=END_TIMEOUT_S)

    # -- what befalls it

    def start(self) -> None:
        """Start the launcher's sidecar and the first nodes, and when they are ready horovodrun."""
        self.add(*(f"node-{index}" for index in range(self.settings.nodes)), launch=True)

    def add(self, *names: str, launch: bool = False) -> None:
        """Start nodes, empty ones, also under the name of one that is gone."""
        all_names = ((LAUNCHER,) if launch else ()) + names
        for name in all_names:
            self.begin(name)
        self.finish(*all_names[::-1])

    def begin(self, name: str) -> None:
        """Start a node's sidecar."""
        life = next(self._lives)
        workers = self.directory / "run" / "workers"
        payload: Payload
        if name == LAUNCHER:
            payload = Horovodrun(self.settings, self._line, workers)
        else:
            payload = ExecHost(self.settings, workers)
        c10d_port, http_port = free_ports(2)
        run_dir = self.directory / "run" / str(life)
        run_dir.mkdir()
        pod = Pod(name, f"{self.run}-{life}", payload.role, run_dir, c10d_port, http_port)
        log_dir = self.directory / "logs" / f"{name}.{life}"
        log_dir.mkdir()
        self.nodes[name] = node = Node(pod, payload, log_dir)
        self.tell(f"{name}: starts as {node.host}")
        self.start_sidecar(node)

    def finish(self, *names: str) -> None:
        """Start agents, or horovodrun, once the sidecars of all are ready."""
        nodes = [self.nodes[name] for name in names]
        self.until_ready(*nodes)
        for node in nodes:
            self.start_main(node)

    def until_ready(self, *nodes: Node) -> None:
        """Wait until the sidecars of nodes say that they are ready."""
        for node in nodes:
            self.until(node.ready, READY_TIMEOUT_S, f"the sidecar of {node.name} is ready")

    def start_sidecar(self, node: Node) -> None:
        """Start the sidecar, or start it again."""
        environ = sidecar_environment(self.settings, node.pod, self._endpoints)
        node.sidecar = self._spawn(node, sidecar_command(), environ, "sidecar.log")

    def start_main(self, node: Node) -> None:
        """Start the agent or horovodrun, as ``muster local`` does."""
        before = dict(os.environ)
        os.environ["PATH"] = f"{self._folder}{os.pathsep}{before['PATH']}"
        try:
            pod = node.pod
            process = node.payload.prepare(pod.name, pod.uid, pod.run_dir, pod.c10d_port)
        finally:
            os.environ.clear()
            os.environ.update(before)
        environ = {
            **process.environment,
            "STEPS_DIR": str(self._steps),
            "GATES_DIR": str(self._gates),
        }
        node.main = self._spawn(node, process.command, environ, f"{node.payload.name}.log")

    def _spawn(
        self, node: Node, command: Sequence[str], environ: Mapping[str, str], log: str
    ) -> subprocess.Popen[bytes]:
        with (node.log_dir / log).open("ab") as output:
            return subprocess.Popen(
                command,
                cwd=self.directory,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def leave(self, *names: str) -> None:
        """Let nodes go gently: their sidecars leave, their workers follow, then they end."""
        self.begin_to_leave(*names)
        self.end_leaving(*names)

    def begin_to_leave(self, *names: str) -> None:
        """Let the sidecars of nodes leave, all at the same time."""
        sidecars = [self.nodes[name].sidecar for name in names]
        for name, sidecar in zip(names, sidecars, strict=True):
            self.tell(f"{name}: leaves")
            assert sidecar is not None
            sidecar.terminate()
        for sidecar in sidecars:
            assert sidecar is not None
            sidecar.wait(END_TIMEOUT_S)
        self._leaving |= {name: self.nodes.pop(name) for name in names}

    def end_leaving(self, *names: str) -> None:
        """Wait until the workers of nodes that leave have left, and end the nodes."""
        for name in names:
            node = self._leaving[name]
            self._wait_for_no_worker(node)
            self._end_agent(node)
            del self._leaving[name]

    def _wait_for_no_worker(self, node: Node) -> None:
        self.until(lambda: not self.workers(node), END_TIMEOUT_S, f"{node.name} has no worker left")
        self.tell(f"{node.name}: its workers have left")

    def _end_agent(self, node: Node) -> None:
        assert node.main is not None
        send(self._agent(node), signal.SIGTERM)
        assert node.main.wait(END_TIMEOUT_S) == 143

    def stop_sidecar(self, name: str, number: signal.Signals) -> None:
        """End the sidecar of a node alone."""
        self.tell(f"{name}: its sidecar gets {number.name}")
        sidecar = self.nodes[name].sidecar
        assert sidecar is not None
        sidecar.send_signal(number)
        sidecar.wait(END_TIMEOUT_S)

    def kill(self, *names: str) -> None:
        """SIGKILL whole nodes, all at the same time."""
        self.losses += 1
        dead = [self.nodes.pop(name) for name in names]
        for name in names:
            self.tell(f"{name}: killed")
        found = set().union(*(marked(self.run, name) for name in names))
        send(found, signal.SIGKILL)
        for node in dead:
            self._bury(node)

    def _bury(self, node: Node) -> None:
        deadline_s = time.monotonic() + END_TIMEOUT_S
        left = end_all(lambda: marked(self.run, node.name), set(), deadline_s)
        assert not left
        self._reap(node)

    @staticmethod
    def _reap(node: Node) -> None:
        for process in (node.sidecar, node.main):
            if process is not None:
                process.wait(END_TIMEOUT_S)

    def freeze(self, name: str) -> None:
        """SIGSTOP everything of a node."""
        self.losses += 1
        self.tell(f"{name}: frozen")
        send_to_all(lambda: marked(self.run, name), signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """SIGCONT everything of a node."""
        self.tell(f"{name}: resumed")
        send_to_all(lambda: marked(self.run, name), signal.SIGCONT)

    def shut_gate(self, node: str) -> None:
        """Keep workers that will be started on ``node`` from joining."""
        (self._gates / self.nodes[node].host).touch()

    def open_gate(self, node: str) -> None:
        (self._gates / self.nodes[node].host).unlink()

    def until_at_the_gate(self, node: str) -> None:
        waits = self._gates / f"{self.nodes[node].host}.waits"
        self.until(waits.exists, FORM_TIMEOUT_S, f"a worker on {node} waits at the gate")

    # -- what is seen of it

    @property
    def launcher(self) -> Node:
        """The launcher's node."""
        return self.nodes[LAUNCHER]

    def workers(self, node: Node) -> set[int]:
        """The node's processes but its sidecar, its muster-run and its agent."""
        own = {process.pid for process in (node.sidecar, node.main) if process is not None}
        return marked(self.run, node.name) - own - self._agent(node)

    @staticmethod
    def _agent(node: Node) -> set[int]:
        return children(node.main.pid) if node.main is not None else set()

    def hosts(self) -> list[str]:
        """The nodes that the launcher's host list gives slots, in its order."""
        text = (self.launcher.pod.run_dir / "hosts").read_text()
        assert text.splitlines()[-1].startswith("rev-"), text
        return [line.partition(".")[0] for line in text.splitlines()[:-1]]

    def steps(self) -> list[Step]:
        """Every step that was applied, in the order of time."""
        steps = []
        for path in self._steps.iterdir():
            host, _, pid = path.name.rpartition(".")
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    at_s, *numbers = line.split()
                    rank, size, number, weight = map(int, numbers)
                    node = host.partition(".")[0]
                    steps.append(
                        Step(float(at_s), node, host, int(pid), rank, size, number, weight)
                    )
        return sorted(steps, key=lambda step: step.at_s)

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

    def until_world(self, *names: str, timeout_s: float = FORM_TIMEOUT_S) -> None:
        """Wait until exactly these nodes, in their present lives, make steps together."""
        wanted = {self.nodes[name].host for name in names}
        slots = self._line.slots

        def formed() -> bool:
            world = self.world()
            return set(world) == wanted and all(len(ranks) == slots for ranks in world.values())

        self.until(formed, timeout_s, f"{', '.join(names)} train together")
        self.tell(f"{', '.join(names)} train together at step {self.newest}")

    @property
    def newest(self) -> int:
        """The newest step that anybody has applied."""
        return max((step.number for step in self.steps()), default=0)

    def goes_on(self, steps: int = 20, timeout_s: float = 60.0) -> None:
        """Wait until so many more steps are made."""
        goal = self.newest + steps
        self.until(lambda: self.newest >= goal, timeout_s, f"{steps} more steps are made")

    def longest_pause_s(self, since_s: float) -> float:
        """The longest time without a step since then."""
        moments = [since_s, *(s.at_s for s in self.steps() if s.at_s > since_s), time.monotonic()]
        return max(b - a for a, b in itertools.pairwise(moments))

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

    def tell(self, what: str) -> None:
        """Put a line into the timeline."""
        self.told.append((time.monotonic(), what))

    def until(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Wait for a condition."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s or condition(), (
                f"not within {timeout_s:g} s: {what}\n{self.timeline()}"
            )
            time.sleep(0.05)

    def timeline(self) -> str:
        """What happened, in order, the worlds, and the last lines of every log."""
        moments = [*self.told]
        before: tuple[int, int] | None = None
        for step in self.steps():
            if before is None or before[1] != step.size:
                moments.append((step.at_s, f"step {step.number} in a world of {step.size}"))
            before = (step.number, step.size)
        moments.sort()
        first_s = moments[0][0] if moments else 0.0
        lines = [f"{at_s - first_s:7.1f} s  {what}" for at_s, what in moments]
        for log in sorted((self.directory / "logs").glob("*/*.log")):
            tail = log.read_text(errors="replace").splitlines()[-30:]
            lines += ["", f"-- {log.parent.name}/{log.name}", *tail]
        return "\n".join(lines)
