# SPDX-License-Identifier: Apache-2.0
"""Pods of a job on this machine, wired as ``muster local`` wires them, and what can befall them.

Every process carries the marks of its job and pod in its environment, so that a pod can die as a
whole and nothing is left behind: a sweeper ends what a test run that was killed has left.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import console
from console.local.processes import end_all, holding, send_to_all
from console.local.settings import LocalSettings, Pod, sidecar_command, sidecar_environment
from tests.support.ports import free_ports
from tests.support.releases.frozen import environ_of
from tests.support.sidecars.processes import PATIENT
from tests.support.store.tcp_proxy import TcpProxy
from tests.support.waiting import Timeline

ROOT = Path(console.__file__).parent.parent
READY_TIMEOUT_S = 120.0
"""For a sidecar to start, and to wait for what is left of old leases."""
END_TIMEOUT_S = 240.0
"""For a process to end that was told to."""

_SWEEPER = """
import sys, time
from console.local.processes import end_all, holding
sys.stdin.read()
end_all(lambda: holding(sys.argv[1]), set(), time.monotonic() + 60)
"""


class Node:
    """One simulated pod. ``launcher`` is what its training container runs."""

    def __init__(
        self, name: str, run_dir: Path, uid: str, role: Literal["worker", "launcher"] = "worker"
    ) -> None:
        self.name, self.run_dir = name, run_dir
        run_dir.mkdir(parents=True)
        self.pod = Pod(name, uid, role, run_dir, *free_ports(2))
        self.sidecar: subprocess.Popen[bytes] | None = None
        self.launcher: subprocess.Popen[bytes] | None = None
        self.proxies: list[TcpProxy] = []
        """On its sidecar's way to the store, if any."""
        self.sidecar_settings: dict[str, str] = {}
        """Environment variables of this sidecar alone."""
        self.program = ROOT
        """Which Muster its sidecar is of: the folder of the packages."""

    def ready(self) -> bool:
        """Whether the sidecar says so."""
        return self.ask("readyz")[0] == 200

    def ask(self, path: str) -> tuple[int, str]:
        """GET something from the sidecar; status 0 while nobody answers."""
        address = self.sidecar_settings.get("MUSTER_ADDRESS", "127.0.0.1")
        url = f"http://{address}:{self.pod.http_port}/{path}"
        try:
            with urllib.request.urlopen(url, timeout=120) as answer:
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

    def tokens(self) -> list[str]:
        """The hosts that the delivered list gives slots, as Horovod knows them."""
        lines = (self.run_dir / "hosts").read_text().splitlines()
        return [line.partition(":")[0] for line in lines if not line.endswith(":0")]

    def hosts(self) -> list[str]:
        """The names of the members among them."""
        return [token.partition(".")[0] for token in self.tokens()]

    def notify(self) -> None:
        """The sidecar's preStop hook."""
        subprocess.run(
            [sys.executable, *PATIENT, "notice", "--run-dir", str(self.run_dir)],
            cwd=self.program,
            env=environ_of(self.program),
            stdout=subprocess.DEVNULL,
            timeout=END_TIMEOUT_S,
            check=True,
        )

    def sidecar_log(self) -> str:
        """Everything that the sidecar has logged."""
        return (self.run_dir / "sidecar.log").read_text()

    def launcher_log(self) -> str:
        """Everything that the training container has written."""
        path = self.run_dir / "launcher.log"
        return path.read_text(errors="replace") if path.exists() else ""


