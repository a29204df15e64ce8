# SPDX-License-Identifier: Apache-2.0
"""The ``torchrun`` of the run directory: whom it asks, and what it becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_shim.pod.delivery import images_own
from launcher_shim.pod.torchrun import digest, meets_at

HERE = {
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "localhost:29400",
    "PET_RDZV_ID": "digits",
}


@pytest.mark.parametrize(
    ("line", "meets"),
    [
        ("--nproc-per-node=8 train.py --rdzv-id other", (29400, "digits")),
        ("--rdzv-id two train.py", (29400, "two")),
        ("--rdzv_id=two -m train", (29400, "two")),
        ("--standalone --nnodes=1 train.py", None),
        ("--rdzv-endpoint=10.0.0.1:29400 train.py", None),
        ("--rdzv-backend=static train.py", None),
        ("--rdzv-endpoint=127.0.0.1:29500 train.py", (29500, "digits")),
        ("train.py --help", (29400, "digits")),
        ("-r3 -t 3 --role=x -- train.py", (29400, "digits")),
        ("-t3 --no-python ./train", (29400, "digits")),
        ("", None),
        ("--nproc-per-node 8", None),
        ("-h", None),
        ("--nproc-per-node=8 --help train.py", None),
        ("--hel train.py", None),
        ("--version", None),
        ("--print-completion bash", None),
    ],
)
def test_it_asks_for_one_that_comes_to_the_sidecar(
    line: str, meets: tuple[int, str] | None
) -> None:
    assert meets_at(line.split(), HERE) == meets
    assert meets_at(line.split(), {}) is None


def test_launch_lines_differ_by_each_word() -> None:
    lines = [["a.py"], ["b.py"], ["a.py", "x"], ["a.py x"], []]
    assert len({digest(line) for line in lines}) == len(lines)
    assert digest(["a.py"]) == digest(["a.py"])


def test_it_becomes_the_next_one_in_the_path(tmp_path: Path) -> None:
    ours, plain, image = (tmp_path / name / "torchrun" for name in ("run", "plain", "image"))
    for program in (ours, plain, image):
        program.parent.mkdir()
        program.write_text("")
        program.chmod(0o755)
    plain.chmod(0o644)
    linked = tmp_path / "link"
    linked.symlink_to(ours.parent)
    path = f"{ours.parent}:{linked}:{plain.parent}"
    assert images_own("torchrun", str(ours), {"PATH": path}) is None
    assert images_own("torchrun", str(ours), {"PATH": f"{path}:{image.parent}"}) == str(image)
