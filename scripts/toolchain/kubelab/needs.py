# SPDX-License-Identifier: Apache-2.0
"""The lab's requirements on the machine, and the installation of those that are missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from kubelab import cgroups, network
from kubelab.errors import LabError, MachineUnfit
from kubelab.processes import check

PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "conntrack": "conntrack",
    "socat": "socat",
    "ethtool": "ethtool",
    "openssl": "openssl",
    "nsenter": "util-linux",
}
"""Programs and their Debian packages; the kubelet itself looks for three of them."""

CNI_PLUGINS = Path("/usr/lib/cni")
SYSTEMD = Path("/run/systemd/system")
"""The folder that exists if systemd runs the machine."""

APT_GET = (
    *("apt-get", "-q", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::Retries=3"),
    *("-o", "DPkg::Lock::Timeout=300"),
)
"""Retries a mirror that hangs, and waits for another apt-get."""

APT_TIMEOUTS_S = {"update": 300.0, "install": 600.0}
APT_END_TIMEOUT_S = 30.0
"""Timeout after SIGTERM: apt-get may leave an incomplete package if it is killed at once."""


def say(text: str) -> None:
    """Print a message for the user to stderr."""
    print(f"kubelab: {text}", file=sys.stderr, flush=True)


def require_root() -> None:
    """Raise MachineUnfit unless the user is root."""
    if os.geteuid() != 0:
        raise MachineUnfit(
            "scripts/kubelab needs root, for it makes network namespaces, mounts and cgroups:"
            " run it as root, best on a machine that is yours alone."
        )


def require() -> None:
    """Install missing Debian packages; raise MachineUnfit if the machine cannot run the lab."""
    require_root()
    cgroups.require()
    packages = missing_packages()
    if packages:
        install(packages)
    network.require()


def missing_packages() -> list[str]:
    """Return the Debian packages that have to be installed."""
    packages = {package for program, package in PROGRAMS.items() if not shutil.which(program)}
    if not (CNI_PLUGINS / "bridge").exists():
        packages.add("containernetworking-plugins")
    return sorted(packages)


def install(packages: list[str]) -> None:
    """Install Debian packages, which stay; a containerd among them does not become a service.

    Raises MachineUnfit if they cannot be installed, and LabError if that takes too long.
    """
    is_new = "containerd" in packages and not shutil.which("containerd")
    names = " ".join(packages)
    if not shutil.which("apt-get"):
        raise MachineUnfit(f"scripts/kubelab needs these Debian packages, install them: {names}.")
    say(f"installing {names} (up to 100 MB to download, half a minute, once)")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        timeout_s = APT_TIMEOUTS_S[arguments[0]]
        with subprocess.Popen(
            [*APT_GET, *arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as apt_get:
            try:
                said = apt_get.communicate(timeout=timeout_s)[1]
            except subprocess.TimeoutExpired as error:
                _end(apt_get)
                raise LabError(
                    f"apt-get {arguments[0]} has not ended within {timeout_s:g} s."
                    f" Try again, or install these Debian packages yourself: {names}."
                ) from error
        if apt_get.returncode != 0:
            last_words = " ".join(said.strip().splitlines()[-1:])
            raise MachineUnfit(
                f"apt-get {arguments[0]} failed: {last_words.rstrip('.')}."
                f" Install these Debian packages yourself: {names}."
            )
    if is_new and SYSTEMD.is_dir():
        # The package enables and starts a service for the machine, which the lab does not use.
        check(["systemctl", "disable", "--now", "containerd"])


def _end(apt_get: subprocess.Popen[str]) -> None:
    apt_get.terminate()
    try:
        apt_get.wait(APT_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        apt_get.kill()


def programs(what: str = "cluster") -> Path:
    """Return the folder of the programs built from Go modules; builds them if missing."""
    return toolchain("kubelab-programs", what)


def toolchain(script: str, *arguments: str) -> Path:
    """Run a script of scripts/toolchain and return the path that it prints.

    Raises LabError if it fails; it prints the reason itself. MachineUnfit: not on this machine.
    """
    path = Path(__file__).parent.parent / script
    done = subprocess.run([str(path), *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == MachineUnfit.status:
        raise MachineUnfit(f"scripts/toolchain/{script} cannot do its work on this machine.")
    if done.returncode != 0:
        raise LabError(f"scripts/toolchain/{script} failed; it says why above.")
    return Path(done.stdout.strip())
