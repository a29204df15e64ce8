# SPDX-License-Identifier: Apache-2.0
"""The lab's bridge and the interfaces attached to it."""

from __future__ import annotations

import ipaddress
import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from kubelab.errors import MachineUnfit
from kubelab.layout import BRIDGE, HOST_ADDRESS, NODES, SUBNET
from kubelab.processes import check


def exists() -> bool:
    """Return whether the bridge exists."""
    return Path(f"/sys/class/net/{BRIDGE}").exists()


DEFAULT_BITS = 8
"""Minimum prefix length of a conflicting route; shorter ones are defaults, as a VPN's 0.0.0.0/1."""


def require() -> None:
    """Raise MachineUnfit if the machine's own network overlaps with the lab's addresses."""
    routes = json.loads(check(["ip", "-4", "-json", "route", "show", "table", "all"]) or "[]")
    if taken := overlapping(routes):
        raise MachineUnfit(
            f"scripts/kubelab uses {SUBNET}, and this machine has {taken}: take that away, or use"
            " another machine."
        )


def overlapping(routes: Iterable[Mapping[str, object]]) -> str | None:
    """Find the first route or address that overlaps with the lab's range and is not on its bridge.

    ``routes``: the output of ``ip -json route``, which lists addresses as local routes.
    """
    for route in routes:
        told = str(route["dst"])
        if told == "default" or route.get("dev") == BRIDGE:
            continue
        taken = ipaddress.ip_network(told, strict=False)
        if (
            isinstance(taken, ipaddress.IPv4Network)
            and taken.prefixlen >= DEFAULT_BITS
            and taken.overlaps(ipaddress.IPv4Network(SUBNET))
        ):
            return f"{taken} by {route['dev']}" if "dev" in route else str(taken)
    return None


def make() -> None:
    """Create the bridge with the addresses of the machine and the nodes, or those missing."""
    if not exists():
        check(["ip", "link", "add", BRIDGE, "type", "bridge"])
    # Also for an existing bridge: its creator may have been killed before it had an address.
    addresses = [f"{HOST_ADDRESS}/{SUBNET.partition('/')[2]}"]
    for address in (*addresses, *(f"{node.address}/32" for node in NODES)):
        check(["ip", "addr", "replace", address, "dev", BRIDGE])
    check(["ip", "link", "set", BRIDGE, "up"])


def remove() -> None:
    """Remove the bridge and every interface that is still attached to it."""
    for name in ports():
        subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
    if exists():
        check(["ip", "link", "del", BRIDGE])


def ports() -> list[str]:
    """Return the host's ends of the veth pairs of pods."""
    brif = Path(f"/sys/class/net/{BRIDGE}/brif")
    return sorted(entry.name for entry in brif.iterdir()) if brif.exists() else []


def unplug(pids: Iterable[int]) -> list[str]:
    """Take down the interface of every pod that contains one of these processes; return them."""
    indexes = {
        int((Path("/sys/class/net") / name / "ifindex").read_text()): name for name in ports()
    }
    seen: set[str] = set()
    found: list[str] = []
    for pid in pids:
        try:
            namespace = str(Path(f"/proc/{pid}/ns/net").readlink())
        except OSError:
            continue
        if namespace in seen:
            continue
        seen.add(namespace)
        shown = subprocess.run(
            ["nsenter", "-n", "-t", str(pid), "ip", "-json", "link", "show", "dev", "eth0"],
            capture_output=True,
            text=True,
            check=False,
        )
        if shown.returncode == 0:
            name = indexes.get(json.loads(shown.stdout)[0].get("link_index", 0))
            if name is not None:
                check(["ip", "link", "set", name, "down"])
                found.append(name)
    return found
