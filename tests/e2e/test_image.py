# SPDX-License-Identifier: Apache-2.0
"""The sidecar's image, built from ``Dockerfile.sidecar`` and run as a strict cluster runs it."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar_image.engine import ROOT, ContainerEngine
from sidecar_image.image import IMAGE, context_names, sidecar_archive
from tests.support.ports import free_ports
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.container, pytest.mark.etcd, pytest.mark.timeout(1200)]

ABOVE_BASE_MAX_BYTES = 80_000_000
MEMORY_MAX_KIB = 60 * 2**10
PATIENCE_S = 120.0
PACKAGES = ("agent", "console", "controller", "injection", "launcher_shim", "muster", "rdzv")

RESTRICTED = {
    "network_mode": "host",
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges"],
}
"""What the Pod Security Standard "restricted" and a read-only root come to."""


@pytest.fixture(scope="module")
def engine() -> Iterator[ContainerEngine]:
    archive = sidecar_archive()
    with ContainerEngine() as engine:
        with archive.open("rb") as file:
            engine.client.images.load(file)
        yield engine


@pytest.fixture(scope="module")
def store() -> Iterator[EtcdCluster]:
    with EtcdCluster(1) as cluster:
        yield cluster


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """What a kubelet makes of an emptyDir: root's, and anybody may write to it."""
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(0o777)
    return path


class Started:
    """A container of the image."""

    def __init__(self, container: Any, http_port: int) -> None:
        self.container = container
        self._ready = f"http://127.0.0.1:{http_port}/readyz"

    def until_ready(self) -> None:
        """Wait for ``/readyz``."""
        wait_until(self._is_ready, PATIENCE_S, "it is ready", lambda: str(self.lines()))

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self._ready, timeout=5) as answer:
                return int(answer.status) == 200
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass  # it does not listen yet
        return False

    def lines(self) -> list[dict[str, Any]]:
        """What it has logged."""
        text = self.container.logs().decode()
        return [json.loads(line) for line in text.splitlines()]

    def ended(self) -> int:
        """Wait for the exit status."""
        return int(self.container.wait(timeout=PATIENCE_S)["StatusCode"])

    def run(self, *command: str) -> str:
        """Run a command in it, as a hook of the kubelet's does."""
        status, out = self.container.exec_run(list(command))
        assert status == 0, out
        return str(out.decode())


@contextmanager
def sidecar(
    engine: ContainerEngine, store: str, run_dir: Path, **environ: str
) -> Iterator[Started]:
    http_port, c10d_port = free_ports(2)
    container = engine.client.containers.create(
        IMAGE,
        environment={
            "MUSTER_JOB": run_dir.parent.name.replace("_", "-").lower(),
            "MUSTER_MEMBER": "pod-0",
            "MUSTER_MIN": "1",
            "MUSTER_MAX": "2",
            "MUSTER_ADDRESS": "127.0.0.1",
            "MUSTER_ETCD_ENDPOINTS": store,
            "MUSTER_HTTP_PORT": str(http_port),
            "MUSTER_C10D_PORT": str(c10d_port),
            **environ,
        },
        volumes=[f"{run_dir}:/var/run/muster"],
        **RESTRICTED,
    )
    try:
        container.start()
        yield Started(container, http_port)
    finally:
        container.remove(force=True)


# --- what is in it ---


def test_it_adds_little_to_its_base(engine: ContainerEngine) -> None:
    layers = engine.client.images.get(IMAGE).history()
    above_base = sum(layer["Size"] for layer in layers[:-1])
    assert 0 < above_base <= ABOVE_BASE_MAX_BYTES


def test_it_names_a_user_that_is_seen_not_to_be_root_and_its_first_process(
    engine: ContainerEngine,
) -> None:
    config = engine.client.images.get(IMAGE).attrs["Config"]
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["muster", "agent"]
    assert not config["Cmd"]


def test_it_holds_every_module_and_nothing_else_of_the_repository(engine: ContainerEngine) -> None:
    find = "find muster -type f ! -name '*.pyc'"
    found = engine.client.containers.run(
        IMAGE,
        entrypoint=["sh", "-ec"],
        command=[f"test ! -e /build; cd /opt/muster/lib/python3*/site-packages; {find}"],
        remove=True,
    )
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    names = {name for name in tracked.stdout.split() if not name.endswith(".proto")}
    wanted = {name if name.startswith("muster/") else f"muster/_program/{name}" for name in names}
    assert set(found.decode().split()) == wanted


def test_the_build_is_given_nothing_that_it_does_not_need() -> None:
    allowed = {*PACKAGES, "pyproject.toml", "setup.py", "README.md", "LICENSE", "scripts"}
    allowed |= {"Dockerfile.sidecar", ".dockerignore"}  # the SDK sends them always
    names = context_names()
    assert {name.partition("/")[0] for name in names} == allowed
    assert not [name for name in names if "__pycache__" in name or "/." in name]


def test_neither_its_history_nor_its_settings_tell_of_the_machine_that_built_it(
    engine: ContainerEngine,
) -> None:
    image = engine.client.images.get(IMAGE)
    told = json.dumps([image.attrs["Config"], image.history()])
    assert sorted(line.partition("=")[0] for line in image.attrs["Config"]["Env"]) == [
        "PATH",
        "PYTHONDONTWRITEBYTECODE",
    ]
    settings = [
        value
        for name, value in os.environ.items()
        if name.upper().startswith("PIP_") or name.upper().endswith(("_PROXY", "_BUNDLE"))
        if len(value) > 3
    ]
    assert not [value for value in settings if value in told]


# --- how it runs ---


def test_on_a_read_only_root_without_any_capability_it_is_killed_started_again_and_ended_well(
    engine: ContainerEngine, store: EtcdCluster, run_dir: Path
) -> None:
    with sidecar(engine, store.endpoints[0], run_dir) as started:
        started.until_ready()
        status = started.run("cat", "/proc/1/status")
        command = started.run("cat", "/proc/1/cmdline").split("\0")
        started.container.kill("SIGKILL")
        assert started.ended() == 137
        started.container.start()
        started.until_ready()
        started.container.kill("SIGTERM")
        assert started.ended() == 0
        lines = started.lines()
    assert [line["fresh"] for line in lines if line["event"] == "start"] == [True, False]
    assert lines[-1]["event"] == "stopped"
    assert command[1:3] == ["/opt/muster/bin/muster", "agent"]
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["65532"] * 4
    assert (fields["CapEff"], fields["NoNewPrivs"]) == ("0" * 16, "1")
    assert (run_dir / "env").stat().st_uid == 65532
    assert int(fields["VmRSS"].removesuffix("kB")) <= MEMORY_MAX_KIB


@pytest.mark.parametrize(
    ("environ", "status", "named"),
    [
        ({"MUSTER_MIN": "none"}, 2, "MUSTER_MIN"),
        ({"MUSTER_START_TIMEOUT": "1"}, 69, "MUSTER_ETCD_ENDPOINTS"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_a_status(
    engine: ContainerEngine, run_dir: Path, environ: dict[str, str], status: int, named: str
) -> None:
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    with sidecar(engine, nobody, run_dir, **environ) as started:
        assert started.ended() == status
        text = started.container.logs().decode()
    assert named in text
    assert "Traceback" not in text
    if status == 2:
        assert len(text.splitlines()) == 1
