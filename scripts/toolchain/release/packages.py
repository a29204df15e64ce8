# SPDX-License-Identifier: Apache-2.0
"""The wheels, the sdists and the chart's package; and a trial installation of the former."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

from release.archives import of_everybody, rewrite, sha256, write_gzip
from release.commit import Commit

LIBRARY, PROGRAM = "muster-elastic-lib", "muster-elastic"
PROJECTS = {LIBRARY: "lib", PROGRAM: "."}
"""Each distribution's folder in the repository; the second one needs the first."""
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

    def made(self, name: str, out: Path) -> list[Path]:
        """Build a distribution's wheel, and its sdist, which has to make the same wheel."""
        tree = self._commit.tree / PROJECTS[name]
        wheel = out / self._build("wheel", tree, out)
        plain = self._scratch / self._build("sdist", tree, self._scratch)
        sdist = out / plain.name
        repack(plain, sdist, self._commit.time_s)
        folder = self._scratch / f"of-{sdist.name}"
        folder.mkdir()
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (unpacked,) = folder.iterdir()
        again = self._scratch / self._build("wheel", unpacked, self._scratch)
        if sha256(again) != sha256(wheel):
            sys.exit(f"release: {sdist.name} makes another wheel than the commit does")
        return [wheel, sdist]

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


def tried(package: Path, library: Path | None, commit: Commit, scratch: Path) -> str:
    """Install a package in an environment of its own; return the version that it says.

    ``library``: what the program needs of this release; None: the package is the library itself.
    """
    python = environment(scratch / f"try-{package.name}")
    scripts = commit.tree / "scripts"
    needed = [] if library is None else [scripts / "sidecar-requirements.txt"]
    if package.suffix != ".whl":
        needed.append(scripts / "sidecar-build-requirements.txt")
    for requirements in needed:
        pip(python, "--require-hashes", "-r", str(requirements))
    for one in filter(None, (library, package)):
        pip(python, "--no-deps", "--no-index", "--no-build-isolation", str(one))
    run([str(python), "-m", "pip", "check"], scratch)
    if library is None:
        return run(
            [str(python), "-c", "import muster; print('muster', muster.__version__)"], scratch
        )
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
