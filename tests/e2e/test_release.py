# SPDX-License-Identifier: Apache-2.0
"""A release that is made twice is the same, byte for byte: of a clone, whose tree is clean."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sidecar_image.engine import CACHE, ROOT
from tests.support.programs import ran

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]

MAKE_TIMEOUT_S = 3000


def dry_run(clone: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = ("--dry-run", "--out", str(out), *arguments)
    program = clone / "scripts" / "release"
    return ran(program, *words, timeout_s=MAKE_TIMEOUT_S, MUSTER_CACHE=str(CACHE))


def made(clone: Path, out: Path, *arguments: str) -> list[str]:
    """The lines that say digests; what lies in ``out`` has them."""
    done = dry_run(clone, out, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("clone") / "muster"
    subprocess.run(["git", "clone", "--quiet", ROOT, place], check=True, timeout=300)
    return place


def test_packages_are_the_same_twice_and_a_changed_tree_is_refused(
    clone: Path, tmp_path: Path
) -> None:
    first, second = (made(clone, tmp_path / name, "--without-images") for name in ("a", "b"))
    assert first == second
    assert len(first) == 11
    (clone / "left-behind").touch()
    refused = dry_run(clone, tmp_path / "c", "--without-images")
    (clone / "left-behind").unlink()
    assert refused.returncode == 1
    assert "left-behind: not as the commit has it" in refused.stderr


@pytest.mark.container
def test_images_are_the_same_twice(clone: Path, tmp_path: Path) -> None:
    first, second = (made(clone, tmp_path / name) for name in ("a", "b"))
    assert first == second
    assert len([line for line in first if "sha256:" in line]) == 2
