# SPDX-License-Identifier: Apache-2.0
"""The steps that a plain script prints, as ``muster local`` finds them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.local.node import LocalNode
from console.local.script_progress import (
    PATTERN_CPU_S,
    Look,
    PrintedProgress,
    PrintedSteps,
    WorkerProcess,
    find_step,
    find_workers,
    read_pattern,
)
from console.local.timeline import Progress, Worlds
from rdzv.errors import ConfigError
from tests.support.waiting import wait_until

BAR = "\u2588\u258c  "


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 120", 120),
        ("rank 0: Step: 120 loss 0.31", 120),
        ("[2026-11-28 10:00:00] INFO step=1,204 lr=1e-3", 1204),
        ("{'loss': 0.2, 'global_step': 17}", 17),
        ("iter 30/500 loss=1.2", 30),
        ("Iteration [ 30/500]", 30),
        ("update 7 of 9", 7),
        (f"train:  45%|{BAR}| 45/100 [00:10<00:12,  4.5it/s, loss=0.1]", 45),
        ("120it [00:10, 12.0it/s]", 120),
        ("batch size 32, 4 steps per second", None),
        ("step 0.5 s, batch 12.5%", None),
        ("footstep 3", None),
        ("accuracy 97% (3 of 4)", None),
        ("", None),
    ],
)
def test_the_step_in_a_line(line: str, step: int | None) -> None:
    found = find_step(line)
    assert (None if found is None else found.number) == step


def steps_of(*lines: str) -> list[int]:
    return PrintedSteps().take_in("node-0", "".join(f"{line}\n" for line in lines))


def test_epochs_with_a_known_length_count_on() -> None:
    tutorial = [f"Epoch [{epoch}/3], Step [{step}/50]" for epoch in (1, 2) for step in (25, 50)]
    assert steps_of(*tutorial) == [50, 75, 100]
    bars = [f"Epoch {epoch}: 50%|{BAR}| {n}/4 [0]" for epoch in (0, 1) for n in (1, 2, 4)]
    assert steps_of(*bars) == [2, 4, 5, 6, 8]


def test_another_bar_is_not_taken_for_the_first() -> None:
    train, test = "train: 1%|", "eval: 50%|"
    lines = (f"{train}{BAR}| 1/90 [", f"{train}{BAR}| 2/90 [", f"{test}{BAR}| 50/99 [")
    assert steps_of(*lines, f"{train}{BAR}| 3/90 [") == [2, 3]


def test_a_bar_is_read_as_it_grows() -> None:
    reader = PrintedSteps()
    pieces = [f"\r {n}%|{BAR}| {n}/90 [00:0{n}<00:09, 1.0it/s]" for n in (1, 2, 3)]
    assert [reader.take_in("node-0", piece) for piece in pieces] == [[], [2], [2, 3]]


def test_a_line_that_comes_in_two_pieces_is_one() -> None:
    reader = PrintedSteps()
    assert reader.take_in("node-0", "step 1\nstep 2\nst") == [2]
    assert reader.take_in("node-1", "step 2\n") == [2]
    assert reader.take_in("node-0", "ep 3") == []
    assert reader.take_in("node-0", "4\n") == [34]


def test_the_users_pattern_counts_alone() -> None:
    reader = PrintedSteps(read_pattern(r"\[(\d+) of"))
    assert reader.take_in("node-0", "step 5\n[1,000 of 2\n[x of\n[7 of 9\n") == [7]


@pytest.mark.parametrize(("text", "sentence"), [("(", "no regular expression"), ("s", "parenthes")])
def test_a_wrong_pattern_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_pattern(text)


def test_a_pattern_without_an_end_is_given_up() -> None:
    reader = PrintedSteps(read_pattern(r"(a+)+$"))
    began_s = time.process_time()
    assert reader.take_in("node-0", "a" * 60 + "!\n") == []
    assert time.process_time() - began_s < 50 * PATTERN_CPU_S
    assert "took more than 0.1 s" in reader.fault
    assert reader.take_in("node-0", "aaa\n") == []


HARD = st.sampled_from(["9" * 4000, " " * 4000, "step" * 900, "1%|" * 1200, "epoch" * 900, "\r"])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(max_size=300) | HARD, max_size=20))
def test_any_output_is_read_in_bounded_time(pieces: list[str]) -> None:
    reader = PrintedSteps()
    began_s = time.process_time()
    for piece in pieces:
        assert all(step >= 0 for step in reader.take_in("node-0", piece))
    assert time.process_time() - began_s < 5


def worker(pid: int, rank: int = 0, size: int = 2, master: str = "h:1") -> WorkerProcess:
    return WorkerProcess(pid, rank, size, 0, master)


class Outputs:
    """Two nodes whose output is taken in."""

    def __init__(self) -> None:
        self.progress = PrintedProgress(PrintedSteps())
        self.logs = [Path(f"/none/{name}") for name in "ab"]
        for log in self.logs:
            self.progress.begin(log)

    def see(self, *seen: tuple[list[WorkerProcess], str]) -> list[tuple[int, int, int]]:
        looks = [
            (log, Look(f"node-{index}", workers, text))
            for index, (log, (workers, text)) in enumerate(zip(self.logs, seen, strict=False))
        ]
        found = self.progress.take_in(looks)
        return [(one.pid, one.rank, one.step) for ranks in found.values() for one in ranks]


def test_the_step_of_a_world_is_what_any_of_its_ranks_prints() -> None:
    outputs = Outputs()
    both = ([worker(7)], ""), ([worker(8, 1)], "step 1\nstep 2\n")
    assert outputs.see(*both) == [(7, 0, 2), (8, 1, 2)]


def test_the_last_output_of_old_workers_is_not_the_new_ones() -> None:
    outputs = Outputs()
    assert outputs.see(([worker(7)], "step 1\nstep 2\n")) == [(7, 0, 2)]
    assert outputs.see(([worker(9)], "step 3\nstep 4\n")) == []
    assert outputs.see(([worker(9)], "step 3\n")) == [(9, 0, 3)]
    assert outputs.see(([worker(11)], "step 4\nstep 2\nstep 3\n")) == [(11, 0, 3)]


@pytest.mark.parametrize(
    "pieces",
    [
        ("step 1\nstep 2\nstep 30\n", "step 1\n"),
        ("step 1\nstep 2\nstep 30\nstep 1\nstep 29\n",),
        ("step 1\nstep 2\nstep 5\n", "step 1\nstep 2\n"),
        ("step 10\nstep 20\nstep 30\nstep 10\n",),
    ],
)
def test_a_counter_that_begins_again_in_each_epoch_is_given_up(pieces: tuple[str, ...]) -> None:
    outputs = Outputs()
    *_, last = [outputs.see(([worker(7)], piece)) for piece in pieces]
    assert last == []
    assert "in one world, as if counted by epoch" in outputs.progress.steps.fault


def test_two_ranks_that_print_in_turn_are_followed() -> None:
    outputs = Outputs()
    lines = [f"step {step}" for step in (10, 10, 20, 10, 20, 30, 40, 30, 40)]
    assert outputs.see(([worker(7)], "\n".join([*lines, ""]))) == [(7, 0, 40)]
    assert outputs.progress.steps.fault == ""
    assert outputs.progress.steps.every == 10


def test_what_is_known_of_a_script_that_prints_each_tenth_step_is_about_right() -> None:
    worlds = Worlds()

    def see(at_s: float, pid: int, step: int) -> str | None:
        return worlds.see(at_s, Progress(pid, 0, 2, 0, step, 0.0, every=10))

    see(1.0, 7, 110)
    see(2.0, 7, 120)
    assert see(5.0, 8, 110) == (
        "trains again at step 110 in a world of 2 after 3.0 s, about 20 steps are trained again"
    )
    assert "no printed step is trained again" in str(see(9.0, 9, 120))
    assert not worlds.exact


@pytest.mark.skipif(sys.platform != "linux", reason="muster local runs on Linux")
def test_workers_are_found_below_their_torchrun(tmp_path: Path) -> None:
    place = {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "h", "MASTER_PORT": "1", "WORLD_SIZE": "2"}
    code = (
        "import json, os, subprocess, sys\n"
        "ranks = [subprocess.Popen(['sleep', '600'], env={**json.loads(sys.argv[1]), 'RANK': r})"
        " for r in '10']\n"
        "print([rank.pid for rank in ranks], flush=True)\n"
        "sys.stdin.read()\n"
        "[rank.kill() for rank in ranks]\n"
    )
    torchrun = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps({**os.environ, **place})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with torchrun:
        assert torchrun.stdout is not None
        one, zero = json.loads(torchrun.stdout.readline())
        wait_until(lambda: len(find_workers(os.getpid())) == 2, 60, "both have begun")
        found = find_workers(os.getpid())
        assert [(w.pid, w.rank, w.world_size, w.master) for w in found] == [
            (zero, 0, 2, "h:1"),
            (one, 1, 2, "h:1"),
        ]
        assert torchrun.stdin is not None
        torchrun.stdin.close()
    assert find_workers(torchrun.pid) == []


def test_output_that_grows_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "torchrun.log"
    log.write_text("step 5, of an earlier run\n")
    progress, written = PrintedProgress(PrintedSteps()), [b"step 120\nstep ", b"12", b"1\n"]
    progress.begin(log)
    node = cast(LocalNode, SimpleNamespace(name="node-0", launcher=None, launcher_log=log))

    class Growing(io.FileIO):
        def seek(self, offset: int, whence: int = 0) -> int:
            place = super().seek(offset, whence)
            if whence == os.SEEK_END and written:
                with io.FileIO(log, "ab") as writer:
                    writer.write(written.pop(0))
            return place

    monkeypatch.setattr(Path, "open", lambda path, _: Growing(path))
    texts = [look.text for _ in range(5) for _, look in progress.look([node])]
    assert "".join(texts) == "step 120\nstep 121\n"
