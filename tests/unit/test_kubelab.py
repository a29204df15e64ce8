# SPDX-License-Identifier: Apache-2.0
"""What scripts/kubelab says where it cannot be, whose processes it ends, how it packs images."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tarfile
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

TOOLCHAIN = Path(__file__).parents[2] / "scripts" / "toolchain"


@pytest.fixture(autouse=True)
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(TOOLCHAIN))
    yield
    sys.path.remove(str(TOOLCHAIN))


def test_nobody_but_root_is_told_so_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from kubelab import needs
    from kubelab.errors import MachineUnfit

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(
        MachineUnfit, match=r"^scripts/kubelab needs root, .*: run it as root"
    ) as it:
        needs.require()
    assert it.value.status == 69


@pytest.mark.parametrize("arguments", [["status"], ["kubectl", "get", "nodes"]])
def test_what_only_looks_at_the_lab_needs_root_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str]
) -> None:
    from kubelab import __main__ as program
    from kubelab.errors import MachineUnfit

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(program, "PROGRAMS", tmp_path / "programs")
    with pytest.raises(MachineUnfit, match="run it as root"):
        program.main(arguments)


def test_a_package_that_cannot_be_installed_is_said_with_the_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kubelab import needs
    from kubelab.errors import MachineUnfit

    apt_get = tmp_path / "apt-get"
    apt_get.write_text("#!/bin/sh\necho Reading >&2\necho 'E: no network' >&2\nexit 100\n")
    apt_get.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(MachineUnfit, match=r"^apt-get update failed: E: no network\. Install"):
        needs.install(["socat"])


def test_a_machine_without_the_cgroups_is_told_which(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kubelab import cgroups
    from kubelab.errors import MachineUnfit

    for name in cgroups.CONTROLLERS[1:]:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(cgroups, "CGROUP_ROOT", tmp_path)
    with pytest.raises(MachineUnfit, match="there is none for cpu: use a machine"):
        cgroups.require()


def test_a_pid_that_was_given_out_again_is_nobodys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kubelab import processes

    monkeypatch.setattr(processes, "PIDS", tmp_path)
    ticks = processes.started_ticks(os.getpid())
    assert ticks is not None
    (tmp_path / "ours").write_text(f"{os.getpid()} {ticks}\n")
    (tmp_path / "another").write_text(f"{os.getpid()} {ticks - 1}\n")
    assert processes.pid_of("ours") == os.getpid()
    assert processes.pid_of("another") is None
    processes.stop("another")
    assert not (tmp_path / "another").exists()


def test_an_image_names_its_layers_by_what_is_in_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kubelab import images

    layer = tmp_path / "layer"
    layer.write_bytes(b"not looked into")
    images.pack([layer], "lab/one:1", tmp_path / "one.tar", {"Cmd": ["sh"]})
    with tarfile.open(tmp_path / "one.tar") as archive:
        (manifest,) = json.load(archive.extractfile("manifest.json"))  # type: ignore[arg-type]
        config = json.load(archive.extractfile(manifest["Config"]))  # type: ignore[arg-type]
    assert manifest["RepoTags"] == ["lab/one:1"]
    digest = hashlib.sha256(b"not looked into").hexdigest()
    assert config["rootfs"]["diff_ids"] == [f"sha256:{digest}"]
    assert config["config"] == {"Cmd": ["sh"]}


@pytest.mark.parametrize(
    ("route", "said"),
    [
        ({"dst": "default", "gateway": "192.0.2.1", "dev": "eth0"}, None),
        ({"dst": "0.0.0.0/1", "dev": "tun0"}, None),
        ({"dst": "10.213.0.0/16", "dev": "muster-lab"}, None),
        ({"dst": "10.88.0.0/16", "dev": "podman0"}, None),
        ({"dst": "fd00::/64", "dev": "eth0"}, None),
        ({"dst": "10.0.0.0/8", "dev": "eth0"}, "10.0.0.0/8 by eth0"),
        ({"type": "local", "dst": "10.213.7.1", "dev": "eth1"}, "10.213.7.1/32 by eth1"),
        ({"type": "blackhole", "dst": "10.213.0.0/17"}, "10.213.0.0/17"),
    ],
)
def test_a_machine_that_has_its_addresses_already_is_told_which(
    route: dict[str, str], said: str | None
) -> None:
    from kubelab import network

    assert network.overlapping([route]) == said


def test_its_addresses_are_all_of_its_subnet() -> None:
    from kubelab.layout import HOST_ADDRESS, NODES, SUBNET

    pods = [address for node in NODES for address in (node.first_pod, node.last_pod)]
    for address in (HOST_ADDRESS, *pods, *(node.address for node in NODES)):
        assert ip_address(address) in ip_network(SUBNET)


def test_kubectl_of_a_lab_that_is_down_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kubelab import __main__ as program
    from kubelab.errors import LabError

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(program, "PROGRAMS", tmp_path / "programs")
    with pytest.raises(LabError, match=r"^the lab is not up: scripts/kubelab up$"):
        program.main(["kubectl", "get", "nodes"])


def test_a_command_that_takes_too_long_is_said_in_one_sentence() -> None:
    from kubelab import processes
    from kubelab.errors import LabError

    with pytest.raises(LabError, match=r"^sleep 60 has not ended within 0.1 s$"):
        processes.check(["sleep", "60"], timeout_s=0.1)


def test_an_archive_that_cannot_be_loaded_leaves_no_ctr_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kubelab import images
    from kubelab.errors import LabError

    ctr = tmp_path / "ctr"
    ctr.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/$$.pid\nexec sleep 60\n")
    ctr.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(images, "LOAD_TIMEOUT_S", 0.5)
    with pytest.raises(LabError, match=r"one.tar cannot be loaded within 0.5 s"):
        images.load([tmp_path / "one.tar"])
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_a_process_that_outlives_sigkill_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kubelab import processes
    from kubelab.errors import LabError

    monkeypatch.setattr(processes, "PIDS", tmp_path)
    monkeypatch.setattr(processes, "KILL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(processes, "signal_process", lambda pid, number: None)
    ticks = processes.started_ticks(os.getpid())
    (tmp_path / "ours").write_text(f"{os.getpid()} {ticks}\n")
    with pytest.raises(LabError, match=f"^ours \\(process {os.getpid()}\\) outlives SIGKILL$"):
        processes.stop("ours", timeout_s=0.1)


@pytest.mark.parametrize(
    ("systemd", "packages", "stopped"),
    [
        (True, ["containerd", "runc"], ["systemctl disable --now containerd"]),
        (True, ["runc"], []),
        (False, ["containerd"], []),
    ],
)
def test_a_containerd_that_it_installs_is_no_service_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    systemd: bool,
    packages: list[str],
    stopped: list[str],
) -> None:
    from kubelab import needs

    for name in ("apt-get", "systemctl"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{tmp_path}/said\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(needs, "SYSTEMD", tmp_path if systemd else tmp_path / "none")
    needs.install(packages)
    said = (tmp_path / "said").read_text().splitlines()
    assert [line for line in said if line.startswith("systemctl")] == stopped
