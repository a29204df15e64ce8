# SPDX-License-Identifier: Apache-2.0
"""The names of the run directory stand in one place; those that are repeated are the same."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import muster.gate
import muster.progress
import muster.shard_log
import muster.world.conduct
from launcher_shim.rundir import layout

ROOT = Path(__file__).parents[2]
LAYOUT = "launcher_shim/rundir/layout.py"
NAMES = {name: text for name, text in vars(layout).items() if name.isupper()}
MISTAKABLE = {layout.ENVIRONMENT, layout.HOSTS, layout.PROGRESS, layout.PROGRAMS, layout.MODULES}
MISTAKABLE |= {layout.LAUNCH, layout.WORKERS, layout.TORCHRUN, layout.MUSTER_RUN}
MISTAKABLE |= {layout.HOROVODRUN, layout.WORLD}
"""Names that are words as well: where they stand between quotes, they may mean something else."""

REPEATS = ("muster/gate.py", "muster/gate.py", "muster/shard_log.py")
"""Modules of ``import muster``, which has no layout beside it."""


def texts(path: Path) -> set[str]:
    """Every string of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_names_differ() -> None:
    assert len({*NAMES.values()}) == len(NAMES)


@pytest.mark.parametrize(
    "package", ["agent", "console", "controller", "injection", "launcher_shim", "muster", "rdzv"]
)
def test_a_name_stands_in_the_layout_alone(package: str) -> None:
    elsewhere = {
        f"{relative}: {name}"
        for path in (ROOT / package).rglob("*.py")
        if (relative := path.relative_to(ROOT).as_posix()) not in (LAYOUT, *REPEATS)
        for name in texts(path) & ({*NAMES.values()} - MISTAKABLE)
    }
    assert elsewhere == set()


def test_import_muster_repeats_the_names_that_it_uses() -> None:
    assert muster.gate.GATE_NAME == layout.GATE
    assert muster.gate.PAGE_NAME == layout.GATE_PAGE
    assert muster.gate.ENVIRONMENT_NAME == layout.ENVIRONMENT
    assert muster.progress.DIRECTORY_NAME == layout.PROGRESS
    assert f"{layout.PROGRESS}/{muster.progress.IMPORTED_NAME}" == layout.IMPORTED
    assert muster.shard_log.SOCKET_NAME == layout.SHARDS_SOCKET
    assert muster.world.conduct.WORLD_NAME == layout.WORLD


def test_the_script_for_horovodrun_prints_the_host_list() -> None:
    script = ROOT / "launcher_shim" / "pod" / layout.DISCOVER_HOSTS
    assert f"list=./{layout.HOSTS} ;;" in script.read_text(encoding="utf-8")
