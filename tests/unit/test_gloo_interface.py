# SPDX-License-Identifier: Apache-2.0
"""Which network interface Gloo is given, if any."""

from __future__ import annotations

import socket

import pytest

from launcher_shim.pod import container
from launcher_shim.pod.container import choose_interface, needed_interface, read_interfaces

HERE = {
    "127.0.0.1": "lo",
    "::1": "lo",
    "10.0.0.2": "eth0",
    "fd00::2": "eth0",
    "172.17.0.1": "docker0",
}


@pytest.mark.parametrize(
    ("address", "bound", "interface"),
    [
        ("10.0.0.2", None, "eth0"),
        ("10.0.0.2", "127.0.0.1", "eth0"),
        ("10.0.0.2", "127.0.1.1", "eth0"),  # in 127/8, and no interface has it
        ("10.0.0.2", "172.17.0.1", "eth0"),
        ("10.0.0.2", "10.0.0.2", None),
        ("10.0.0.2", "fd00::2", None),  # two families of one interface
        ("fd00::2", None, "eth0"),
        ("fd00:0::2", "::1", "eth0"),
        ("fd00::2", "FD00::2", None),
    ],
)
def test_gloo_is_given_the_pods_interface_if_the_name_leads_elsewhere(
    address: str, bound: str | None, interface: str | None
) -> None:
    needed = choose_interface(address, "node-a", bound, HERE)
    assert (needed and needed[0]) == interface


def test_the_reason_names_what_gloo_would_use() -> None:
    nowhere, elsewhere = (
        choose_interface("10.0.0.2", "node-a", one, HERE) for one in (None, "127.0.1.1")
    )
    assert nowhere is not None
    assert elsewhere is not None
    assert "the host name node-a does not resolve to 10.0.0.2" in nowhere[1]
    assert "the host name node-a resolves to 127.0.1.1, not to 10.0.0.2" in elsewhere[1]


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "10.0.0.2"),  # the user's counts
        ({}, "127.0.0.1"),
        ({}, "::1"),
        ({}, "192.0.2.77"),  # no interface has it
    ],
)
def test_nothing_is_given_where_it_is_not_needed(
    environ: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "read_interfaces", lambda: HERE)
    monkeypatch.setattr(container, "_bound_by", lambda name: None)
    assert needed_interface(environ, address) is None


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(OSError, match="illegal IP address"):
        needed_interface({}, "node-a.example")


def test_the_kernel_names_the_interfaces() -> None:
    found = read_interfaces()
    names = {name for _, name in socket.if_nameindex()}
    assert {*found.values()} <= names
    assert found["127.0.0.1"] in names
