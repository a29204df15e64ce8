# SPDX-License-Identifier: Apache-2.0
"""A warm rank's wait for rank 0 to listen."""

from __future__ import annotations

import socket

import pytest

from launcher_shim.pod.warm.worker import RANK_0_LOOK_S, RANK_0_WAIT_S, await_rank_0


class Rank0:
    """Listens at a look; time is what was slept."""

    def __init__(self, listens_at: int, family: socket.AddressFamily = socket.AF_INET) -> None:
        self.looks = 0
        self._at = listens_at
        address = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.bind((address, 0))
        self.environ = {
            "RANK": "3",
            "MASTER_ADDR": address,
            "MASTER_PORT": str(self.socket.getsockname()[1]),
        }

    def sleep(self, seconds: float) -> None:
        assert seconds == RANK_0_LOOK_S
        self.looks += 1
        if self.looks == self._at:
            self.socket.listen()

    def clock(self) -> float:
        return self.looks * RANK_0_LOOK_S


def wait_for(rank_0: Rank0, **environ: str) -> int:
    """How often it looked in vain."""
    with rank_0.socket:
        await_rank_0({**rank_0.environ, **environ}, rank_0.clock, rank_0.sleep)
    return rank_0.looks


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_rank_goes_on_as_soon_as_rank_0_listens(family: socket.AddressFamily) -> None:
    assert wait_for(Rank0(3, family)) == 3


def test_it_goes_on_without_a_rank_0_that_does_not_listen_in_time() -> None:
    assert wait_for(Rank0(-1)) == pytest.approx(RANK_0_WAIT_S / RANK_0_LOOK_S, abs=1)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0"},
        {"MASTER_ADDR": ""},
        {"MASTER_ADDR": "localhost"},
        {"MASTER_PORT": "none"},
        {"MASTER_PORT": ""},
    ],
)
def test_it_waits_for_nothing(environ: dict[str, str]) -> None:
    """Rank 0 itself, and whoever was given no address: to look a name up may take seconds."""
    assert wait_for(Rank0(3), **environ) == 0
