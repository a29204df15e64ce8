# SPDX-License-Identifier: Apache-2.0
"""Reproducible archives: free of the time, the place and the user of the build."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

Change = Callable[[tarfile.TarInfo], None]

CHUNK = 1 << 20
GZIP_LEVEL = 6


def write_gzip(source: IO[bytes], target: IO[bytes]) -> None:
    """Compress with gzip, without a name and a time."""
    with gzip.GzipFile("", "wb", GZIP_LEVEL, target, mtime=0) as packed:
        while chunk := source.read(CHUNK):
            packed.write(chunk)


def rewrite(source: IO[bytes], target: IO[bytes], change: Change) -> None:
    """Rewrite a tar entry by entry, each changed by ``change``."""
    with (
        tarfile.open(fileobj=source, mode="r:*") as old,
        tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for entry in old:
            change(entry)
            new.addfile(entry, old.extractfile(entry) if entry.isfile() else None)


def of_everybody(epoch_s: int) -> Change:
    """Return the change for a source archive: one time, no owner, only the exec bit kept."""

    def change(entry: tarfile.TarInfo) -> None:
        entry.pax_headers = {}
        entry.mtime = epoch_s
        entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, "", ""
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644

    return change


def not_after(epoch_s: int) -> Change:
    """Return the change for an image layer: no time after ``epoch_s``, the build's own included."""

    def change(entry: tarfile.TarInfo) -> None:
        entry.pax_headers = {
            key: value for key, value in entry.pax_headers.items() if key.startswith("SCHILY.xattr")
        }
        entry.mtime = min(int(entry.mtime), epoch_s)
        entry.uname, entry.gname = "", ""

    return change


def sha256(path: Path) -> str:
    """Return the SHA-256 digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
