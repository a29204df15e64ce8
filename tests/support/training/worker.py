# SPDX-License-Identifier: Apache-2.0
"""One rank as a process of its own, beside no torchrun.

It is a fork of a process that has imported torch and the trainers, which takes seconds.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import mkdtemp

import muster

ROOT = Path(muster.__file__).parents[1]
SCRIPTS = ROOT / "tests" / "support" / "scripts"
START_S = 240.0
"""For libraries to be imported, or a step to be trained: this only ends what hangs."""


def forks() -> ForkServerContext:
    """Makes processes with torch and the trainers imported: one server forks them for all tests."""
    context = get_context("forkserver")
    survivors = "tests.support.training.{}_survivor"
    context.set_forkserver_preload(
        [survivors.format(library) for library in ("transformers", "lightning")]
    )
    return context


class Worker:
    """The process of a rank, which writes to files what it prints."""

    def __init__(
        self, script: Path, arguments: list[str], folder: Path, environ: dict[str, str]
    ) -> None:
        self._files = Path(mkdtemp(dir=folder))
        self._process = forks().Process(
            target=_run, args=([str(script), *arguments], folder, environ, self._files)
        )
        self._process.start()

    def end(self) -> int:
        """Wait for its end; return its exit status."""
        self._process.join(START_S)
        assert self._process.exitcode is not None, "it hangs"
        return self._process.exitcode

    def terminate(self) -> int:
        """End it by SIGTERM."""
        self._process.terminate()
        return self.end()

    def kill(self) -> None:
        """End it in any case."""
        self._process.kill()
        self._process.join(START_S)

    @property
    def said(self) -> str:
        return (self._files / "1").read_text()

    @property
    def complaints(self) -> str:
        return (self._files / "2").read_text()


def _run(words: list[str], folder: Path, environ: Mapping[str, str], files: Path) -> None:
    import torch

    for number in (1, 2):
        os.dup2(os.open(files / str(number), os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


@contextmanager
def worker(
    script: Path, *arguments: str | Path, run_dir: Path, master: str = "", **environ: str
) -> Iterator[Worker]:
    """Run a script as the only worker of the round that ``master`` names; kill it at the end."""
    address, _, port = master.partition(":")
    round = {"TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": address, "MASTER_PORT": port}
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(run_dir),
        "MUSTER_RUN_DIR": str(run_dir),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **(round if master else {}),
        **environ,
    }
    rank = Worker(script, [str(one) for one in arguments], run_dir, env)
    try:
        yield rank
    finally:
        rank.kill()
