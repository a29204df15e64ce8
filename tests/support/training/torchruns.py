# SPDX-License-Identifier: Apache-2.0
"""The pods of a job for drills: real sidecars, real torchruns, and what can befall them."""

from __future__ import annotations

import re
import secrets
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from console.local.launch_line import LaunchLine
from console.local.settings import LocalSettings, launcher_environment, read_delivery
from launcher_shim.c10d.rounds.records import Round
from rdzv.keys import JobKeys
from rdzv.records.job import HistoryEntry
from rdzv.records.policy import JobPolicy
from rdzv.store.access import Access
from tests.support.releases.frozen import said
from tests.support.store.tcp_proxy import TcpProxy
from tests.support.training.background import Background
from tests.support.training.pods import END_TIMEOUT_S, ROOT, Node, Pods
from tests.support.training.step_log import StepLog, Training, World
from tests.support.training.witness import Witness

STEP_LOOP = ROOT / "tests" / "support" / "scripts" / "step_loop.py"
FORM_TIMEOUT_S = 300.0
"""For a world to form: each of its processes imports torch, on cores that are shared, and a world
that vanished as a whole is kept for a minute, or longer where the store stalls."""

_PORT_TAKEN = re.compile(
    r"failed to listen on any local network address\. port: (\d+),[^\n]*\bEADDRINUSE\b"
)


