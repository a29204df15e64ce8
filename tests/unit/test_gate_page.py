# SPDX-License-Identifier: Apache-2.0
"""The gate's page: overwritten in place by the sidecar, looked at in place by the ranks."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agent.rundir.channels as written
import muster.gate
import muster.gate as mapped
from agent.rundir.files import RunDir
from launcher_shim.rundir import layout
from muster.gate import GateFile
from muster.progress import ProgressFile
from rdzv.drain.gate import REASON_CHARACTERS, Gate
from rdzv.records.drain import LastCommit
from tests.support.sidecars.in_process import configured
from tests.support.sidecars.pod_gate import PodGate

MASTER = "10.0.0.7:40123"
IDLE = Gate(run="job", round=3, master=MASTER)
HOLD = replace(IDLE, epoch=4, phase="hold")


@pytest.fixture
def at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank asks at each look whether its page is still the one in use."""
    monkeypatch.setattr(muster.gate, "LOOK_S", 0.0)


def phase(gate: GateFile) -> str | None:
    reading = gate.read()
    return None if reading is None else reading.gate.phase


def test_both_sides_know_one_format() -> None:
    for name in ("SLOT_BYTES", "FIRST_SLOT", "PAGE_BYTES"):
        assert getattr(written, name) == getattr(mapped, name)
    assert (written.WORD.format, written.HEAD.format) == (mapped.WORD.format, mapped.HEAD.format)


def test_a_change_needs_no_space_and_keeps_the_file(tmp_path: Path) -> None:
    pod, gate = PodGate(tmp_path), GateFile(str(tmp_path))
    path = tmp_path / layout.GATE_PAGE
    before = path.stat()
    assert before.st_blocks * 512 >= mapped.PAGE_BYTES, "it has all its blocks from the start"
    assert phase(gate) is None
    for epoch in range(1, 6):
        pod.show(replace(HOLD, epoch=epoch))
        reading = gate.read()
        assert reading is not None
        assert reading.gate.epoch == epoch
    assert gate.by_page
    now = path.stat()
    assert (now.st_ino, now.st_blocks, now.st_size) == (
        before.st_ino,
        before.st_blocks,
        before.st_size,
    )


def test_the_longest_gate_fits(tmp_path: Path) -> None:
    pod, gate = PodGate(tmp_path), GateFile(str(tmp_path))
    cursor = json.dumps('"' * 511)
    reason = "\u2013" * (REASON_CHARACTERS + 1)
    last = LastCommit(7, 3, 4, cursor=cursor)
    pod.show(replace(HOLD, run="r" * 253, master="m" * 253, reason=reason, last_commit=last))
    assert phase(gate) == "hold"
    with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        pod.show(replace(HOLD, reason="x" * 9000))


@pytest.mark.usefixtures("at_each_look")
def test_a_sidecar_that_dies_amid_a_change_leaves_the_former_gate(tmp_path: Path) -> None:
    pod, gate = PodGate(tmp_path), GateFile(str(tmp_path))
    path = tmp_path / layout.GATE_PAGE
    for step, shown in enumerate((IDLE, HOLD)):
        pod.show(shown)
        other = mapped.FIRST_SLOT + (step & 1) * mapped.SLOT_BYTES
        with path.open("r+b") as file:
            file.seek(other)
            file.write(b"\xff" * 300)
        assert phase(gate) == shown.phase
        assert RunDir(str(tmp_path)).gate() == shown.to_json()


def test_half_a_change_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod, gate = PodGate(tmp_path), GateFile(str(tmp_path))
    pod.show(IDLE)
    assert phase(gate) == "idle"
    whole: Callable[..., Any] = mapped.MappedPage.content

    def overtaken(self: mapped.MappedPage, word: int) -> bytes | None:
        monkeypatch.setattr(mapped.MappedPage, "content", whole)
        pod.show(replace(IDLE, epoch=9))
        pod.show(HOLD)
        content: bytes | None = whole(self, word)
        assert content is None
        return content

    pod.show(replace(IDLE, epoch=8))
    monkeypatch.setattr(mapped.MappedPage, "content", overtaken)
    assert phase(gate) == "hold"


def test_a_sidecar_that_starts_again_keeps_the_page_that_ranks_have_mapped(tmp_path: Path) -> None:
    pod, gate = PodGate(tmp_path), GateFile(str(tmp_path))
    pod.show(HOLD)
    assert phase(gate) == "hold"
    again = PodGate(tmp_path)
    assert RunDir(str(tmp_path)).gate() == HOLD.to_json()
    again.show(IDLE)
    assert phase(gate) == "idle"


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o644)


