# SPDX-License-Identifier: Apache-2.0
"""Makes all that a release publishes, of the commit that is checked out, and prints its digests.

That is: wheel and sdist of the program and of the library, the chart's package, the images of the
sidecar and the controller for amd64 and arm64, and a bill of materials for each of them. Nothing is
published; made again, all are the same.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cyclonedx.model.component import ComponentType

from release import bill, images, packages, version
from release.archives import sha256
from release.commit import Commit, changed, git
from sidecar_image.engine import ROOT, toolchain
from sidecar_image.image import Recipe, wheels

ARCHITECTURES = ("amd64", "arm64")
TEXTS = (
    *("README.md", "charts/**/*.yaml", "charts/**/*.md", "docs/*.md"),
    *(version.CHANGELOG, version.PROJECT),
)
CODE = ("console/**/*.py", "injection/*.py")


def main(arguments: list[str]) -> int:
    """Build everything; return the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/release", description=__doc__)
    parser.add_argument(
        "--dry-run", action="store_true", help="of a version that is still worked on, too"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "release", help="where to [out/release]"
    )
    parser.add_argument(
        "--without-images", action="store_true", help="packages alone: no root, no engine"
    )
    asked = parser.parse_args(arguments)
    texts = texts_of(ROOT)
    is_version = version.version_in((ROOT / version.SOURCE).read_text())
    faults = [
        *version.refusals(
            is_version,
            texts[version.CHANGELOG],
            git("tag", "--list").split(),
            changed(),
            dry_run=asked.dry_run,
        ),
        *version.disagreements(is_version, texts),
    ]
    if faults:
        sys.stderr.writelines(f"release: {fault}\n" for fault in faults)
        return 1
    out: Path = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if left := sorted(path.name for path in out.iterdir()):
        sys.stderr.write(f"release: {out} has {left[0]} already: empty it, or give another --out\n")
        return 1
    with tempfile.TemporaryDirectory(prefix="muster-release-") as scratch:
        commit = Commit.checked_out(Path(scratch) / "tree")
        _say(f"muster {is_version}, of {commit.name}")
        for name, digest in _make(commit, is_version, Path(scratch), out, asked.without_images):
            _say(f"{digest}  {name}")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def texts_of(root: Path) -> dict[str, str]:
    """Read every file that may contain a version; return the texts by path."""
    paths = {path for pattern in (*TEXTS, *CODE) for path in root.glob(pattern)}
    return {str(path.relative_to(root)): path.read_text() for path in sorted(paths)}


def _make(
    commit: Commit, is_version: str, scratch: Path, out: Path, without_images: bool
) -> Iterator[tuple[str, str]]:
    builder = packages.PackageBuilder(commit, scratch)
    made = {name: builder.made(name, out) for name in packages.PROJECTS}
    library = made[packages.LIBRARY]
    for name, (wheel, sdist) in made.items():
        for package, needed in zip((wheel, sdist), library, strict=True):
            below = None if package == needed else needed
            said = packages.tried(package, below, commit, scratch)
            if f"muster {is_version}" not in said:
                sys.exit(f"release: {package.name} is installed, and says: {said}")
            digest = sha256(package)
            about = bill.subject(name, is_version, ComponentType.LIBRARY, digest)
            path = out / f"{package.name}.cdx.json"
            bill.write_bill(path, about, bill.requirements_of(wheel), commit.time_s, digest)
            yield package.name, digest
            yield path.name, sha256(path)
    helm = toolchain("helm") / "helm"
    chart = packages.chart_package(helm, commit, scratch, out)
    digest, path = sha256(chart), out / f"{chart.name}.cdx.json"
    about = bill.subject(
        "muster", version.chart_version(is_version), ComponentType.APPLICATION, digest
    )
    values = (commit.tree / "charts/muster/values.yaml").read_text()
    bill.write_bill(path, about, bill.images_of(values), commit.time_s, digest)
    yield chart.name, digest
    yield path.name, sha256(path)
    if not without_images:
        yield from _images(commit, is_version, made[packages.PROGRAM][0], scratch, out)


def _images(
    commit: Commit, is_version: str, wheel: Path, scratch: Path, out: Path
) -> Iterator[tuple[str, str]]:
    own = subprocess.run(
        ["dpkg", "--print-architecture"], capture_output=True, text=True, check=True
    ).stdout.strip()
    platforms = [images.Platform(name, name != own) for name in ARCHITECTURES]
    built = {platform: images.build_all(platform, scratch, commit.time_s) for platform in platforms}
    for recipe in images.RECIPES:
        name = f"muster-{recipe.part}"
        path = out / f"{name}-{is_version}.oci.tar"
        archives = [(platform, built[platform][recipe.part]) for platform in platforms]
        digest = images.published(
            archives, scratch / f"layout-{recipe.part}", path, is_version, commit.time_s
        )
        yield f"{name} ({', '.join(ARCHITECTURES)})", digest
        yield path.name, sha256(path)
        for platform in platforms:
            base = toolchain("container-base", *([platform.architecture] * platform.emulated))
            parts = [
                *bill.debian_packages(base),
                *bill.python_packages([*_wheels(recipe, platform.architecture), wheel]),
            ]
            about = bill.subject(name, is_version, ComponentType.CONTAINER, digest)
            bom = out / f"{name}-{is_version}-{platform.architecture}.cdx.json"
            bill.write_bill(bom, about, parts, commit.time_s, f"{digest}/{platform.architecture}")
            yield bom.name, sha256(bom)


def _wheels(recipe: Recipe, architecture: str) -> list[Path]:
    """Return the wheels that stay in the image, without the build's own."""
    recipes = filter(None, (recipe.on, recipe))
    found = {one.name: one for each in recipes for one in wheels(each, architecture).glob("*.whl")}
    return [path for name, path in found.items() if not name.startswith("setuptools-")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
