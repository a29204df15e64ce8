# SPDX-License-Identifier: Apache-2.0
"""A job of ``muster local`` whose ranks can be made to stand still, and what Muster says of it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

from rdzv.records.job import HistoryEntry

SCRIPT = Path(__file__).with_name("standing.py")
RANKS = 4
LAYOUTS = ((4, 1), (2, 2), (1, 4))
"""Pods, and ranks of each."""
ANSWER_S = 60.0
"""Time limit of a command that asks."""
_METRIC = re.compile(r'^muster_stuck_ranks\{.*rank="(\d+)".*\} 1', re.MULTILINE)


class StandingJob:
    """One job of ``muster local``."""

    def __init__(self, folder: Path, number: int) -> None:
        self.name = f"stuck-{number}"
        self.pods, self.ranks_a_pod = LAYOUTS[number % len(LAYOUTS)]
        self.odd = number % 2 == 1
        self._folder = folder
        self._faults = 0
        self._job: asyncio.subprocess.Process

    async def start(self, **settings: str) -> None:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        given = {
            "CONTROL": str(self._folder),
            "WORKERS": str(int(self.odd)),
            "OMP_NUM_THREADS": "1",
        }
        self._environ = {**os.environ, "PATH": path, **given, **settings}
        await asyncio.to_thread(self._folder.mkdir)
        with (self._folder / "local.log").open("wb") as log:
            self._job = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "muster", "local", f"--nodes={self.pods}"),
                *(f"--job={self.name}", f"--log-dir={self._folder / 'logs'}"),
                *("--", "torchrun", f"--nproc-per-node={self.ranks_a_pod}", str(SCRIPT)),
                cwd=self._folder,
                env=self._environ,
                stdout=log,
                stderr=log,
            )

    async def end(self) -> None:
        if self._job.returncode is None:
            self._job.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(60):
                await self._job.wait()
        except TimeoutError:
            self._job.kill()
            await self._job.wait()

    @property
    def ended(self) -> bool:
        return self._job.returncode is not None

    async def _asked(self, verb: str) -> str:
        run = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "muster", verb, self.name, "--json"),
            cwd=self._folder,
            env=self._environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(ANSWER_S):
                said, _ = await run.communicate()
        except TimeoutError:
            run.kill()
            said, _ = await run.communicate()
        return said.decode()

    async def verdict(self) -> tuple[str, str]:
        """Return the state of the job, and why it is in it."""
        try:
            found = json.loads(await self._asked("status"))["verdict"]
        except (ValueError, KeyError):
            return "", ""
        return str(found["state"]), str(found["why"])

    async def states(self) -> list[HistoryEntry]:
        """Return the states in the history."""
        entries = [json.loads(line) for line in (await self._asked("history")).splitlines()]
        return [
            HistoryEntry("state", one["member"], one["why"], 0.0, one["details"])
            for one in entries
            if one["what"] == "state"
        ]

    def steps(self) -> list[int]:
        """Return the step of each rank; -1 for one that has made none."""
        return [self._reported(rank)[1] for rank in range(RANKS)]

    def _reported(self, rank: int) -> tuple[int, int]:
        try:
            pid, step = (self._folder / f"rank-{rank}").read_text().split()
        except (OSError, ValueError):
            return 0, -1
        return int(pid), int(step)

    def pod_of(self, rank: int) -> str:
        return _environ(self._reported(rank)[0])["MUSTER_MEMBER"]

    def run_dirs(self) -> dict[int, Path]:
        """Return the run directory of each rank."""
        pids = [self._reported(rank)[0] for rank in range(RANKS)]
        return {rank: Path(_environ(pid)["MUSTER_RUN_DIR"]) for rank, pid in enumerate(pids)}

    async def metrics(self) -> list[set[int]]:
        """Return the ranks that each sidecar's metrics name."""
        ports = await asyncio.to_thread(self._ports)
        pages = await asyncio.gather(*(_page(port) for port in ports))
        return [{int(rank) for rank in _METRIC.findall(page)} for page in pages]

    def _ports(self) -> list[int]:
        mine = f"CONTROL={self._folder}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"agent" in words and mine in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(_environ(int(entry.name))["MUSTER_HTTP_PORT"]))
        return found

    def begin(self, kind: str, rank: int) -> None:
        self._faults += 1
        kind = "mean" if kind == "order" and self.odd else kind
        asked = {"kind": kind, "rank": rank, "number": self._faults}
        self._put("fault.json", json.dumps(asked))

    def release(self, kind: str, rank: int) -> None:
        self._put("released", str(self._faults))
        if kind == "read":
            shard = self._folder / f"shard-{self._faults}"
            with suppress(OSError):  # it has no reader
                os.close(os.open(shard, os.O_WRONLY | os.O_NONBLOCK))
        os.kill(self._reported(rank)[0], signal.SIGCONT)

    def _put(self, name: str, text: str) -> None:
        aside = self._folder / "aside"
        aside.write_text(text)
        aside.replace(self._folder / name)

    def last_words(self) -> str:
        logs = [self._folder / "local.log", *self._folder.glob("logs/*/torchrun.log")]
        return "\n".join(log.read_text(errors="replace")[-1500:] for log in logs)


def _environ(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


async def _page(port: int) -> str:
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
        page = await reader.read()
        writer.close()
    return page.decode()