@pytest.mark.usefixtures("at_each_look")
@pytest.mark.parametrize("done", [linked, a_pipe, Path.unlink])
def test_i8_a_page_that_something_has_replaced_is_made_again_and_ranks_notice(
    tmp_path: Path, done: Callable[[Path], None]
) -> None:
    pod, gate = PodGate(tmp_path), GateFile(str(tmp_path))
    pod.show(IDLE)
    assert phase(gate) == "idle"
    done(tmp_path / layout.GATE_PAGE)
    assert phase(gate) == "idle"
    pod.show(HOLD)
    assert phase(gate) == "hold"
    assert gate.by_page


@pytest.mark.usefixtures("at_each_look")
def test_a_rank_follows_a_sidecar_of_either_version_that_takes_the_place_of_the_other(
    tmp_path: Path,
) -> None:
    former, gate = PodGate(tmp_path, by_page=False), GateFile(str(tmp_path))
    former.show(HOLD)
    assert (phase(gate), gate.by_page) == ("hold", False)
    assert RunDir(str(tmp_path)).gate() == HOLD.to_json()
    pod = PodGate(tmp_path)
    assert phase(gate) == "hold", "the page is there, and nothing was written to it yet"
    pod.show(IDLE)
    assert (phase(gate), gate.by_page) == ("idle", True)
    PodGate(tmp_path, by_page=False).show(HOLD)
    assert (phase(gate), gate.by_page) == ("hold", False)
    assert RunDir(str(tmp_path)).gate() == HOLD.to_json()


@pytest.mark.usefixtures("at_each_look")
@pytest.mark.parametrize("now_s", [1, 2**32], ids=["set-back", "set-forward"])
def test_which_gate_is_in_force_does_not_depend_on_the_clock(tmp_path: Path, now_s: int) -> None:
    """The node's clock is set before another sidecar takes the place of the one before."""
    gate = GateFile(str(tmp_path))
    PodGate(tmp_path).show(IDLE)
    assert (phase(gate), gate.by_page) == ("idle", True)

    def found() -> set[tuple[str | None, bool]]:
        new = GateFile(str(tmp_path))
        assert RunDir(str(tmp_path)).gate() == shown.to_json()
        return {(phase(one), one.by_page) for one in (gate, new)}

    former, shown = PodGate(tmp_path, by_page=False), HOLD
    former.show(shown)
    for name in (layout.ENVIRONMENT, layout.GATE):
        os.utime(tmp_path / name, (now_s, now_s))
    assert found() == {("hold", False)}
    pod, shown = PodGate(tmp_path), IDLE
    pod.show(shown)
    os.utime(tmp_path / layout.GATE_PAGE, (2, 2))
    assert found() == {("idle", True)}


def test_a_sidecar_with_another_environment_keeps_the_page_that_is_in_force(tmp_path: Path) -> None:
    """Its disk was full: ``gate.json`` has an older gate."""
    first = configured("127.0.0.1:1", tmp_path)
    RunDir(str(tmp_path)).deliver(first, "a")
    (tmp_path / layout.GATE).write_bytes(IDLE.to_json())
    RunDir(str(tmp_path)).put_gate(HOLD.to_json())
    again = RunDir(str(tmp_path))
    again.deliver(replace(first, grace_s=first.grace_s + 1), "a")
    assert again.gate() == HOLD.to_json()
    assert phase(GateFile(str(tmp_path))) == "hold"


def test_i2_a_rank_looks_at_each_boundary_for_the_first_gate_of_a_sidecar_that_knows_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr("muster.gate.time.monotonic", lambda: now_s)
    pod, gate = PodGate(tmp_path), GateFile(str(tmp_path))
    pod.show(IDLE)
    assert (phase(gate), gate.by_page) == ("idle", True)
    former = PodGate(tmp_path, by_page=False)
    now_s += muster.gate.LOOK_S
    assert (phase(gate), gate.by_page) == ("idle", False)
    former.show(HOLD)
    assert phase(gate) == "hold"


def test_a_new_rank_takes_the_line_of_the_one_before_over_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = PodGate(tmp_path)
    former = ProgressFile(str(tmp_path / "progress"), {})
    former.write(7, drain=True)
    former.close()
    inode = (tmp_path / "progress" / "0.json").stat().st_ino
    really = os.open

    def full(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return really(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", full)
    later = ProgressFile(str(tmp_path / "progress"), {"RANK": "1"})
    later.page = True
    later.write(9, drain=True)
    told = pod.told()
    assert (told.step, told.rank, told.page) == (9, 1, True)
    assert (tmp_path / "progress" / "0.json").stat().st_ino == inode
    another = ProgressFile(str(tmp_path / "progress"), {"LOCAL_RANK": "1"})
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        another.write(9)
