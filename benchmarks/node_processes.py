# SPDX-License-Identifier: Apache-2.0
"""Simulated nodes of a benchmark: a real sidecar process and a real torchrun on each."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.etcd_members import free_port
from console.local import processes
from console.local.processes import until_ready
from console.local.settings import read_delivery

REPOSITORY = Path(__file__).parent.parent
SCRIPT = REPOSITORY / "benchmarks" / "training.py"
READY_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one worker."""

    at_s: float
    rank: int
    size: int
    number: int


class Steps:
    """The steps that the workers of one node have written."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.directory = directory

    def of(self, pid: int) -> list[Step]:
        """Parse the complete lines of one worker."""
        text = (self.directory / str(pid)).read_text()
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [
            Step(float(at), int(rank), int(size), int(number))
            for at, rank, size, number in (line.split() for line in lines)
        ]

    @property
    def pids(self) -> set[int]:
        """The workers that have made a step."""
        return {int(path.name) for path in self.directory.iterdir() if path.stat().st_size}


class Torchrun:
    """One torchrun with its workers, which run ``script``; under ``wrapper`` if given."""

    def __init__(
        self,
        directory: Path,
        environment: dict[str, str],
        *arguments: str,
        wrapper: Sequence[str] = (),
        script: Path = SCRIPT,
    ) -> None:
        self.steps = Steps(directory / "steps")
        self._log = directory / "torchrun.log"
        self._command = (
            *(*wrapper, sys.executable, "-m", "torch.distributed.run"),
            *(*arguments, str(script)),
        )
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "BENCH_STEPS": str(self.steps.directory),
            **environment,
        }
        self.process: Process | None = None

    async def start(self) -> None:
        self.process = await processes.start_child(self._command, self._environment, self._log)

    @property
    def ended(self) -> bool:
        return self.process is not None and self.process.returncode is not None

    def workers(self) -> set[int]:
        """Return its living workers, and any process between them and it."""
        assert self.process is not None
        return set(_descendants(self.process.pid))

    async def kill(self) -> None:
        """Kill the agent and its workers at once with SIGKILL."""
        if self.process is None or self.process.returncode is not None:
            return
        for pid in (self.process.pid, *self.workers()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.process.wait()

    def last_words(self) -> str:
        """Return the end of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])


class Sidecar:
    """One ``muster agent``, as a new pod: with a run directory of its own.

    ``wrapped``: the torchrun beside it runs under ``muster-run``, which owns the rendezvous port.
    ``tunnelled``: it serves an end of the tunnel.
    """

    def __init__(
        self,
        run_dir: Path,
        job: str,
        member: str,
        endpoint: str,
        nodes: tuple[int, int],
        *,
        wrapped: bool = False,
        role: str = "worker",
        tunnelled: bool = False,
    ) -> None:
        self.http_port = free_port()
        run_dir.parent.mkdir(exist_ok=True)
        self._run_dir = run_dir
        self._log = run_dir.with_name(f"{run_dir.name}.log")
        self._environment = {
            **os.environ,
            "MUSTER_NAMESPACE": "bench",
            "MUSTER_JOB": job,
            "MUSTER_MEMBER": member,
            "MUSTER_ADDRESS": "127.0.0.1",
            "MUSTER_MIN": str(nodes[0]),
            "MUSTER_MAX": str(nodes[1]),
            "MUSTER_ETCD_ENDPOINTS": endpoint,
            "MUSTER_RUN_DIR": str(run_dir),
            "MUSTER_C10D_PORT": "0" if wrapped else str(free_port()),
            **({"MUSTER_RELAY_PORT": str(free_port())} if wrapped else {}),
            "MUSTER_HTTP_PORT": str(self.http_port),
            "MUSTER_ROLE": role,
            "MUSTER_TUNNEL_PORT": str(free_port()) if tunnelled else "0",
        }
        self.process: Process | None = None

    async def start(self) -> None:
        self.process = await processes.start_child(
            (sys.executable, "-m", "console.main", "agent"), self._environment, self._log
        )

    async def ready(self) -> None:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await until_ready(self.http_port)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def wrapper(self) -> tuple[str, ...]:
        """The prefix of the command that runs beside it."""
        return (str(self._run_dir / "bin" / "muster-run"), "--")

    def torch_environment(self) -> dict[str, str]:
        """Read the environment that the sidecar delivers to its torchrun."""
        return read_delivery((self._run_dir / "env").read_text())

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class Node:
    """One simulated pod: a sidecar, and a torchrun, under ``muster-run`` if ``wrapped``.

    ``arguments`` and ``environment`` are the torchrun's.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        endpoint: str,
        size: tuple[int, int],
        *arguments: str,
        wrapped: bool = True,
        environment: Mapping[str, str] = {},
        script: Path = SCRIPT,
    ) -> None:
        self.name = name
        self._directory = directory
        self._arguments, self._environment, self._script = arguments, environment, script
        self._launches = 0
        job = directory.name
        self.sidecar = Sidecar(directory / name, job, name, endpoint, size, wrapped=wrapped)
        self._wrapper = self.sidecar.wrapper if wrapped else ()
        self.torchrun: Torchrun

    async def start(self) -> None:
        """Start the sidecar, then the container."""
        await self.sidecar.start()
        await self.sidecar.ready()
        await self.launch()

    async def launch(self) -> None:
        """Start its torchrun, again if it was killed."""
        self._launches += 1
        self.torchrun = Torchrun(
            self._directory / f"{self.name}.torchrun-{self._launches}",
            {**self.sidecar.torch_environment(), **self._environment},
            *self._arguments,
            "--max-restarts=99",
            wrapper=self._wrapper,
            script=self._script,
        )
        await self.torchrun.start()

    async def kill(self) -> None:
        """Kill all of it with SIGKILL; the sidecar first, as a dead node announces nothing."""
        await self.sidecar.kill()
        await self.torchrun.kill()

    def made(self) -> dict[int, list[Step]]:
        """Return the steps of its living workers."""
        steps = self.torchrun.steps
        return {pid: steps.of(pid) for pid in self.torchrun.workers() & steps.pids}


def first_of(nodes: Sequence[Node]) -> Node:
    """Return the node of rank 0."""
    for node in nodes:
        if any(steps and steps[-1].rank == 0 for steps in node.made().values()):
            return node
    raise RuntimeError("no node has rank 0")


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for below in map(int, (task / "children").read_text().split()):
            yield below
            with suppress(FileNotFoundError):
                yield from _descendants(below)
