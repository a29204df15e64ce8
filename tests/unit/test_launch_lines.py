# SPDX-License-Identifier: Apache-2.0
"""By which launch lines a stage that has ended well was run."""

from __future__ import annotations

import pytest

from launcher_shim.c10d.launchers import line_key, recorded, was_run
from launcher_shim.c10d.rounds.records import Seat

ONE, TWO, AGAIN = "1" * 16, "2" * 16, "3" * 16
FROZEN = (Seat("w-0", ONE + "c" * 16, 1), Seat("w-1", TWO + "c" * 16, 1))


@pytest.mark.parametrize(
    ("line", "member", "container", "was"),
    [
        (b"zero", "w-0", ONE, True),
        (b"one", "w-0", ONE, False),
        (b"zero", "w-2", ONE, True),
        (b"one", "w-2", ONE, True),
        (b"two", "w-2", ONE, False),
        # What w-0 asked with in a container that was started after the stage had ended:
        (b"zero", "w-0", AGAIN, False),
        (b"one", "w-0", AGAIN, True),
        (b"zero", "w-2", AGAIN, False),
    ],
)
def test_the_line_is_that_of_who_trained(
    line: bytes, member: str, container: str, was: bool
) -> None:
    values = {"w-0": recorded(container, b"zero"), "w-1": recorded(TWO, b"one")}
    assert was_run(line, member, FROZEN, values) == was


def test_what_nobody_recorded_was_not_run() -> None:
    assert not was_run(b"", "w-0", FROZEN, {"w-0": None, "w-1": b""})
    assert not was_run(b"", "w-0", (Seat("w-0", "c" * 16, 1),), {"w-0": recorded("", b"")})
    assert len({line_key(seat.member) for seat in FROZEN}) == 2
