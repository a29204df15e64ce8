# SPDX-License-Identifier: Apache-2.0
"""The sidecar's half of the run directory, by hand: shows gates, reads what ranks tell."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

import muster.gate
import muster.progress
from agent.rundir.channels import GatePage
from agent.rundir.files import RunDir
from agent.rundir.reports import read_line
from rdzv.drain.gate import Gate
from rdzv.records.progress import RankProgress

DEADLINE_S = 100.0


class PodGate:
    """One pod's run directory. A rank of it is of the round that ``master`` names.

    ``by_page``: the sidecar is of this version, and not of 0.1.
    """

    def __init__(self, run_dir: Path, master: str = "", *, by_page: bool = True) -> None:
        self.run_dir = run_dir
        self.page = GatePage(run_dir / "gate.page") if by_page else None
        self.master = master
        self.gate = Gate(master=master)
        run_dir.mkdir(exist_ok=True)
        if self.page is not None:
            self.page.make()
        else:
            aside = run_dir / ".env.tmp"
            aside.write_text("a sidecar of 0.1 writes it at each start\n")
            os.utime(
                aside, ns=(time.time_ns(), time.time_ns())
            )  # a file system's clock may be coarse
            aside.replace(run_dir / "env")

    def be_rank(self, monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
        """Let this process be a rank of the pod, which has asked for nothing yet."""
        for name, value in {**environ, "MUSTER_RUN_DIR": str(self.run_dir)}.items():
            monkeypatch.setenv(name, value)
        forget_sidecar(monkeypatch)

    def show(self, gate: Gate) -> None:
        """Show another gate."""
        self.gate = gate
        aside = self.run_dir / ".gate.tmp"
        aside.write_bytes(gate.to_json())
        aside.replace(self.run_dir / "gate.json")
        if self.page is not None:
            RunDir(str(self.run_dir)).put_gate(gate.to_json())

    def told(self, local_rank: int = 0) -> RankProgress:
        """What a rank has told last."""
        line = read_line(self.run_dir / "progress" / f"{local_rank}.json")
        assert line is not None
        return line

    def until(
        self,
        condition: Callable[[RankProgress], object],
        local_rank: int = 0,
        timeout_s: float = DEADLINE_S,
    ) -> None:
        """Wait until what a rank tells meets a condition."""
        path = self.run_dir / "progress" / f"{local_rank}.json"
        wait(lambda: (line := read_line(path)) is not None and condition(line), timeout_s)


def forget_sidecar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process look for its sidecar once more."""
    for module, name in ((muster.progress, "_file"), (muster.gate, "_gate")):
        monkeypatch.setattr(module, name, None)
    monkeypatch.setattr(muster.progress, "_looked", False)


def wait(condition: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s"
        time.sleep(0.002)


@contextmanager
def beside(loop: Callable[[], object]) -> Iterator[Thread]:
    """Run a training loop beside the test; what it raises is raised at the end of the block."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            loop()
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    yield thread
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "the loop has not ended"
    if raised:
        raise raised[0]
