# SPDX-License-Identifier: Apache-2.0
"""The commit to release: its files, separate from the checkout, and its time."""

from __future__ import annotations

import io
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from sidecar_image.engine import ROOT

GIT_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit. ``tree``: its files. ``time_s``: its time, which all artefacts of it carry."""

    name: str
    time_s: int
    tree: Path

    @classmethod
    def checked_out(cls, tree: Path) -> Commit:
        """Extract the files of HEAD into ``tree``, with modes that do not depend on a umask."""
        with tarfile.open(fileobj=io.BytesIO(_git("archive", "HEAD"))) as archive:
            for entry in archive:
                entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
                archive.extract(entry, tree, filter="data")
        name, time = git("log", "-1", "--format=%H %ct").split()
        return cls(name, int(time), tree)


def git(*arguments: str) -> str:
    """Run git and return its output."""
    return _git(*arguments).decode()


def changed() -> list[str]:
    """Return the paths that differ from HEAD; ignored ones do not count."""
    return [line[3:] for line in git("status", "--porcelain").splitlines()]


def _git(*arguments: str) -> bytes:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, check=True, timeout=GIT_TIMEOUT_S).stdout
