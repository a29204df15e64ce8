# SPDX-License-Identifier: Apache-2.0
"""What proves a checkpoint whole: that its end is there, and what it says of the rest."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from muster.lightning_files import step_in, whole_step

WEIGHTS = bytes(range(256)) * 64


def archive(state: Any, *, name: str = "archive/data.pkl") -> bytes:
    """A checkpoint as ``torch.save`` lays it out: a description, weights, a table of contents."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as parts:
        parts.writestr(name, pickle.dumps(state, protocol=2))
        parts.writestr("archive/data/0", WEIGHTS)
    return content.getvalue()


WHOLE = archive(OrderedDict(epoch=3, global_step=70_000, state_dict={"w": [1, 2]}))


def step_of(path: Path, content: bytes) -> int | None:
    path.write_bytes(content)
    return whole_step(str(path))


def test_a_whole_file_tells_its_step(tmp_path: Path) -> None:
    assert step_of(tmp_path / "a.ckpt", WHOLE) == 70_000


@pytest.mark.parametrize("length", [0, 1, 100, len(WHOLE) // 2, len(WHOLE) - 1])
def test_a_file_that_was_cut_short_is_not_whole(tmp_path: Path, length: int) -> None:
    assert step_of(tmp_path / "a.ckpt", WHOLE[:length]) is None


def test_a_file_whose_end_was_written_before_its_middle_is_not_whole(tmp_path: Path) -> None:
    for hole in (0, WHOLE.index(b"archive/data/0") - 30):
        torn = WHOLE[:hole] + bytes(64) + WHOLE[hole + 64 :]
        assert step_of(tmp_path / "a.ckpt", torn) is None


def test_what_describes_the_rest_must_be_unharmed(tmp_path: Path) -> None:
    at = WHOLE.index(b"state_dict")
    assert step_of(tmp_path / "a.ckpt", WHOLE[:at] + b"X" + WHOLE[at + 1 :]) is None


@pytest.mark.parametrize(
    "content",
    [b"text", archive({"epoch": 3}), archive({"global_step": 7}, name="archive/other")],
)
def test_a_file_of_another_kind_has_no_step(tmp_path: Path, content: bytes) -> None:
    assert step_of(tmp_path / "a.ckpt", content) is None


def test_what_is_no_file_is_not_whole(tmp_path: Path) -> None:
    assert whole_step(str(tmp_path)) is None
    assert whole_step(str(tmp_path / "absent")) is None


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("step", [0, 255, 65_536, 2**40])
def test_the_step_is_read_and_nothing_is_run(protocol: int, step: int) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("it was run",)

    state = {"other": "global", "before": Harm(), "global_step": step, "after": 3}
    assert step_in(pickle.dumps(state, protocol)) == step


def test_another_number_is_not_taken_for_the_step() -> None:
    assert step_in(pickle.dumps({"a": "global_step", "global_step": "text", "n": 5})) is None
    with pytest.raises(ValueError, match="pickle"):
        step_in(b"")
