# SPDX-License-Identifier: Apache-2.0
"""Images for several architectures, each from its Dockerfile, combined into one OCI layout.

A base of another architecture runs under an emulator, so that one Dockerfile serves all. Docker's
traces of the time and the machine are removed afterwards: layers above the base get the time of
the commit, and the configuration is rebuilt.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from release.archives import not_after, of_everybody, rewrite, write_gzip
from sidecar_image.engine import ContainerEngine
from sidecar_image.image import BASE, CONTROLLER, SIDECAR, Recipe, build, context

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
KEPT = ("Env", "Entrypoint", "User", "WorkingDir", "Labels")
"""The fields of docker's image configuration that are kept: those that start a container."""
RECIPES = (SIDECAR, CONTROLLER)
FORMAT = {"imageLayoutVersion": "1.0.0"}


@dataclass(frozen=True, slots=True)
class Platform:
    """One architecture, by its name in images and in Debian."""

    architecture: str
    emulated: bool


class Layout:
    """A folder of blobs, each named by its digest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._blobs = folder / "blobs" / "sha256"
        self._blobs.mkdir(parents=True)

    def add(self, content: io.BufferedIOBase, kind: str) -> dict[str, Any]:
        """Store a blob; return its descriptor."""
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        size = content.seek(0, io.SEEK_END)
        content.seek(0)
        with (self._blobs / digest).open("wb") as file:
            while chunk := content.read(1 << 20):
                file.write(chunk)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": size}

    def add_json(self, value: Any, kind: str) -> dict[str, Any]:
        """Store a JSON value in canonical form; return its descriptor."""
        return self.add(io.BytesIO(_json(value)), kind)

    def archive(self, index: Mapping[str, Any], path: Path) -> None:
        """Write the layout as one file, in the format that ``skopeo`` and ``ctr`` read."""
        (self.folder / "oci-layout").write_bytes(_json(FORMAT))
        (self.folder / "index.json").write_bytes(_json(index))
        with (self.folder / "plain.tar").open("w+b") as plain, path.open("wb") as target:
            with tarfile.open(fileobj=plain, mode="w") as made:
                for file in sorted(f for f in self.folder.rglob("*") if f.name != "plain.tar"):
                    made.add(file, str(file.relative_to(self.folder)), recursive=False)
            plain.seek(0)
            rewrite(plain, target, of_everybody(0))


def build_all(platform: Platform, scratch: Path, time_s: int) -> dict[str, Path]:
    """Build every image from scratch; return docker's archive of each, by its part."""
    made: dict[str, Path] = {}
    with ContainerEngine() as engine:
        engine.import_base(BASE, platform.architecture if platform.emulated else "")
        for recipe in RECIPES:
            content = context(recipe, platform.architecture)
            build(engine, content, recipe, {"SOURCE_DATE_EPOCH": str(time_s)})
            path = scratch / f"{recipe.part}-{platform.architecture}.tar"
            with path.open("wb") as file:
                for chunk in engine.client.images.get(recipe.image).save(named=recipe.image):
                    file.write(chunk)
            _starts(engine, recipe)
            made[recipe.part] = path
    return made


def _starts(engine: ContainerEngine, recipe: Recipe) -> None:
    """Run the image with ``--help``, as restricted as in a strict cluster."""
    engine.client.containers.run(
        recipe.image,
        ["--help"],
        network_mode="none",
        read_only=True,
        cap_drop=["ALL"],
        remove=True,
    )


def published(
    archives: Sequence[tuple[Platform, Path]], scratch: Path, path: Path, version: str, time_s: int
) -> str:
    """Combine one image's architectures into the file ``path``; return the digest."""
    layout = Layout(scratch)
    manifests = []
    for platform, archive in archives:
        manifest = _image(layout, archive, platform, version, time_s)
        told = {"architecture": platform.architecture, "os": "linux"}
        manifests.append({**layout.add_json(manifest, MANIFEST), "platform": told})
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}
    whole = layout.add_json(index, INDEX)
    named = {**whole, "annotations": {"org.opencontainers.image.ref.name": version}}
    layout.archive({"schemaVersion": 2, "mediaType": INDEX, "manifests": [named]}, path)
    return str(whole["digest"])


def _image(
    layout: Layout, archive: Path, platform: Platform, version: str, time_s: int
) -> dict[str, Any]:
    with tarfile.open(archive) as saved:
        (told,) = json.load(_member(saved, "manifest.json"))
        config = json.load(_member(saved, told["Config"]))
        layers, plain = [], []
        for number, name in enumerate(told["Layers"]):
            descriptor, digest = _layer(layout, _member(saved, name), number > 0, time_s)
            layers.append(descriptor)
            plain.append(digest)
    created = datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    made = {
        "created": created,
        "architecture": platform.architecture,
        "os": "linux",
        "config": {
            **{key: config["config"][key] for key in KEPT if config["config"].get(key)},
            "Labels": {"org.opencontainers.image.version": version},
        },
        "rootfs": {"type": "layers", "diff_ids": plain},
        "history": _history(config["history"], created),
    }
    descriptor = layout.add_json(made, CONFIG)
    return {"schemaVersion": 2, "mediaType": MANIFEST, "config": descriptor, "layers": layers}


def _layer(
    layout: Layout, content: IO[bytes], above_base: bool, time_s: int
) -> tuple[dict[str, Any], str]:
    plain, packed = layout.folder / "layer", layout.folder / "layer.gz"
    try:
        with plain.open("w+b") as target:
            if above_base:
                rewrite(content, target, not_after(time_s))
            else:
                while chunk := content.read(1 << 20):
                    target.write(chunk)
            target.seek(0)
            digest = hashlib.file_digest(target, "sha256").hexdigest()
            target.seek(0)
            with packed.open("w+b") as compressed:
                write_gzip(target, compressed)
                compressed.seek(0)
                return layout.add(compressed, LAYER), f"sha256:{digest}"
    finally:
        plain.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)


def _history(told: Iterable[Mapping[str, Any]], created: str) -> list[dict[str, Any]]:
    kept = ("created_by", "empty_layer")
    return [{"created": created, **{key: one[key] for key in kept if one.get(key)}} for one in told]


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    found = archive.extractfile(name)
    assert found is not None, name
    return found


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