class Torchruns(Training, Pods):
    """A job in one store. ``slots`` processes a node; ``lease_s`` is the lease of its members.

    The longer it is, the longer a sidecar may stall unnoticed, and the later a loss is seen.

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
        lease_s: float = 8.0,
        name: str | None = None,
        python: str = sys.executable,
        max_restarts: int = 30,
        sidecar_environ: Mapping[str, str] | None = None,
        proxied: bool = False,
        wrapped: bool = False,
        script: Path = STEP_LOOP,
        script_environ: Mapping[str, str] | None = None,
    ) -> None:
        token = secrets.token_hex(6)
        access = endpoints if isinstance(endpoints, Access) else Access(tuple(endpoints))
        settings = LocalSettings(
            run=token,
            namespace="drills",
            job=name or f"job-{token}",
            line=LaunchLine((), slots),
            nodes=0,
            policy=JobPolicy(least, most, gather_s=2.0),
            restarts=max_restarts,
            lease_ttl_s=lease_s,
            checkpoints=directory / token / "checkpoints",
            access=access,
            native=False,
        )
        steps = directory / token / "steps"
        steps.mkdir(parents=True)
        # The UID of a job, which marks what muster local starts, may be any here, or none.
        marks = ("STEP_LOOP_JOB", "STEP_LOOP_NODE")
        super().__init__(directory / token, settings, access.endpoints, marks)
        self.name = settings.job
        self.background = background
        self.slots, self.lease_s = slots, lease_s
        self._python = python
        self._sidecar_environ = dict(sidecar_environ or {})
        self._proxied, self._wrapped = proxied, wrapped
        self._script, self.script_environ = script, dict(script_environ or {})
        self.line: Callable[[Node], Sequence[str]] | None = None
        """The command of a node, in place of a torchrun of the script."""
        self._added = 0
        self._proxies: list[TcpProxy] = []
        self._stop, self._fail = self.directory / "stop", self.directory / "fail"
        self.steps = StepLog(steps)
        self.keys = JobKeys(settings.namespace, self.name)
        self.witness = Witness(background, endpoints, self.keys)

    # -- starting and ending

    def add(
        self,
        count: int = 1,
        *,
        uid: str = "",
        launch: bool = True,
        program: Path = ROOT,
        environ: Mapping[str, str] | None = None,
    ) -> list[Node]:
        """Start nodes and wait until their sidecars are ready; then their torchruns.

        ``program``: which Muster the sidecars are of. ``environ``: what they are told otherwise
        than those of before.
        """
        nodes = []
        for _ in range(count):
            node = self.node(f"node-{self._added}", self._added + 1, uid)
            node.program = program
            node.sidecar_settings.update(environ or {})
            self._added += 1
            nodes.append(node)
            self.nodes[node.name] = node
            if self._proxied:
                node.proxies = [self._proxy(each) for each in self.endpoints]
            self.start_sidecar(node)
        self.until_ready(*nodes)
        if launch:
            for node in nodes:
                self.start_launcher(node)
        return nodes

    def node(self, name: str, number: int, job_uid: str = "") -> Node:
        """A pod at an address of its own."""
        run_dir = self.directory / f"{name}.{number}"
        node = Node(name, run_dir, f"{self.settings.run}-{number}")
        node.sidecar_settings = {
            "MUSTER_JOB_UID": job_uid,
            "MUSTER_ADDRESS": f"127.0.1.{number}",
            "MUSTER_LOG_FORMAT": "plain",
            **self._sidecar_environ,
        }
        if not self._wrapped:
            node.sidecar_settings["MUSTER_C10D_PORT"] = str(node.pod.c10d_port)
        return node

    def _proxy(self, endpoint: str) -> TcpProxy:
        proxy = TcpProxy(endpoint)
        self._proxies.append(proxy)
        return self.background.run(proxy.__aenter__())

    def start_launcher(self, node: Node, *, shell: str = "", options: Sequence[str] = ()) -> None:
        """Start torchrun with what the sidecar has delivered, or start it again.

        ``shell``: the text that ``sh -c`` runs, with {} for the command. ``options``: of torchrun.
        """
        self.tell(f"{node.name}: torchrun starts")
        command = [
            *(self._python, "-m", "torch.distributed.run", f"--nproc-per-node={self.slots}"),
            *(f"--max-restarts={self.settings.restarts}", *options, str(self._script)),
        ]
        if self.line is not None:
            command = list(self.line(node))
        if shell:
            command = ["sh", "-c", shell.format(shlex.join(command))]
        delivered: Mapping[str, str] = {}
        if self._wrapped:
            command = [str(node.run_dir / "bin" / "muster-run"), "--", *command]
        else:
            delivered = read_delivery((node.run_dir / "env").read_text())
        environ = {
            **launcher_environment(self.settings, node.name, node.run_dir, delivered),
            "STEP_LOOP_DIR": str(self.steps.directory),
            "STEP_LOOP_STOP": str(self._stop),
            "STEP_LOOP_FAIL": str(self._fail),
            **self.script_environ,
        }
        node.launcher = self.spawn(node, command, environ, "launcher")

    def start_again(self, node: Node) -> None:
        """Start a sidecar again, and wait until it is ready."""
        self.start_sidecar(node)
        self.until_ready(node)

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

    def launchers_end(self) -> list[int]:
        """Wait until every torchrun has ended; return their statuses."""
        launchers = [node.launcher for node in self.nodes.values() if node.launcher is not None]
        self.until(
            lambda: all(one.poll() is not None for one in launchers),
            END_TIMEOUT_S,
            "every torchrun ends",
        )
        return [one.wait() for one in launchers]

    def end(self) -> None:
        super().end()
        for proxy in self._proxies:
            self.background.run(proxy.__aexit__(None, None, None))
        self.witness.close()

    # -- what befalls nodes

    def stop_node(self, node: Node) -> int:
        """End a node as Kubernetes does: SIGTERM to torchrun, then to its sidecar."""
        assert node.launcher is not None
        self.tell(f"{node.name}: terminated")
        node.launcher.terminate()
        status = node.launcher.wait(END_TIMEOUT_S)
        self.stop_sidecar(node)
        del self.nodes[node.name]
        return status

    def kill_node(self, node: Node) -> None:
        """SIGKILL everything of the node at once."""
        self.kill_nodes(node)

    def kill_agent_with_workers(self, node: Node) -> None:
        """SIGKILL torchrun and its workers; the sidecar stays."""
        assert node.sidecar is not None
        assert node.launcher is not None
        self.tell(f"{node.name}: torchrun and its workers killed")
        self._end_processes(node.name, {node.sidecar.pid})
        node.launcher.wait(END_TIMEOUT_S)

    def kill_agent_only(self, node: Node) -> None:
        """SIGKILL torchrun, and wait until the workers that it leaves behind have ended."""
        assert node.sidecar is not None
        assert node.launcher is not None
        workers = self.processes(node.name) - {node.sidecar.pid, node.launcher.pid}
        assert len(workers) >= self.slots
        self.tell(f"{node.name}: torchrun killed, {len(workers)} workers left")
        node.launcher.kill()
        node.launcher.wait(END_TIMEOUT_S)
        self.until(lambda: not workers & self.processes(node.name), 60, "the orphans end")

    def kill_sidecar(self, node: Node) -> None:
        """SIGKILL the sidecar alone."""
        self.stop_sidecar(node, signal.SIGKILL)

    def cut_store(self, nodes: Iterable[Node]) -> None:
        """Cut sidecars off the store, by a black hole."""
        for node in nodes:
            self.tell(f"{node.name}: cut off from the store")
            for proxy in node.proxies:
                self.background.call(proxy.hold)

    def mend_store(self) -> None:
        """Connect every sidecar to the store again."""
        self.tell("all are connected to the store again")
        for proxy in self._proxies:
            self.background.call(proxy.mend)

    # -- looking

    def world_of(
        self, nodes: Iterable[Node], timeout_s: float = FORM_TIMEOUT_S, *, not_: World | None = None
    ) -> World:
        """Wait until exactly these nodes step in one world, other than ``not_``."""
        names = {node.name for node in nodes}
        size = self.slots * len(names)
        return self.until_world(
            lambda world: world.nodes == names and world.size == size,
            timeout_s,
            f"{', '.join(sorted(names))} step in one world of {size}",
            not_,
        )

    def muster(self, *arguments: str, program: Path = ROOT) -> str:
        """Run a command on the job, to its end; return what it prints."""
        printed = said(
            program,
            *arguments,
            timeout_s=FORM_TIMEOUT_S,
            MUSTER_NAMESPACE=self.keys.namespace,
            MUSTER_JOB=self.name,
            MUSTER_ETCD_ENDPOINTS=",".join(self.endpoints),
        )
        self.tell(f"muster {shlex.join(arguments)}: {printed.strip()}")
        return printed

    def undisturbed(self, world: World, steps: int = 20) -> None:
        """Assert that ``world`` still steps, with the same processes, and is the newest one."""
        self.goes_on(world, steps)
        worlds = self.steps.worlds()
        assert worlds[-1] is world, f"another world of {worlds[-1].size} has formed"
        assert len(world.pids) == world.size

    def members(self) -> set[str]:
        """The names of the members, as the store has them."""
        return set(self.witness.sight.membership.members)

    def until_members(self, *nodes: Node) -> None:
        """Wait until the store lists these, and no other."""
        names = {node.name for node in nodes}
        self.until(lambda: self.members() == names, 60, f"the members are {sorted(names)}")

    def in_agreement(self) -> bool:
        """Whether store, host lists and metrics of all nodes tell the same membership."""
        names, sight = set(self.nodes), self.witness.sight
        return (
            self.members() == names
            and {name for name, node in sight.nodes.items() if node.state == "in"} == names
            and {node.round for node in sight.nodes.values() if node.state == "in"}
            == {sight.round.number}
            and all(sorted(node.hosts()) == sorted(names) for node in self.nodes.values())
            and all(node.metric("muster_registered") == 1 for node in self.nodes.values())
        )

    @property
    def round(self) -> Round:
        """The round as the store has it."""
        return self.witness.sight.round

    @property
    def generation(self) -> int:
        """The generation as the store has it."""
        record = self.witness.sight.membership.job
        assert record is not None
        return record.generation

    def state(self, node: Node) -> str:
        """Where a node stands in the run, as the store has it; empty where it does not."""
        found = self.witness.sight.nodes.get(node.name)
        return found.state if found else ""

    def history(self, what: str = "drain") -> list[HistoryEntry]:
        """What is kept of drains, or of something else; the oldest first."""
        prefix, kvs = self.keys.history, sorted(self.witness.kvs().items())
        entries = [HistoryEntry.from_kv(kv) for key, kv in kvs if key.startswith(prefix)]
        return [entry for entry in entries if entry.what == what]

    def restarts_burnt(self, since: World | None = None) -> int:
        """Most restarts that torch has counted on one node since a world, or at all.

        Less those over a port that torch had chosen and another program was given.
        """
        before = (
            {worker.node: worker.restarts for worker in since.workers.values()} if since else {}
        )
        worlds = self.steps.worlds()
        if since is not None:
            # Those before have nodes that are gone, with restarts of their own.
            worlds = worlds[next(n for n, world in enumerate(worlds) if world is since) :]
        workers = [worker for world in worlds for worker in world.workers.values()]
        burnt = max(worker.restarts - before.get(worker.node, 0) for worker in workers)
        logs = "".join(
            log.read_text(errors="replace") for log in self.directory.glob("*/launcher.log")
        )
        return burnt - len(set(_PORT_TAKEN.findall(logs)))

    def never_two_worlds(self) -> None:
        """Assert I1: at no time did two worlds step; rounds only ever grew."""
        worlds = self.steps.worlds()
        for one, other in pairwise(worlds):
            overlap_s = one.ended_s - other.began_s
            assert overlap_s <= 0, f"two worlds stepped at once for {overlap_s:.2f} s"
        seen = [(generation, r.number, r.complete) for _, generation, r in self.witness.rounds]
        assert seen == sorted(seen), f"a round went back: {seen}"

    def moments(self) -> Iterator[tuple[float, str]]:
        yield from super().moments()
        for at_s, generation, seen in self.witness.rounds:
            state = f"complete with {len(seen.frozen)}" if seen.complete else "open"
            closed = f", closed by {seen.closed}" if seen.closed else ""
            yield at_s, f"round {generation}.{seen.number} {state}{closed}"
        for at_s, commit in self.witness.commits:
            yield at_s, f"commit {commit.epoch}: {commit.phase}, {commit.reason}"
