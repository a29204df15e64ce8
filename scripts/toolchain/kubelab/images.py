# SPDX-License-Identifier: Apache-2.0
"""The lab's images, built here: a root folder becomes a docker archive, which containerd loads."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from kubelab.errors import LabError
from kubelab.layout import ETCD_IMAGE, NODES, PAUSE_IMAGE, TRAINER_IMAGE, cache
from kubelab.needs import toolchain
from kubelab.processes import check

_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

LOAD_TIMEOUT_S = 300.0


def directory() -> Path:
    """Return the folder of the archives."""
    return cache() / "kubelab-images"


def pause(programs: Path) -> Path:
    """Return the archive of the image that holds a pod's namespaces; builds it if missing."""
    archive = directory() / "pause.tar"
    if not archive.exists():
        with tempfile.TemporaryDirectory() as root:
            shutil.copy(programs / "pause", root)
            pack_root(Path(root), PAUSE_IMAGE, archive, {"Entrypoint": ["/pause"], "User": "65535"})
    return archive


def etcd(binaries: Path, etcdutl: Path) -> Path:
    """Return the archive of the etcd image; builds it if missing.

    The image has etcd, etcdctl and etcdutl and nothing else, as etcd's own.
    """
    archive = directory() / f"etcd-{ETCD_IMAGE.partition(':')[2]}-of-3.tar"
    if not archive.exists():
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            (root / "usr/local/bin").mkdir(parents=True)
            (root / "tmp").mkdir(mode=0o777)
            for program in (binaries / "etcd", binaries / "etcdctl", etcdutl / "etcdutl"):
                shutil.copy(program, root / "usr/local/bin")
            config = {"Entrypoint": ["/usr/local/bin/etcd"], "Env": [_PATH]}
            pack_root(root, ETCD_IMAGE, archive, config)
    return archive


def trainer() -> Path:
    """Return the archive of the trainer image; builds it if missing.

    It is Debian bookworm with Python, for training containers: torch is mounted, not packed.
    """
    archive = directory() / "trainer-bookworm.tar"
    if not archive.exists():
        with tempfile.TemporaryDirectory() as folder:
            # Any user of a pod needs access to what is mounted below /root.
            (Path(folder) / "root").mkdir()
            (Path(folder) / "root").chmod(0o755)
            layers = [toolchain("container-base"), _layer(Path(folder))]
            config = {"Env": [_PATH], "Cmd": ["bash"]}
            pack(layers, TRAINER_IMAGE, archive, config)
            layers[1].unlink()
    return archive


def pack_root(root: Path, name: str, archive: Path, config: Mapping[str, object]) -> None:
    """Build an image from a root folder."""
    layer = _layer(root)
    pack([layer], name, archive, config)
    layer.unlink()


def _layer(root: Path) -> Path:
    directory().mkdir(parents=True, exist_ok=True)
    layer = directory() / f"layer-{os.getpid()}.part"
    check(["tar", "--numeric-owner", "-C", str(root), "-cf", str(layer), "."])
    return layer


def pack(layers: Sequence[Path], name: str, archive: Path, config: Mapping[str, object]) -> None:
    """Build a docker archive from layers, each a plain tar."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    aside = archive.with_name(f"{archive.name}.{os.getpid()}.part")
    digests = []
    for layer in layers:
        with layer.open("rb") as file:
            digests.append(f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}")
    image = json.dumps(
        {
            "architecture": "amd64" if os.uname().machine == "x86_64" else "arm64",
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": digests},
        }
    ).encode()
    names = [f"layer-{number}.tar" for number in range(len(layers))]
    manifest = [{"Config": "image.json", "RepoTags": [name], "Layers": names}]
    with tarfile.open(aside, "w") as tar:
        for layer, member in zip(layers, names, strict=True):
            tar.add(layer, member)
        for member, content in (
            ("image.json", image),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    aside.replace(archive)


def load(archives: Sequence[Path]) -> None:
    """Load archives into both nodes concurrently."""
    for archive in archives:
        loading = [
            subprocess.Popen(
                [
                    *("ctr", "-a", str(node.containerd_socket), "-n", "k8s.io"),
                    *("images", "import", str(archive)),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for node in NODES
        ]
        try:
            for process in loading:
                said, _ = process.communicate(timeout=LOAD_TIMEOUT_S)
                if process.returncode != 0:
                    words = " ".join(said.strip().splitlines()[-1:])
                    raise LabError(f"{archive} cannot be loaded: {words}")
        except subprocess.TimeoutExpired as error:
            raise LabError(f"{archive} cannot be loaded within {LOAD_TIMEOUT_S:g} s") from error
        finally:
            for process in loading:
                process.kill()
                process.communicate()
