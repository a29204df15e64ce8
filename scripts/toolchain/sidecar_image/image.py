# SPDX-License-Identifier: Apache-2.0
"""The sidecar's image: ``Dockerfile.sidecar`` as it is, built on a base that is made here.

What is installed comes from wheels that are downloaded before, so that the build needs no network
and knows nothing of the settings that the machine's pip has.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import docker

from sidecar_image.engine import CACHE, ROOT, ContainerEngine

BASE = "muster-base:bookworm"
IMAGE = "muster-sidecar:test"
REQUIREMENTS = ("scripts/sidecar-requirements.txt", "scripts/sidecar-build-requirements.txt")
ARCHIVES_KEPT = 3
LAYERS = CACHE / "sidecar-layers"
"""What was built before, so that a change of a module does not install the wheels anew."""
LAYERS_MAX_BYTES = 3_000_000_000


def wheels() -> Path:
    """A folder with every wheel that the image installs, for the base's Python."""
    pins = b"".join((ROOT / name).read_bytes() for name in REQUIREMENTS)
    folder = CACHE / f"sidecar-wheels-{hashlib.sha256(pins).hexdigest()[:12]}"
    if not (folder / ".complete").exists():
        for name in REQUIREMENTS:
            subprocess.run(
                [
                    *(sys.executable, "-m", "pip", "download", "--quiet"),
                    *("--require-hashes", "--no-deps", "--only-binary=:all:"),
                    *("--python-version", "3.11", "--dest", folder, "-r", ROOT / name),
                ],
                check=True,
                cwd=CACHE,
            )
        (folder / ".complete").touch()
    return folder


def context_names() -> list[str]:
    """What ``.dockerignore`` lets through."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in ignored if line and not line.startswith("#")]
    names = docker.utils.exclude_paths(str(ROOT), patterns, dockerfile="Dockerfile.sidecar")
    return sorted(name for name in names if (ROOT / name).is_file())


def context() -> bytes:
    """The build's context as a tar, with the wheels."""
    found = {name: ROOT / name for name in context_names()}
    found |= {f"wheels/{wheel.name}": wheel for wheel in wheels().glob("*.whl")}
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, path in sorted(found.items()):
            entry = archive.gettarinfo(path, name)
            entry.mtime, entry.mode = 0, 0o755 if entry.mode & 0o100 else 0o644
            entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, "", ""
            with path.open("rb") as file:
                archive.addfile(entry, file)
    return content.getvalue()


def build(engine: ContainerEngine, content: bytes) -> None:
    """Build ``IMAGE``, without any network; a step that fails raises with what it printed."""
    if not engine.client.images.list(BASE):
        engine.import_base(BASE)
    try:
        engine.client.images.build(
            fileobj=io.BytesIO(content),
            custom_context=True,
            dockerfile="Dockerfile.sidecar",
            buildargs={"BASE": BASE},
            network_mode="none",
            tag=IMAGE,
            rm=True,
            forcerm=True,
        )
    except docker.errors.BuildError as error:
        printed = "".join(line.get("stream", "") for line in error.build_log)
        raise AssertionError(f"{error}: {printed[-3000:]}") from error


def sidecar_archive() -> Path:
    """``IMAGE`` as a docker archive, for ``ctr -n k8s.io images import``; builds it if it must.

    One process builds, others that want the same wait for it.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "sidecar-image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = context()
        path = CACHE / f"sidecar-image-{hashlib.sha256(content).hexdigest()[:12]}.tar"
        if not path.exists():
            _bound(LAYERS)
            on_former = LAYERS.exists()
            try:
                _build(content, path)
            except Exception:
                if not on_former:
                    raise
                # What a run that was killed has left there may be half a layer.
                _build(content, path)
    return path


def _build(content: bytes, path: Path) -> None:
    try:
        with ContainerEngine(LAYERS) as engine:
            build(engine, content)
            _save(engine, path)
    except BaseException:
        # Whatever they have to do with it, the next build is not to fail for them.
        shutil.rmtree(LAYERS, ignore_errors=True)
        raise


def _bound(layers: Path) -> None:
    """Begin anew before what was built fills the disk."""
    used = subprocess.run(["du", "-sb", layers], capture_output=True, text=True).stdout.split()
    if used and int(used[0]) > LAYERS_MAX_BYTES:
        shutil.rmtree(layers)


def _save(engine: ContainerEngine, path: Path) -> None:
    """Keep ``IMAGE`` in the cache, where only the newest few stay."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        for chunk in engine.client.images.get(IMAGE).save(named=IMAGE):
            file.write(chunk)
    temporary.replace(path)
    kept = sorted(CACHE.glob("sidecar-image-*.tar"), key=lambda each: each.stat().st_mtime)
    for old in kept[:-ARCHIVES_KEPT]:
        old.unlink(missing_ok=True)
