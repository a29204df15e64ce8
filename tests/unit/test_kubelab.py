# SPDX-License-Identifier: Apache-2.0
"""What scripts/kubelab says where it cannot be, whose processes it ends, how it packs images."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import tarfile
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from tests.support.cluster import claim
from tests.support.cluster.lab import MADE_BY_TESTS, Kubelab

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


def test_an_apt_get_that_hangs_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kubelab import needs
    from kubelab.errors import LabError

    apt_get = tmp_path / "apt-get"
    apt_get.write_text("#!/bin/sh\nexec sleep 60\n")
    apt_get.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setitem(needs.APT_TIMEOUTS_S, "update", 0.1)
    with pytest.raises(
        LabError, match=r"^apt-get update has not ended within 0\.1 s\. Try again, or .* socat\.$"
    ) as it:
        needs.install(["socat"])
    # Not that of an unfit machine, where tests are skipped.
    assert it.value.status == 1


def test_a_bridge_that_was_made_in_part_gets_its_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kubelab import network

    done: list[str] = []
    monkeypatch.setattr(network, "exists", lambda: True)
    monkeypatch.setattr(network, "check", lambda argv: done.append(" ".join(argv)))
    network.make()
    addresses = ("10.213.0.1/16", "10.213.255.1/32", "10.213.255.2/32")
    assert done == [
        *(f"ip addr replace {address} dev muster-lab" for address in addresses),
        "ip link set muster-lab up",
    ]


def test_keys_that_were_made_in_part_are_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kubelab import control_plane
    from kubelab.errors import LabError

    def killed_while_it_writes(argv: list[str]) -> str:
        Path(argv[argv.index("-out") + 1]).write_text("-----BEGIN")
        if "-pubout" in argv:
            raise LabError("it was killed")
        return ""

    def writes(argv: list[str]) -> str:
        Path(argv[argv.index("-out") + 1]).write_text("whole")
        return ""

    monkeypatch.setattr(control_plane, "PKI", tmp_path)
    monkeypatch.setattr(control_plane, "KUBELET_CLIENT", tmp_path / "kubelet-client")
    monkeypatch.setattr(control_plane, "TOKENS", tmp_path / "tokens.csv")
    monkeypatch.setattr(control_plane, "check", killed_while_it_writes)
    with pytest.raises(LabError):
        control_plane.make_keys()
    monkeypatch.setattr(control_plane, "check", writes)
    control_plane.make_keys()
    for name in ("service-accounts.key", "service-accounts.pub", "kubelet-client.crt"):
        assert (tmp_path / name).read_text() == "whole"
    assert (tmp_path / "tokens.csv").stat().st_mode & 0o777 == 0o600
    token = (tmp_path / "tokens.csv").read_text()
    control_plane.make_keys()
    assert (tmp_path / "tokens.csv").read_text() == token
    assert token.endswith(",admin,admin,system:masters\n")


def test_preparing_starts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kubelab import __main__ as program
    from kubelab import images, lab, needs

    done: list[str] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(lab, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(lab, "STATE", tmp_path / "state")
    monkeypatch.setattr(needs, "require", lambda: done.append("packages"))
    monkeypatch.setattr(needs, "toolchain", lambda *_: tmp_path)
    monkeypatch.setattr(images, "directory", lambda: tmp_path)
    for image in ("pause.tar", "trainer-bookworm.tar", "etcd-3.6.16.tar"):
        (tmp_path / image).touch()
    assert program.main(["prepare"]) == 0
    assert done == ["packages"]
    assert not (tmp_path / "state").exists()


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


class FolderLab(Kubelab):
    """A cluster that is a folder only."""

    def __init__(self, state: Path, mark: Path) -> None:
        self.state = state
        self.mark = mark
        self.ended = 0

    def command(self, *arguments: str, timeout_s: float = 120.0) -> str:
        if arguments == ("up",):
            self.mark.touch()
            self.state.mkdir()
            return ""
        assert arguments == ("down",)
        shutil.rmtree(self.state, ignore_errors=True)
        self.mark.unlink()
        self.ended += 1
        return ""

    def left_behind(self) -> list[str]:
        return [str(self.state)] if self.state.exists() else []


@pytest.fixture
def folder_lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FolderLab:
    lab = FolderLab(tmp_path / "state", tmp_path / "made-by-tests")
    monkeypatch.setattr(claim, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(claim, "MADE_BY_TESTS", lab.mark)
    # This test keeps its own time.
    monkeypatch.setattr(signal, "setitimer", lambda which, seconds: (0.0, 0.0))
    return lab


def test_a_cluster_that_a_person_has_made_is_not_ended_by_tests(folder_lab: FolderLab) -> None:
    folder_lab.state.mkdir()
    with claim.claimed(folder_lab):
        pass
    assert folder_lab.ended == 0


def test_a_cluster_that_tests_have_made_is_ended_by_the_last_that_uses_it(
    folder_lab: FolderLab,
) -> None:
    first, second = (claim.claimed(folder_lab) for _ in range(2))
    first.__enter__()
    second.__enter__()
    folder_lab.command("up")
    first.__exit__(None, None, None)
    assert folder_lab.ended == 0
    second.__exit__(None, None, None)
    assert folder_lab.ended == 1


def test_a_cluster_of_a_session_that_was_killed_is_ended_by_the_next(
    folder_lab: FolderLab,
) -> None:
    folder_lab.command("up")
    with claim.claimed(folder_lab):
        assert folder_lab.ended == 1
        folder_lab.command("up")
    assert folder_lab.ended == 2


def test_a_cluster_that_was_killed_before_it_was_there_is_ended_too(folder_lab: FolderLab) -> None:
    folder_lab.mark.touch()
    with claim.claimed(folder_lab):
        assert folder_lab.ended == 1


def test_tests_and_the_cluster_mean_the_same_mark() -> None:
    from kubelab import layout

    assert MADE_BY_TESTS == layout.MADE_BY_TESTS


@pytest.fixture
def marked_lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The mark of a lab of which nothing but its folder is ever made or ended."""
    from kubelab import cgroups, control_plane, lab, network

    mark = tmp_path / "made-by-tests"
    monkeypatch.setattr(lab, "STATE", tmp_path / "state")
    monkeypatch.setattr(lab, "_FOUND", tmp_path / "state" / "found.json")
    monkeypatch.setattr(lab, "MADE_BY_TESTS", mark)
    monkeypatch.setattr(lab, "NODES", ())
    monkeypatch.setattr(control_plane, "PARTS", ())
    monkeypatch.setattr(lab, "prepare", lambda: lab.Prepared(tmp_path, tmp_path, []))
    monkeypatch.setattr(lab, "status", lambda: lab.Status({}, []))
    monkeypatch.setattr(cgroups, "kill_all", lambda name: None)
    monkeypatch.setattr(cgroups, "remove", lambda: None)
    monkeypatch.setattr(network, "remove", lambda: None)
    return mark


def test_a_lab_is_the_tests_own_until_a_person_brings_it_up(
    monkeypatch: pytest.MonkeyPatch, marked_lab: Path
) -> None:
    from kubelab import lab

    monkeypatch.setenv("KUBELAB_FOR_TESTS", "1")
    lab.up()
    assert marked_lab.exists()
    (marked_lab.parent / "state").mkdir()
    lab.up()
    assert marked_lab.exists()
    monkeypatch.delenv("KUBELAB_FOR_TESTS")
    lab.up()
    assert not marked_lab.exists()
    monkeypatch.setenv("KUBELAB_FOR_TESTS", "1")
    lab.up()
    assert not marked_lab.exists()


def test_the_mark_goes_after_the_lab(monkeypatch: pytest.MonkeyPatch, marked_lab: Path) -> None:
    from kubelab import lab

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    marked_lab.touch()
    (marked_lab.parent / "state").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            lab.down()
    assert marked_lab.exists()
    lab.down()
    assert not marked_lab.exists()
