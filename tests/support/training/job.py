# SPDX-License-Identifier: Apache-2.0
"""A job for drills: real sidecars, real torchruns, and what can befall them.

Every process carries the marks of its job and node in its environment, so that a node can die as
a whole and nothing is left behind: a sweeper ends what a test run that was killed has left.
"""

from __future__ import annotations

import math
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import console
from launcher_shim.c10d.rounds.records import Round
from rdzv.keys import JobKeys
from rdzv.store.access import Access
from tests.support.ports import free_ports
from tests.support.store.tcp_proxy import TcpProxy
from tests.support.training.background import Background
from tests.support.training.step_log import StepLog, World
from tests.support.training.stillness import Stillness
from tests.support.training.witness import Witness

ROOT = Path(console.__file__).parent.parent
STEP_LOOP = ROOT / "tests" / "support" / "scripts" / "step_loop.py"
JOB_MARK, NODE_MARK = "STEP_LOOP_JOB", "STEP_LOOP_NODE"
FORM_TIMEOUT_S = 150.0
"""For a world to form: each of its processes imports torch, on cores that are shared."""
PAUSE_MAX_S = 10.0
"""Between two steps of a world that nobody disturbs, on cores that are shared.

A time in which the machine let nobody run does not count.
"""
READY_TIMEOUT_S = 120.0
"""For a sidecar to start, on cores that are shared, and to wait for what is left of old leases."""
LEAVE_TIMEOUT_S = 120.0
"""For a process to end that was told to, on cores that are shared."""
STEPS_TIMEOUT_S = 120.0
"""For some steps of a world; how long it may pause is for ``undisturbed``."""
KILL_TIMEOUT_S = 60.0
"""For the kernel to end what was sent SIGKILL."""

_SWEEPER = """
import sys
from tests.support.training.job import end_all
from tests.support.training.stillness import measure
try:
    measure()
finally:  # a test run that was killed may leave half a question
    end_all(sys.argv[1])
"""


