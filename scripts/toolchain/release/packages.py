# SPDX-License-Identifier: Apache-2.0
"""The wheel, the sdist and the chart's package; and a trial installation of the former two."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

from release.archives import of_everybody, rewrite, sha256, write_gzip
from release.commit import Commit

INSTALL_TIMEOUT_S = 900
RUN_TIMEOUT_S = 120
_BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""


class PackageBuilder:
    """setuptools in an environment of its own, at the version that the images build with."""

    def __init__(self, commit: Commit, scratch: Path) -> None:
        self._commit = commit
        self._scratch = scratch
        requirements = commit.tree / "scripts" / "sidecar-build-requirements.txt"
        self._python = environment(scratch / "builder")
        pip(self._python, "--require-hashes", "-r", str(requirements))

    def wheel(self, out: Path, tree: Path | None = None) -> Path:
        """Build the wheel of the commit, or of another tree."""
        return out / self._build("wheel", tree or self._commit.tree, out)

    def sdist(self, out: Path) -> Path:
        """Build the sdist; the wheel built from it has to be that of the commit."""
        made = self._scratch / self._build("sdist", self._commit.tree, self._scratch)
        path = out / made.name
        repack(made, path, self._commit.time_s)
        return path

    def same_wheel(self, wheel: Path, sdist: Path) -> bool:
        """Return whether the sdist builds the same wheel."""
        folder = self._scratch / "of-sdist"
        folder.mkdir()
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (tree,) = folder.iterdir()
        return sha256(self.wheel(self._scratch, tree)) == sha256(wheel)

    def _build(self, kind: str, tree: Path, out: Path) -> str:
        environ = {**os.environ, "SOURCE_DATE_EPOCH": str(self._commit.time_s)}
        environ.pop("PYTHONPATH", None)
        done = run([str(self._python), "-c", _BUILD, kind, str(out)], tree, environ)
        return done.splitlines()[-1]


def chart_package(helm: Path, commit: Commit, scratch: Path, out: Path) -> Path:
    """Package the chart with helm, and remove the time that helm writes into it."""
    folder = scratch / "chart"
    folder.mkdir()
    run([str(helm), "package", "charts/muster", "--destination", str(folder)], commit.tree)
    (made,) = folder.iterdir()
    repack(made, out / made.name, commit.time_s)
    return out / made.name


def repack(made: Path, path: Path, time_s: int) -> None:
    """Rewrite a .tar.gz with the time of the commit."""
    plain = made.with_suffix(".tar")
    with made.open("rb") as source, plain.open("wb") as target:
        rewrite(source, target, of_everybody(time_s))
    with plain.open("rb") as source, path.open("wb") as target:
        write_gzip(source, target)


def tried(package: Path, commit: Commit, scratch: Path) -> str:
    """Install a package in an environment of its own; return the output of ``muster --version``."""
    python = environment(scratch / f"try-{package.name}")
    scripts = commit.tree / "scripts"
    pip(python, "--require-hashes", "-r", str(scripts / "sidecar-requirements.txt"))
    if package.suffix != ".whl":
        requirements = str(scripts / "sidecar-build-requirements.txt")
        pip(python, "--require-hashes", "-r", requirements)
    pip(python, "--no-deps", "--no-index", "--no-build-isolation", str(package))
    run([str(python), "-m", "pip", "check"], scratch)
    muster = str(python.parent / "muster")
    run([muster, "agent", "--help"], scratch)
    return run([muster, "--version"], scratch).strip()


def environment(place: Path) -> Path:
    """Create an environment without packages; return its Python."""
    venv.create(place, with_pip=True, symlinks=True)
    return place / "bin" / "python"


def pip(python: Path, *arguments: str) -> None:
    """Run ``pip install`` with these arguments."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*command, *arguments], python.parent, timeout_s=INSTALL_TIMEOUT_S)


def run(
    command: list[str],
    folder: Path,
    environ: dict[str, str] | None = None,
    timeout_s: float = RUN_TIMEOUT_S,
) -> str:
    """Run a command and return its output; exits with the command's last lines if it fails."""
    if environ is None:
        environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        words = (done.stderr or done.stdout)[-2000:]
        sys.exit(f"release: {' '.join(command[:5])} … ended with {done.returncode}: {words}")
    return done.stdout
