# SPDX-License-Identifier: Apache-2.0
"""The common part of the Horovod benchmark's two jobs: a horovodrun, its hosts and their steps."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from asyncio.subprocess import Process
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Literal

from benchmarks.node_processes import REPOSITORY
from console.local import processes
from console.local.launch_line import read_launch_line
from console.local.processes import end_all, free_ports, marked
from console.local.settings import LAUNCHER, LocalSettings, Pod
from launcher_shim.hosts import token_of
from rdzv.records.policy import JobPolicy
from rdzv.store.access import Access

SCRIPT = REPOSITORY / "benchmarks" / "horovod_training.py"
GLOO_TIMEOUT_S = 120
"""Longer than one job is stopped during the other one's turn."""

CHANGE_TIMEOUT_S = 90.0
LOOK_INTERVAL_S = 0.01
END_TIMEOUT_S = 20.0


class Host:
    """One life of a node: a new pod, hence a new host name for Horovod."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self.token = token_of(pod.name, pod.uid)


class HorovodJob:
    """A horovodrun, and hosts with one worker each; ``hosts`` are those listed, oldest first."""

    def __init__(self, directory: Path, endpoint: str, nodes: int) -> None:
        run = uuid.uuid4().hex
        words = ("horovodrun", "--gloo-timeout-seconds", str(GLOO_TIMEOUT_S))
        # -P: the script's folder has a module of the name horovod.
        self.line = read_launch_line((*words, "python", "-P", str(SCRIPT)), {})
        self.settings = LocalSettings(
            run=run,
            namespace="bench",
            job=f"horovod-{run[:8]}",
            line=self.line,
            nodes=nodes,
            policy=JobPolicy(nodes - 1, nodes, gather_s=2.0),
            restarts=0,
            lease_ttl_s=10.0,
            checkpoints=directory,
            access=Access((endpoint,)),
            native=False,
        )
        self.hosts: list[Host] = []
        self._random = Random(run)
        self.directory = directory
        self.launcher = Host(self._pod(LAUNCHER, "launcher"))
        self._lives = 0
        self._children: list[Process] = []
        self._steps = Steps(directory / "steps")
        self._horovodrun: Process

    # -- different in each job

    async def launch(self) -> Process:
        """Create an empty host list, and start horovodrun."""
        raise NotImplementedError

    async def list(self, host: Host) -> float:
        """Let a host join; return the time at which it was announced."""
        raise NotImplementedError

    async def delist(self, host: Host) -> float:
        """Let a host leave; return the time at which that was announced."""
        raise NotImplementedError

    async def bury(self, host: Host) -> None:
        """Clean up a host that has no worker any more."""

    # -- common

    async def start(self) -> None:
        """Start everything, and wait until all hosts train."""
        self._horovodrun = await self.launch()
        for _ in range(self.settings.nodes):
            await self._come()
        await self._until_all_step(0.0)

    async def leave(self, host: Host) -> float:
        """Let a host leave; return the seconds until its worker's end and the others' next step."""
        (pid,) = self._steps.pids(host.token)
        self.hosts.remove(host)
        began_s = await self.delist(host)
        async with asyncio.timeout(CHANGE_TIMEOUT_S):
            while _runs(pid):  # noqa: ASYNC110 - a process has no event to give
                await asyncio.sleep(LOOK_INTERVAL_S)
        gone_s = time.monotonic()
        stepped_s = await self._until_all_step(began_s)
        await self.bury(host)
        return max(gone_s, stepped_s) - began_s

    async def join(self) -> float:
        """Let another host join; return the seconds until all make a step with it."""
        listed_s = await self._come()
        return await self._until_all_step(listed_s) - listed_s

    def stop(self) -> None:
        """Stop the workers, so that another job has the cores to itself."""
        self._signal_workers(signal.SIGSTOP)

    async def go_on(self) -> None:
        """Continue the workers, and wait until they make steps."""
        self._signal_workers(signal.SIGCONT)
        await self._until_all_step(time.monotonic())

    async def end(self) -> None:
        """End every process."""
        own = {process.pid for process in self._children}
        deadline_s = time.monotonic() + END_TIMEOUT_S
        await asyncio.to_thread(end_all, lambda: marked(self.settings.run), own, deadline_s)
        await asyncio.gather(*(process.wait() for process in self._children))

    async def _come(self) -> float:
        self._lives += 1
        host = Host(self._pod(f"node-{self._lives}", "worker"))
        listed_s = await self.list(host)
        self.hosts.append(host)
        return listed_s

    async def training_child(
        self, host: Host, command: Sequence[str], environment: Mapping[str, str]
    ) -> Process:
        """Start the command of the training container of ``host``."""
        environment = {
            **environment,
            "OMP_NUM_THREADS": "1",
            "BENCH_STEPS": str(self._steps.directory),
        }
        return await self.child(command, environment, f"{host.pod.name}.log")

    async def child(
        self, command: Sequence[str], environment: Mapping[str, str], log: str
    ) -> Process:
        """Start a process that ends with the job."""
        process = await processes.start_child(command, environment, self.directory / log)
        self._children.append(process)
        return process

    async def _until_all_step(self, since_s: float) -> float:
        """Wait until all hosts step in one world of their own; return the last one's first time."""
        tokens = {host.token for host in self.hosts}
        async with asyncio.timeout(CHANGE_TIMEOUT_S):
            while True:
                firsts = self._steps.firsts(tokens, since_s)
                if len(firsts) == len(tokens):
                    return max(firsts)
                if self._horovodrun.returncode is not None:
                    raise RuntimeError(f"horovodrun ended:\n{self.last_words(LAUNCHER)}")
                await asyncio.sleep(LOOK_INTERVAL_S)

    def _signal_workers(self, number: signal.Signals) -> None:
        for host in self.hosts:
            for pid in self._steps.pids(host.token):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def last_words(self, name: str) -> str:
        """Return the end of a log."""
        log = (self.directory / f"{name}.log").read_text(errors="replace")
        return "\n".join(log.splitlines()[-15:])

    def _pod(self, name: str, role: Literal["worker", "launcher"]) -> Pod:
        run_dir = self.directory / name
        run_dir.mkdir(parents=True)
        ports = free_ports(3, self._random)
        return Pod(name, f"{self.settings.run}-{name}", role, run_dir, *ports)


class Steps:
    """The workers' steps, read incrementally: times and world sizes by host and process."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self._read: dict[Path, int] = {}
        self._steps: dict[str, dict[int, list[tuple[float, int]]]] = {}

    def pids(self, token: str) -> Collection[int]:
        """Return the processes that have made steps on this host."""
        return self._steps[token].keys()

    def firsts(self, tokens: Collection[str], since_s: float) -> list[float]:
        """Return the first step of each host after ``since_s`` in a world of these hosts only."""
        self._look()
        firsts = []
        for token in tokens:
            steps = (step for own in self._steps.get(token, {}).values() for step in own)
            alike = [at_s for at_s, size in steps if at_s > since_s and size == len(tokens)]
            if alike:
                firsts.append(min(alike))
        return firsts

    def _look(self) -> None:
        for path in self.directory.iterdir():
            at = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(at)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = at + len(whole) + len(newline)
            token, _, pid = path.name.rpartition(".")
            own = self._steps.setdefault(token, {}).setdefault(int(pid), [])
            own += [
                (float(at_s), int(size))
                for at_s, size in map(str.split, whole.decode().splitlines())
            ]


def _runs(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
