# SPDX-License-Identifier: Apache-2.0
"""Lightning's checkpoints: written aside and renamed; a file cut short is not gone on from."""

from __future__ import annotations

import logging
import os
import re
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.process import RankIdentity
from muster.resuming import ALONE, world_tag
from muster.saved_steps import CommittedStep
from tests.support.launchers.refused import OWN_LAUNCHER
from tests.support.ports import free_ports
from tests.support.training.worker import SCRIPTS, worker

OWN = f"muster-{{}}-{ALONE}.ckpt"
"""A checkpoint of the callback's beside no sidecar."""
EARLIER, LATER = world_tag("job", 3, "a:1"), world_tag("job", 4, "b:1")

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``muster.lightning``, beside no sidecar so far; ``commit`` gives it a last commit."""
    module = import_module("muster.lightning")
    monkeypatch.setattr(module, "last_commit", lambda: None)
    return module


def commit(library: Any, monkeypatch: pytest.MonkeyPatch, step: int, tag: str = "") -> None:
    monkeypatch.setattr(library, "last_commit", lambda: CommittedStep(step, tag=tag))


def save(path: Path, step: int, tag: str = "") -> Path:
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"epoch": 0, "global_step": step, "state_dict": {"w": torch.zeros(1000)}}
    torch.save({**state, **({"muster_tag": tag} if tag else {})}, path)
    return path


def cut_short(path: Path) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def test_the_committed_step_comes_before_a_newer_file_that_was_cut_short(
    tmp_path: Path, library: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = save(tmp_path / "muster-10.ckpt", 10)
    torn = cut_short(save(tmp_path / "muster-20.ckpt", 20))
    commit(library, monkeypatch, 10)
    with caplog.at_level(logging.WARNING):
        assert library.last_checkpoint(str(tmp_path)) == str(whole)
    assert [r.getMessage() for r in caplog.records] == [
        f"{torn} is not whole, or no checkpoint of Lightning's: passed over"
    ]


def test_a_newer_one_that_is_whole_comes_before_the_committed_step(
    tmp_path: Path, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = save(tmp_path / "epoch=1-step=30.ckpt", 30)
    older = save(tmp_path / "last.ckpt", 5)
    committed = save(tmp_path / "muster-10.ckpt", 10)
    os.utime(older)  # by the clock of its file system it is the newest
    commit(library, monkeypatch, 10)
    assert library.last_checkpoint(str(tmp_path)) == str(newer)
    newer.unlink()
    assert library.last_checkpoint(str(tmp_path)) == str(committed)


def test_what_all_ranks_have_committed_is_taken_in_whatever_format(
    tmp_path: Path, library: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    committed = tmp_path / "muster-10.ckpt"
    committed.write_bytes(b"as a plug-in writes it")
    commit(library, monkeypatch, 10)
    assert library.last_checkpoint(str(tmp_path)) == str(committed)
    assert caplog.records == []


def test_without_a_commit_the_newest_whole_one_is_taken(tmp_path: Path, library: Any) -> None:
    assert library.last_checkpoint(str(tmp_path)) is None
    cut_short(save(tmp_path / "muster-20.ckpt", 20))
    assert library.last_checkpoint(str(tmp_path)) is None
    sharded = save(tmp_path / "muster-12.ckpt" / "meta.pt", 12).parent
    assert library.last_checkpoint(str(tmp_path)) == str(sharded)
    cut_short(sharded / "meta.pt")
    assert library.last_checkpoint(str(tmp_path)) is None


def test_a_world_that_was_cut_off_is_not_gone_on_from(
    tmp_path: Path, library: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    committed = save(tmp_path / f"muster-20-{LATER}.ckpt", 20, LATER)
    alone = save(tmp_path / "epoch=1-step=30.ckpt", 30, EARLIER)
    commit(library, monkeypatch, 20, LATER)
    assert library.last_checkpoint(str(tmp_path)) == str(committed)
    assert [r.getMessage() for r in caplog.records] == [
        f"{alone} is of a world that was cut off: passed over"
    ]
    newer = save(tmp_path / "epoch=1-step=31.ckpt", 31, LATER)
    assert library.last_checkpoint(str(tmp_path)) == str(newer)


def test_i1_a_world_that_was_cut_off_removes_nothing_of_a_later_one(
    tmp_path: Path, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 11, 12):
        (tmp_path / f"muster-{step}-{LATER}.ckpt").write_bytes(b"whole")
    (tmp_path / f"muster-13-{LATER}.ckpt.part").write_bytes(b"half")
    monkeypatch.setattr(library, "save_tag", lambda: EARLIER)
    callback = library.MusterCallback(str(tmp_path))
    for step in (10, 20, 30):
        callback._save(FakeTrainer(), step)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"muster-{step}-{LATER}.ckpt" for step in (10, 11, 12)),
        f"muster-13-{LATER}.ckpt.part",
        *(f"muster-{step}-{EARLIER}.ckpt" for step in (20, 30)),
    ]


class FakeTrainer:
    """What the callback asks of a trainer; once ``ended``, a save comes half as far."""

    def __init__(self) -> None:
        self.is_global_zero = True
        self.strategy = SimpleNamespace(
            checkpoint_io=SimpleNamespace(teardown=self._teardown), remove_checkpoint=self._remove
        )
        self.ended = False
        self.waited = 0

    def save_checkpoint(self, path: str) -> None:
        Path(path).write_bytes(b"half")
        if self.ended:
            raise SystemExit("killed in the middle of it")
        Path(path).write_bytes(b"whole")

    def _teardown(self) -> None:
        self.waited += 1

    def _remove(self, path: str) -> None:
        Path(path).unlink()


def test_a_save_that_is_killed_leaves_no_checkpoint_and_the_next_clears_up(
    tmp_path: Path, library: Any
) -> None:
    callback, trainer = library.MusterCallback(str(tmp_path)), FakeTrainer()
    callback._save(trainer, 10)
    assert (tmp_path / OWN.format(10)).read_bytes() == b"whole"
    trainer.ended = True
    with pytest.raises(SystemExit):
        callback._save(trainer, 20)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == [OWN.format(10)]
    trainer.ended = False
    callback._save(trainer, 30)
    assert sorted(p.name for p in tmp_path.iterdir()) == [OWN.format(10), OWN.format(30)]
    assert trainer.waited == 2, "for a plug-in that writes in the background"


@pytest.mark.parametrize(
    ("environ", "fits", "wrong", "said"),
    [
        (
            {"TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": "2"},
            {"world_size": 2},
            {"world_size": 1},
            r"started 2 ranks, .* a world of 1: .*num_nodes",
        ),
        (
            {},
            {"world_size": 1},
            {"world_size": 16, "num_devices": 8},
            f"^{re.escape(OWN_LAUNCHER)}$",
        ),
    ],
    ids=["each would train alone, without num_nodes", "of Lightning's own launcher"],
)
def test_ranks_that_make_no_world_of_muster_are_refused(
    library: Any, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str],
    fits: dict[str, int], wrong: dict[str, int], said: str,
) -> None:  # fmt: skip
    """They would train and save to the same files in silence. One alone, as in a notebook, may."""
    own = SimpleNamespace(rank=RankIdentity(environ))
    monkeypatch.setattr(library, "own_file", lambda: own)
    callback = library.MusterCallback("/shared")
    callback.setup(SimpleNamespace(**fits), None, "fit")
    with pytest.raises(ValueError, match=said):
        callback.setup(SimpleNamespace(**wrong), None, "fit")


def test_every_rank_is_told_what_rank_0_has_found(tmp_path: Path) -> None:
    """Also one that sees another directory, as where a listing is out of date; before there is a
    process group, which can be made afterwards."""
    whole = save(tmp_path / "0" / "muster-10.ckpt", 10)
    save(tmp_path / "1" / "muster-7.ckpt", 7)
    (port,) = free_ports(1)
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                worker(
                    *(SCRIPTS / "choosing_rank.py", tmp_path / rank),
                    run_dir=tmp_path,
                    master=f"127.0.0.1:{port}",
                    WORLD_SIZE="2",
                    RANK=rank,
                    LOCAL_RANK=rank,
                )
            )
            for rank in "01"
        ]
        for rank in ranks:
            assert rank.end() == 0, rank.complaints
            assert rank.said == f"{whole} {whole} 2\n"
