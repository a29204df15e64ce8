# SPDX-License-Identifier: Apache-2.0
"""One port of the loopback, in both address families."""

from __future__ import annotations

import errno
import socket

import pytest

from launcher_shim.rundir.layout import bind_loopback


def test_a_port_is_chosen_that_both_families_have_free() -> None:
    bound = bind_loopback(0)
    try:
        assert len({one.getsockname()[1] for one in bound}) == 1
        assert bound[0].family == socket.AF_INET
    finally:
        for one in bound:
            one.close()


@pytest.mark.parametrize("taken", [0, -1], ids=["127.0.0.1", "::1 where the machine has it"])
def test_a_taken_port_is_named_with_its_address(taken: int) -> None:
    bound = bind_loopback(0)
    bound[taken].listen()
    address, port = bound[taken].getsockname()[:2]
    for one in bound:
        if one is not bound[taken]:
            one.close()
    try:
        with pytest.raises(OSError, match="in use") as raised:
            bind_loopback(port)
    finally:
        bound[taken].close()
    assert (raised.value.errno, raised.value.filename) == (errno.EADDRINUSE, address)
