# SPDX-License-Identifier: Apache-2.0
"""Launch lines of a stage: a container passes over only a stage that it would run again.

Each member records a digest of its line beside the run's keys, before its torchrun starts, with the
container that it starts in, and keeps that of the container that has a place in the world: it may
be started again while the others are about to end the stage. The list of nodes that ended the stage
well names containers, too: so the lines that count are those that trained, not those that asked
last. A node of that world that died before its workers were done passes over nothing: its work
would be left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher_shim.c10d.rounds.records import Seat
from launcher_shim.c10d.stages import container_of
from launcher_shim.c10d.torch_keys import is_exit_barrier, round_key
from launcher_shim.c10d.values.cells import Cells
from launcher_shim.tcpstore import wire


def line_key(member: str) -> bytes:
    """Return the key, among those of the run, of the lines that ``member`` has asked with."""
    return wire.STAGE + member.encode()


def recorded(container: str, line: bytes, before: bytes = b"", placed: str = "") -> bytes:
    """Build the value at a member's key: the container that asked, and the digest ``line``.

    ``placed``: the container that has a place in the world; its line is kept from ``before``, the
    value so far.
    """
    lines = [container.encode() + b" " + line]
    kept = _lines(before).get(placed.encode())
    if kept is not None and placed != container:
        lines.append(placed.encode() + b" " + kept)
    return b"\n".join(lines)


def was_run(
    line: bytes, member: str, frozen: Sequence[Seat], values: Mapping[str, bytes | None]
) -> bool:
    """Return whether the world ``frozen``, which has ended well, was started with ``line``.

    ``values``: the values at ``line_key``, by member. A member of that world must have its own
    line; any other, such as a pod that comes later, may have the line of any of them.
    """
    ran: dict[str, bytes] = {}
    for seat in frozen:
        of_seat = _lines(values.get(seat.member)).get(container_of(seat.nonce).encode())
        if of_seat is not None:
            ran[seat.member] = of_seat
    return line == ran[member] if member in ran else line in ran.values()


def _lines(value: bytes | None) -> dict[bytes, bytes]:
    """Parse a value: the digest of each container's line, by the container's name."""
    parts = [one.partition(b" ") for one in (value or b"").split(b"\n")]
    return {container: line for container, _, line in parts if container}


def was_done(seat: Seat, run_id: str, number: int, cells: Cells) -> bool:
    """Return whether the workers of ``seat`` were done in round ``number`` of torch's ``run_id``.

    If so, its torchrun has added itself to the exit barrier, which outlives its node record.
    """
    adder = f"{seat.member}.{seat.nonce}"
    for key in cells.existing():
        of_round = round_key(key, run_id) if is_exit_barrier(key) else None
        if of_round is not None and of_round[0] == number:
            added = cells.cell(key).addends.get(adder)
            if added is not None and added.value is not None:
                return True
    return False