def marked(job: str, node: str | None = None) -> set[int]:
    """Live processes of a job, or of one of its nodes."""
    marks = {f"{JOB_MARK}={job}".encode()}
    if node is not None:
        marks.add(f"{NODE_MARK}={node}".encode())
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environ = (entry / "environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if marks <= set(environ.split(b"\0")):
                found.add(int(entry.name))
    return found


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal every process that is still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def end_all(job: str, node: str | None = None, keep: set[int] | None = None) -> None:
    """Kill until nothing is left."""
    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    while pids := marked(job, node) - (keep or set()):
        assert time.monotonic() < deadline_s, f"{pids} outlive SIGKILL"
        send(pids, signal.SIGKILL)
        time.sleep(0.01)


class Node:
    """One simulated pod: a sidecar, a torchrun and its workers."""

    def __init__(self, job: Job, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.run_dir = job.directory / name
        self.c10d_port, self.http_port = free_ports(2)
        self.sidecar: subprocess.Popen[bytes] | None = None
        self.launcher: subprocess.Popen[bytes] | None = None
        self.proxies: list[TcpProxy] = []

    def ready(self) -> bool:
        """Whether the sidecar says so."""
        return self.ask("readyz")[0] == 200

    def ask(self, path: str) -> tuple[int, str]:
        """GET something from the sidecar; status 0 while nobody answers."""
        try:
            with urllib.request.urlopen(
                f"http://{self.address}:{self.http_port}/{path}", timeout=20
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def metric(self, name: str) -> float:
        """One value of the sidecar's metrics; not a number while nobody answers."""
        status, text = self.ask("metrics")
        if status == 0:
            return math.nan
        for line in text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise AssertionError(f"{self.name} has no metric {name}")

    def hosts(self) -> list[str]:
        """The members that the delivered host list gives slots."""
        lines = (self.run_dir / "hosts").read_text().splitlines()
        return sorted(line.partition(".")[0] for line in lines if not line.endswith(":0"))

    def sidecar_log(self) -> str:
        """Everything that the sidecar has logged."""
        return (self.run_dir / "sidecar.log").read_text()

    def launcher_log(self) -> str:
        """Everything that torchrun and its workers have written."""
        path = self.run_dir / "torchrun.log"
        return path.read_text(errors="replace") if path.exists() else ""


class Job:
    """A job in one store. ``slots`` processes a node; ``lease_s`` is the lease of its members.

    ``wrapped``: each torchrun is started by ``muster-run``, which then serves its rendezvous port.
    """

    def __init__(
        self,
        directory: Path,
        background: Background,
        endpoints: Access | Sequence[str],
        *,
        slots: int = 1,
        least: int = 2,
        most: int = 4,
        lease_s: float = 4.0,
        name: str | None = None,
        python: str = sys.executable,
        max_restarts: int = 30,
        sidecar_environ: Mapping[str, str] | None = None,
        proxied: bool = False,
        wrapped: bool = False,
        script: Path = STEP_LOOP,
        script_environ: Mapping[str, str] | None = None,
    ) -> None:
        self.token = secrets.token_hex(6)
        self.name = name or f"job-{self.token}"
        self.directory = directory / self.token
        self.background = background
        self.endpoints = list(endpoints.endpoints if isinstance(endpoints, Access) else endpoints)
        self.slots, self.least, self.most, self.lease_s = slots, least, most, lease_s
        self.python = python
        self.max_restarts = max_restarts
        self.nodes: dict[str, Node] = {}
        self.told: list[tuple[float, str]] = []
        self._sidecar_environ = dict(sidecar_environ or {})
        self._proxied = proxied
        self._wrapped = wrapped
        self._script, self.script_environ = script, dict(script_environ or {})
        self._added = 0
        self._proxies: list[TcpProxy] = []
        self._stop, self._fail = self.directory / "stop", self.directory / "fail"
        steps = self.directory / "steps"
        steps.mkdir(parents=True)
        self.steps = StepLog(steps)
        self.keys = JobKeys("drills", self.name)
        self.witness = Witness(background, endpoints, self.keys)
        self._stillness = Stillness(_SWEEPER, self.token, cwd=ROOT)

    # -- starting and ending

    def add(self, count: int = 1, *, uid: str = "", launch: bool = True) -> list[Node]:
        """Start nodes and wait until their sidecars are ready; then their torchruns."""
        nodes = []
        for _ in range(count):
            name = f"node-{self._added}"
            nodes.append(Node(self, name, f"127.0.1.{self._added + 1}"))
            self._added += 1
            nodes[-1].run_dir.mkdir()
            self.nodes[name] = nodes[-1]
            if self._proxied:
                nodes[-1].proxies = [self._proxy(endpoint) for endpoint in self.endpoints]
            self.start_sidecar(nodes[-1], uid=uid)
        self.until_ready(*nodes)
        if launch:
            for node in nodes:
                self.start_launcher(node)
        return nodes

    def until_ready(self, *nodes: Node) -> None:
        """Wait until the sidecars of nodes say that they are ready."""
        for node in nodes:
            self.until(node.ready, READY_TIMEOUT_S, f"the sidecar of {node.name} is ready")

    def start_sidecar(self, node: Node, *, uid: str = "") -> None:
        """Start the sidecar, or start it again."""
        self.tell(f"{node.name}: sidecar starts")
        node.sidecar = self._start(
            node,
            [sys.executable, "-m", "console.main", "agent"],
            "sidecar.log",
            {
                "MUSTER_NAMESPACE": self.keys.namespace,
                "MUSTER_JOB": self.name,
                "MUSTER_JOB_UID": uid,
                "MUSTER_MEMBER": node.name,
                "MUSTER_ADDRESS": node.address,
                "MUSTER_MIN": str(self.least),
                "MUSTER_MAX": str(self.most),
                "MUSTER_SLOTS": str(self.slots),
                "MUSTER_ETCD_ENDPOINTS": ",".join(self._endpoints_of(node)),
                "MUSTER_RUN_DIR": str(node.run_dir),
                "MUSTER_C10D_PORT": "0" if self._wrapped else str(node.c10d_port),
                "MUSTER_RELAY_PORT": str(node.c10d_port),
                "MUSTER_HTTP_PORT": str(node.http_port),
                "MUSTER_LEASE_TTL": f"{self.lease_s:g}s",
                "MUSTER_LOG_FORMAT": "plain",
                "PYTHONPATH": str(ROOT),
                **self._sidecar_environ,
            },
        )

    def _endpoints_of(self, node: Node) -> list[str]:
        return [proxy.endpoint for proxy in node.proxies] or self.endpoints

    def _proxy(self, endpoint: str) -> TcpProxy:
        proxy = TcpProxy(endpoint)
        self._proxies.append(proxy)
        return self.background.run(proxy.__aenter__())

    def start_launcher(
        self,
        node: Node,
        *,
        max_restarts: int | None = None,
        shell: str = "",
        options: Sequence[str] = (),
    ) -> None:
        """Start torchrun with what the sidecar has delivered, or start it again.

        ``shell``: the text that ``sh -c`` runs, with {} for the command. ``options``: of torchrun.
        """
        restarts = self.max_restarts if max_restarts is None else max_restarts
        self.tell(f"{node.name}: torchrun starts")
        if self._wrapped:
            # It brings the delivered variables itself, and its word is the last one.
            wrapper = [str(node.run_dir / "bin" / "muster-run"), "--"]
            delivered = {"MUSTER_RUN_DIR": str(node.run_dir), "PET_RDZV_ENDPOINT": "localhost:1"}
        else:
            wrapper = []
            lines = (node.run_dir / "env").read_text().splitlines()
            delivered = dict(line.split("=", 1) for line in lines)
        command = [
            *(self.python, "-m", "torch.distributed.run"),
            *(f"--nproc-per-node={self.slots}", f"--max-restarts={restarts}", *options),
            str(self._script),
        ]
        if shell:
            command = ["sh", "-c", shell.format(shlex.join(command))]
        node.launcher = self._start(
            node,
            [*wrapper, *command],
            "torchrun.log",
            {
                "PYTHONPATH": str(node.run_dir / "python"),
                **delivered,
                **self.script_environ,
                "OMP_NUM_THREADS": "1",
                "STEP_LOOP_DIR": str(self.steps.directory),
                "STEP_LOOP_STOP": str(self._stop),
                "STEP_LOOP_FAIL": str(self._fail),
            },
        )

    def _start(
        self, node: Node, command: Sequence[str], log: str, environ: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        foreign = ("MUSTER_", "PET_", "TORCHELASTIC_", "PYTHONPATH")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        with (node.run_dir / log).open("ab") as output:
            return subprocess.Popen(
                command,
                cwd=node.run_dir,
                env={**inherited, **environ, JOB_MARK: self.token, NODE_MARK: node.name},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def stop_training(self) -> None:
        """Let every rank end well, at the same step."""
        self.tell("the workers are told to end")
        self._stop.touch()

    def fail_training(self) -> None:
        """Let rank 0 fail, again and again."""
        self.tell("rank 0 is told to fail")
        self._fail.touch()

    def train_again(self) -> None:
        """Take ``stop_training`` and ``fail_training`` back."""
        self._stop.unlink(missing_ok=True)
        self._fail.unlink(missing_ok=True)

    def end(self) -> None:
        """End everything; the timeline stays in the job's directory."""
        (self.directory / "timeline.txt").write_text(self.timeline())
        end_all(self.token)
        for node in self.nodes.values():
            self._reap(node)
        for proxy in self._proxies:
            self.background.run(proxy.__aexit__(None, None, None))
        self.witness.close()
        self._stillness.end()

    @staticmethod
    def _reap(node: Node) -> None:
        for process in (node.sidecar, node.launcher):
            if process is not None:
                process.wait(KILL_TIMEOUT_S)

    # -- what befalls nodes

    def stop_node(self, node: Node) -> int:
        """End a node as Kubernetes does: SIGTERM to torchrun, then to its sidecar."""
        assert node.launcher is not None
        assert node.sidecar is not None
        self.tell(f"{node.name}: terminated")
        node.launcher.terminate()
        status = node.launcher.wait(40)
        node.sidecar.terminate()
        assert node.sidecar.wait(LEAVE_TIMEOUT_S) == 0
        del self.nodes[node.name]
        return status

    def kill_node(self, node: Node) -> None:
        """SIGKILL everything of the node at once."""
        self.tell(f"{node.name}: killed")
        end_all(self.token, node.name)
        self._reap(node)
        del self.nodes[node.name]

    def kill_agent_with_workers(self, node: Node) -> None:
        """SIGKILL torchrun and its workers; the sidecar stays."""
        assert node.sidecar is not None
        assert node.launcher is not None
        self.tell(f"{node.name}: torchrun and its workers killed")
        end_all(self.token, node.name, {node.sidecar.pid})
        node.launcher.wait(KILL_TIMEOUT_S)

    def kill_agent_only(self, node: Node) -> set[int]:
        """SIGKILL torchrun; returns the workers that it leaves behind."""
        assert node.sidecar is not None
        assert node.launcher is not None
        workers = marked(self.token, node.name) - {node.sidecar.pid, node.launcher.pid}
        self.tell(f"{node.name}: torchrun killed, {len(workers)} workers left")
        node.launcher.kill()
        node.launcher.wait(KILL_TIMEOUT_S)
        return workers

    def kill_sidecar(self, node: Node) -> None:
        """SIGKILL the sidecar alone."""
        assert node.sidecar is not None
        self.tell(f"{node.name}: sidecar killed")
        node.sidecar.kill()
        node.sidecar.wait(KILL_TIMEOUT_S)

    def stop_sidecar(self, node: Node) -> None:
        """SIGTERM to the sidecar alone, as for an upgrade in place."""
        assert node.sidecar is not None
        self.tell(f"{node.name}: sidecar stopped")
        node.sidecar.terminate()
        assert node.sidecar.wait(LEAVE_TIMEOUT_S) == 0

    def freeze(self, node: Node) -> None:
        """SIGSTOP everything of the node."""
        self.tell(f"{node.name}: frozen")
        send(marked(self.token, node.name), signal.SIGSTOP)

    def freeze_sidecar(self, node: Node) -> None:
        """SIGSTOP the sidecar alone; ``resume`` wakes it."""
        assert node.sidecar is not None
        self.tell(f"{node.name}: sidecar frozen")
        node.sidecar.send_signal(signal.SIGSTOP)

    def resume(self, node: Node) -> None:
        """SIGCONT everything of the node."""
        self.tell(f"{node.name}: resumed")
        send(marked(self.token, node.name), signal.SIGCONT)

    def cut_store(self, nodes: Iterable[Node], *, reset: bool = False) -> None:
        """Cut sidecars off the store: by a black hole, or with ``reset`` by closed connections."""
        for node in nodes:
            self.tell(f"{node.name}: cut off from the store")
            for proxy in node.proxies:
                self.background.call(proxy.cut if reset else proxy.hold)

    def mend_store(self) -> None:
        """Connect every sidecar to the store again."""
        self.tell("everybody is connected to the store again")
        for proxy in self._proxies:
            self.background.call(proxy.mend)

    # -- looking

    def tell(self, what: str) -> None:
        """Put a line into the timeline."""
        self.told.append((time.monotonic(), what))

    def until(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Wait for a condition."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= deadline_s:
                # The machine may have stood still since the last look.
                assert condition(), f"not within {timeout_s:g} s: {what}"
                return
            time.sleep(0.05)

    def world(self) -> World | None:
        """The newest world, if it has made a step within the last second."""
        worlds = self.steps.worlds()
        if worlds and time.monotonic() - worlds[-1].ended_s < 1.0:
            return worlds[-1]
        return None

    def world_of(
        self, nodes: Iterable[Node], timeout_s: float = FORM_TIMEOUT_S, *, not_: World | None = None
    ) -> World:
        """Wait until exactly these nodes step in one world, other than ``not_``."""
        names = {node.name for node in nodes}
        size = self.slots * len(names)

        world: World | None = None

        def formed() -> bool:
            nonlocal world
            world = self.world()
            return (
                world is not None
                and (not_ is None or world.number != not_.number)
                and world.nodes == names
                and world.size == len(world.workers) == size
            )

        self.until(formed, timeout_s, f"{', '.join(sorted(names))} step in one world of {size}")
        assert world is not None
        self.tell(f"world of {world.size} steps since {time.monotonic() - world.began_s:.1f} s")
        return world

    def goes_on(self, world: World, steps: int = 20, timeout_s: float = STEPS_TIMEOUT_S) -> None:
        """Wait until ``world`` has made so many more steps."""
        goal = len(world.steps_s) + steps
        self.until(
            lambda: self.steps.worlds() and len(world.steps_s) >= goal,
            timeout_s,
            f"the world makes {steps} more steps",
        )

    def undisturbed(self, world: World, since_s: float) -> None:
        """Assert that ``world`` has stepped all the time since then, with the same processes."""
        worlds = self.steps.worlds()
        assert worlds[-1] is world, f"another world of {worlds[-1].size} has formed"
        assert len(world.pids) == world.size
        for began_s, ended_s in world.pauses(since_s, time.monotonic()):
            if (pause_s := ended_s - began_s) >= PAUSE_MAX_S:
                still_s = self._stillness.between_s(began_s, ended_s)
                assert pause_s - still_s < PAUSE_MAX_S, (
                    f"no step for {pause_s:.1f} s, while the machine stood still for {still_s:.1f}"
                )

    def stood_still_s(self, since_s: float, until_s: float) -> float:
        """How much of the time between two moments the machine let nobody run."""
        return self._stillness.between_s(since_s, until_s)

    def in_agreement(self) -> bool:
        """Whether store, host lists and metrics of all nodes tell the same membership."""
        names, sight = set(self.nodes), self.witness.sight
        return (
            set(sight.membership.members) == names
            and {name for name, node in sight.nodes.items() if node.state == "in"} == names
            and {node.round for node in sight.nodes.values() if node.state == "in"}
            == {sight.round.number}
            and all(node.hosts() == sorted(names) for node in self.nodes.values())
            and all(node.metric("muster_registered") == 1 for node in self.nodes.values())
        )

    @property
    def round(self) -> Round:
        """The round as the store has it."""
        return self.witness.sight.round

    def never_two_worlds(self) -> None:
        """Assert I1: at no time did two worlds step; rounds only ever grew."""
        worlds = self.steps.worlds()
        for one, other in pairwise(worlds):
            overlap_s = one.ended_s - other.began_s
            assert overlap_s <= 0, f"two worlds stepped at once for {overlap_s:.2f} s"
        seen = [(generation, r.number, r.complete) for _, generation, r in self.witness.rounds]
        assert seen == sorted(seen), f"a round went back: {seen}"

    # -- for whoever has to find out why a test failed

    def timeline(self) -> str:
        """What happened, in order, and the last lines of every log."""
        moments = [*self.told]
        for at_s, generation, seen in self.witness.rounds:
            state = f"complete with {len(seen.frozen)}" if seen.complete else "open"
            closed = f", closed by {seen.closed}" if seen.closed else ""
            moments.append((at_s, f"round {generation}.{seen.number} {state}{closed}"))
        for at_s, commit in self.witness.commits:
            moments.append((at_s, f"commit {commit.epoch}: {commit.phase}, {commit.reason}"))
        for world in self.steps.worlds():
            nodes = ", ".join(sorted(world.nodes))
            moments.append((world.began_s, f"first step of a world of {world.size}: {nodes}"))
            moments.append((world.ended_s, f"last step of it, its {len(world.steps_s)}th"))
        moments.sort()
        first_s = moments[0][0] if moments else 0.0
        lines = [f"{at_s - first_s:7.1f} s  {what}" for at_s, what in moments]
        for log in sorted(self.directory.glob("*/*.log")):
            tail = log.read_text(errors="replace").splitlines()[-25:]
            lines += ["", f"-- {log.parent.name}/{log.name}", *tail]
        return "\n".join(lines)
