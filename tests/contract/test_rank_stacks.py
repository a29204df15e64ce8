# SPDX-License-Identifier: Apache-2.0
"""``muster-run`` takes the stacks of ranks that stand still."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.rundir.reports import read_stacks
from agent.stuck import stance
from launcher_shim.pod import ranks
from launcher_shim.rundir import layout
from muster import waiting
from muster.process import began
from tests.support.programs import older_pythons
from tests.support.sources import ROOT

pytestmark = pytest.mark.timeout(180)

SPINS = "def spin():\n    while True:\n        pass\n"
PYTHONS = [sys.executable, *older_pythons()]


@contextmanager
def rank(folder: Path, script: str, python: str = sys.executable) -> Iterator[ranks.AskedRank]:
    """A process with the environment of a rank, once it says that it is there."""
    for name in (layout.PROGRESS, layout.LAUNCH):
        (folder / name).mkdir(exist_ok=True)
    program = folder / "train.py"
    program.write_text(script)
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "MUSTER_RUN_DIR": str(folder),
        "TORCHELASTIC_RUN_ID": "digits",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "LOCAL_RANK": "0",
    }
    process = subprocess.Popen([python, str(program)], env=environ, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"here\n"
        yield ranks.AskedRank(0, process.pid, began(str(process.pid)) or 0)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def answer(folder: Path, one: ranks.AskedRank) -> tuple[str, str]:
    """What the rank does and where, by the answer of ``muster-run``."""
    question = {"ask": "1-1", "ranks": [list(one)]}
    (folder / layout.STACKS_ASKED).write_text(json.dumps(question))
    ranks.StackReporter(str(folder)).look()
    found = read_stacks(folder, "1-1")
    assert found is not None
    said = stance(0, *found[one.pid])
    return said.doing, said.where


@pytest.mark.parametrize("python", PYTHONS)
def test_an_endless_loop_is_shown_with_its_line(tmp_path: Path, python: str) -> None:
    script = f"import muster\n{SPINS}print('here', flush=True)\nspin()\n"
    with rank(tmp_path, script, python) as one:
        while answer(tmp_path, one) not in (("script", "train.py:3"), ("script", "train.py:4")):
            pass  # it has not come to its loop yet


def test_a_call_that_keeps_python_from_running_is_shown(tmp_path: Path) -> None:
    script = "import muster, re\nprint('here', flush=True)\nre.match('(a*)*b', 40 * 'a')\n"
    with rank(tmp_path, script) as one:
        while answer(tmp_path, one) != ("script", "train.py:3"):
            pass  # it has not come to that line yet


def test_a_stopped_process_is_seen_without_its_help(tmp_path: Path) -> None:
    with rank(tmp_path, f"import muster\n{SPINS}print('here', flush=True)\nspin()\n") as one:
        os.kill(one.pid, signal.SIGSTOP)
        assert answer(tmp_path, one)[0] == "stopped"


def test_a_rank_that_is_to_end_gives_its_stacks_first(tmp_path: Path) -> None:
    with rank(tmp_path, f"import muster\n{SPINS}print('here', flush=True)\nspin()\n") as one:
        other = one._replace(started=one.started + 1)  # a process that had its number before
        for end in (other, one):
            question = {"ask": f"{end.started}", "ranks": [list(one)], "end": [list(end)]}
            assert ranks.state_of(one) not in ranks.STILL
            (tmp_path / layout.STACKS_ASKED).write_text(json.dumps(question))
            ranks.StackReporter(str(tmp_path)).look()
            found = read_stacks(tmp_path, f"{end.started}")
            assert found is not None
            assert found[one.pid][1] != []
        while ranks.state_of(one) != ranks.GONE:
            pass  # the signal is on its way


@pytest.mark.parametrize(
    "first",
    [
        "",
        "import muster, os\nos.environ.clear()\n",
        "import signal\nsignal.signal(61, lambda *_: print('mine'))\nimport muster\n",
        "import os\ndel os.environ['TORCHELASTIC_RUN_ID']\nimport muster\n",
    ],
    ids=["without-muster", "replaced", "own-handler", "no-rank"],
)
def test_only_a_rank_that_offers_its_stacks_is_signalled(tmp_path: Path, first: str) -> None:
    script = f"{first}import time\nprint('here', flush=True)\ntime.sleep(600)\n"
    with rank(tmp_path, script) as one:
        if "clear" in first:
            one = one._replace(started=one.started + 1)
            assert answer(tmp_path, one)[0] == "ended"
        else:
            assert answer(tmp_path, one)[0] == "unknown"
        os.kill(one.pid, 0)


def test_a_script_that_the_rank_starts_does_not_take_its_place(tmp_path: Path) -> None:
    script = (
        "import muster, subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import muster'], check=True)\n"
        f"{SPINS}print('here', flush=True)\nspin()\n"
    )
    with rank(tmp_path, script) as one:
        assert answer(tmp_path, one)[0] == "script"


def test_both_sides_use_the_same_signal() -> None:
    assert waiting.STACKS_SIGNAL == ranks.STACKS_SIGNAL
    assert waiting.STACKS_MAX_BYTES < ranks.STACKS_MAX_BYTES


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"ask": 1, "ranks": [[1]]}', '{"ask": "1"}'])
def test_a_question_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / layout.STACKS_ASKED).write_text(content)
    assert ranks.read_question(str(tmp_path)) is None


@pytest.mark.parametrize(
    "content", ["", "{}", '{"schema":1,"ask":"1","ranks":[{"pid":1,"state":"S","frames":[[1]]}]}']
)
def test_an_answer_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / layout.LAUNCH).mkdir()
    (tmp_path / layout.LAUNCH / layout.STACKS).write_text(content)
    assert read_stacks(tmp_path, "1") is None
