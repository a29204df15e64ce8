# SPDX-License-Identifier: Apache-2.0
"""The images of the sidecar and of the controller, built on a base that is made here.

Packages come from wheels that are downloaded before, so that the build needs no network and does
not depend on the settings of the machine's pip.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import docker

from sidecar_image.engine import CACHE, ROOT, ContainerEngine

BASE = "muster-base:bookworm"
IMAGE = "muster-sidecar:test"
CONTROLLER_IMAGE = "muster-controller:test"
BUILD_REQUIREMENTS = "scripts/sidecar-build-requirements.txt"
ARCHIVES_KEPT = 3
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""The names of images' architectures in wheels."""
MANYLINUX = ("2014", "_2_17", "_2_28", "_2_31", "_2_34")
"""The manylinux versions that a base with the glibc of Debian 12 accepts."""
LAYERS = CACHE / "sidecar-layers"
"""The cache of built layers, so that a change of a module does not reinstall the wheels."""
LAYERS_MAX_BYTES = 3_000_000_000


@dataclass(frozen=True, slots=True)
class Recipe:
    """The build of one image: its part of the product, its name, and the image it builds on."""

    part: str
    image: str
    on: Recipe | None = None

    @property
    def dockerfile(self) -> str:
        """The Dockerfile of the image, at the root of the repository."""
        return f"Dockerfile.{self.part}"

    @property
    def requirements(self) -> tuple[str, ...]:
        """The requirements files of its packages and of the build."""
        return f"scripts/{self.part}-requirements.txt", BUILD_REQUIREMENTS


SIDECAR = Recipe("sidecar", IMAGE)
CONTROLLER = Recipe("controller", CONTROLLER_IMAGE, SIDECAR)


def wheels(recipe: Recipe, architecture: str = "amd64") -> Path:
    """Return a folder with every wheel of the image, for the base's Python and glibc.

    Downloads them if they are not cached.
    """
    pins = b"".join((ROOT / name).read_bytes() for name in recipe.requirements)
    machine = MACHINES[architecture]
    for_it = "" if architecture == "amd64" else f"-{architecture}"
    folder = CACHE / f"{recipe.part}-wheels{for_it}-{hashlib.sha256(pins).hexdigest()[:12]}"
    if not (folder / ".complete").exists():
        for name in recipe.requirements:
            subprocess.run(
                [
                    *(sys.executable, "-m", "pip", "download", "--quiet"),
                    *("--require-hashes", "--no-deps", "--only-binary=:all:"),
                    *("--python-version", "3.11", "--dest", folder, "-r", ROOT / name),
                    *(f"--platform=manylinux{version}_{machine}" for version in MANYLINUX),
                ],
                check=True,
                cwd=CACHE,
            )
        (folder / ".complete").touch()
    return folder


def context_names(recipe: Recipe = SIDECAR) -> list[str]:
    """Return the files of the build context: those that ``.dockerignore`` does not exclude."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in ignored if line and not line.startswith("#")]
    names = docker.utils.exclude_paths(str(ROOT), patterns, dockerfile=recipe.dockerfile)
    return sorted(name for name in names if (ROOT / name).is_file())


def context(recipe: Recipe = SIDECAR, architecture: str = "amd64") -> bytes:
    """Pack the build context as a tar, with the wheels."""
    found = {name: ROOT / name for name in context_names(recipe)}
    found |= {f"wheels/{wheel.name}": wheel for wheel in wheels(recipe, architecture).glob("*.whl")}
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, path in sorted(found.items()):
            entry = archive.gettarinfo(path, name)
            entry.mtime, entry.mode = 0, 0o755 if entry.mode & 0o100 else 0o644
            entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, "", ""
            with path.open("rb") as file:
                archive.addfile(entry, file)
    return content.getvalue()


def build(
    engine: ContainerEngine,
    content: bytes,
    recipe: Recipe = SIDECAR,
    arguments: Mapping[str, str] | None = None,
) -> None:
    """Build an image without network access; raises ``AssertionError`` with the output if it fails.

    ``arguments``: build arguments in addition to the base images.
    """
    if not engine.client.images.list(BASE):
        engine.import_base(BASE)
    try:
        engine.client.images.build(
            fileobj=io.BytesIO(content),
            custom_context=True,
            dockerfile=recipe.dockerfile,
            buildargs={
                "BASE": BASE,
                **({"SIDECAR": recipe.on.image} if recipe.on else {}),
                **(arguments or {}),
            },
            network_mode="none",
            tag=recipe.image,
            rm=True,
            forcerm=True,
        )
    except docker.errors.BuildError as error:
        printed = "".join(line.get("stream", "") for line in error.build_log)
        raise AssertionError(f"{error}: {printed[-3000:]}") from error


def sidecar_archive() -> Path:
    """Return the sidecar's image as a docker archive, for ``ctr -n k8s.io images import``."""
    return _archive(SIDECAR)


def controller_archive() -> Path:
    """Return the controller's image as a docker archive."""
    return _archive(CONTROLLER)


def _archive(recipe: Recipe) -> Path:
    """Return an image's archive; builds it if missing.

    One process builds; others that need the same image wait for it.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "sidecar-image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        contents = {one: context(one) for one in (recipe.on, recipe) if one is not None}
        digest = hashlib.sha256(b"".join(contents.values())).hexdigest()[:12]
        path = CACHE / f"{recipe.part}-image-{digest}.tar"
        if not path.exists():
            _bound(LAYERS)
            on_former = LAYERS.exists()
            try:
                _build(contents, path)
            except Exception:
                if not on_former:
                    raise
                # The cache of a run that was killed may contain an incomplete layer.
                _build(contents, path)
    return path


def _build(contents: Mapping[Recipe, bytes], path: Path) -> None:
    """Build one image on top of the other, and save the last."""
    try:
        with ContainerEngine(LAYERS) as engine:
            for recipe, content in contents.items():
                build(engine, content, recipe)
            _save(engine, recipe, path)
    except BaseException:
        # The layers may be the cause: the next build must not fail because of them.
        shutil.rmtree(LAYERS, ignore_errors=True)
        raise


def _bound(layers: Path) -> None:
    """Delete the cache of layers if it exceeds its limit, before it fills the disk."""
    used = subprocess.run(["du", "-sb", layers], capture_output=True, text=True).stdout.split()
    if used and int(used[0]) > LAYERS_MAX_BYTES:
        shutil.rmtree(layers)


def _save(engine: ContainerEngine, recipe: Recipe, path: Path) -> None:
    """Save an image to the cache, and delete all but the newest ``ARCHIVES_KEPT`` archives."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        for chunk in engine.client.images.get(recipe.image).save(named=recipe.image):
            file.write(chunk)
    temporary.replace(path)
    kept = sorted(CACHE.glob(f"{recipe.part}-image-*.tar"), key=lambda each: each.stat().st_mtime)
    for old in kept[:-ARCHIVES_KEPT]:
        old.unlink(missing_ok=True)