class Pods(Timeline):
    """The pods of one job. ``marks``: the variables that tell its processes from others."""

    def __init__(
        self,
        directory: Path,
        settings: LocalSettings,
        endpoints: Sequence[str],
        marks: tuple[str, str],
    ) -> None:
        super().__init__()
        self.directory, self.settings = directory, settings
        self.nodes: dict[str, Node] = {}
        self.endpoints, self._marks = list(endpoints), marks
        self._spawned: list[subprocess.Popen[bytes]] = []
        self._sweeper = subprocess.Popen(
            [sys.executable, "-c", _SWEEPER, f"{marks[0]}={settings.run}"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def end(self) -> None:
        """End everything; the timeline stays in the job's directory."""
        (self.directory / "timeline.txt").write_text(self.timeline())
        self._end_processes(None, set())
        # Those of pods that have gone, too: a test that fails midway has not waited for them.
        for process in self._spawned:
            process.wait(END_TIMEOUT_S)
        self._sweeper.communicate(timeout=END_TIMEOUT_S)

    @staticmethod
    def _reap(node: Node) -> None:
        """Wait for the processes of a node that were killed."""
        for process in (node.sidecar, node.launcher):
            if process is not None:
                process.wait(END_TIMEOUT_S)

    def processes(self, node: str | None = None) -> set[int]:
        """Live processes of the job, or of one of its nodes."""
        of_job, of_node = self._marks
        named = () if node is None else (f"{of_node}={node}",)
        return holding(f"{of_job}={self.settings.run}", *named)

    def _end_processes(self, node: str | None, keep: set[int]) -> None:
        deadline_s = time.monotonic() + END_TIMEOUT_S
        own = {
            process.pid
            for one in self.nodes.values()
            for process in (one.sidecar, one.launcher)
            if process is not None
        }
        left = end_all(lambda: self.processes(node) - keep, own, deadline_s)
        assert not left, f"{left} outlive SIGKILL"

    # -- starting

    def start_sidecar(self, node: Node) -> None:
        """Start the sidecar, or start it again."""
        self.tell(f"{node.name}: sidecar starts")
        endpoints = ",".join(self._endpoints_of(node))
        environ = sidecar_environment(self.settings, node.pod, endpoints) | node.sidecar_settings
        if node.program != ROOT:
            environ["PYTHONPATH"] = str(node.program)
        node.sidecar = self.spawn(node, sidecar_command(), environ, "sidecar")

    def _endpoints_of(self, node: Node) -> list[str]:
        return [proxy.endpoint for proxy in node.proxies] or self.endpoints

    def spawn(
        self, node: Node, command: Sequence[str], environ: Mapping[str, str], log: str
    ) -> subprocess.Popen[bytes]:
        """Start a process of a node."""
        of_job, of_node = self._marks
        with (node.run_dir / f"{log}.log").open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=node.run_dir,
                env={**environ, of_job: self.settings.run, of_node: node.name},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._spawned.append(process)
        return process

    def until_ready(self, *nodes: Node) -> None:
        """Wait until the sidecars of nodes say that they are ready."""
        for node in nodes:
            self.until(node.ready, READY_TIMEOUT_S, f"the sidecar of {node.name} is ready")

    # -- what befalls nodes

    def kill_nodes(self, *nodes: Node) -> None:
        """SIGKILL everything of these nodes at once."""
        for node in nodes:
            self.tell(f"{node.name}: killed")
        dying = [node.name for node in nodes]
        send_to_all(lambda: set().union(*map(self.processes, dying)), signal.SIGKILL)
        for node in nodes:
            self._end_processes(node.name, set())
            self._reap(node)
            del self.nodes[node.name]

    def stop_sidecar(self, node: Node, number: signal.Signals = signal.SIGTERM) -> None:
        """End the sidecar alone: by SIGTERM as for an upgrade in place, or by SIGKILL."""
        assert node.sidecar is not None
        self.tell(f"{node.name}: its sidecar gets {number.name}")
        node.sidecar.send_signal(number)
        status = node.sidecar.wait(END_TIMEOUT_S)
        assert status == (0 if number == signal.SIGTERM else -number)

    def freeze(self, node: Node) -> None:
        """SIGSTOP everything of the node."""
        self.tell(f"{node.name}: frozen")
        send_to_all(lambda: self.processes(node.name), signal.SIGSTOP)

    def freeze_sidecar(self, node: Node) -> None:
        """SIGSTOP the sidecar alone; ``resume`` wakes it."""
        assert node.sidecar is not None
        self.tell(f"{node.name}: sidecar frozen")
        node.sidecar.send_signal(signal.SIGSTOP)

    def resume(self, node: Node) -> None:
        """SIGCONT everything of the node."""
        self.tell(f"{node.name}: resumed")
        send_to_all(lambda: self.processes(node.name), signal.SIGCONT)

    # -- for whoever has to find out why a test failed

    def timeline(self) -> str:
        """What happened, in order, and the last lines of every log."""
        lines = [super().timeline()]
        for log in sorted(self.directory.glob("**/*.log")):
            tail = log.read_text(errors="replace").splitlines()[-25:]
            lines += ["", f"-- {log.parent.name}/{log.name}", *tail]
        return "\n".join(lines)
