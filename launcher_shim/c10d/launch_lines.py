# SPDX-License-Identifier: Apache-2.0
"""By which launch lines a stage was run: a container passes over only what it would run again.

Each member records a digest of its line beside the run's keys, before its torchrun starts, with
the container that it starts in. The list of nodes that ended the stage well names containers, too:
so what counts is what trained, and not what somebody asked for last. Who was in that world and died
before its workers were done passes over nothing: its work would be left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher_shim.c10d.rounds.records import Seat
from launcher_shim.c10d.stages import container_of
from launcher_shim.c10d.torch_keys import is_exit_barrier, round_key
from launcher_shim.c10d.values.cells import Cells
from launcher_shim.tcpstore import wire


def line_key(member: str) -> bytes:
    """The key, among those of the run, of the line that ``member`` has asked with last."""
    return wire.STAGE + member.encode()


def recorded(container: str, line: bytes) -> bytes:
    """Make the value: the digest ``line`` behind the container that asked."""
    return container.encode() + b" " + line


def was_run(
    line: bytes, member: str, frozen: Sequence[Seat], values: Mapping[str, bytes | None]
) -> bool:
    """Whether the world ``frozen``, which has ended well, was started with ``line``.

    ``values``: what stands at ``line_key``, by member. A member of that world is held to its own
    line; any other, as a pod that comes later, may have that of any of them.
    """
    ran: dict[str, bytes] = {}
    for seat in frozen:
        container, _, of_seat = (values.get(seat.member) or b"").partition(b" ")
        if container and container == container_of(seat.nonce).encode():
            ran[seat.member] = of_seat
    return line == ran[member] if member in ran else line in ran.values()


def was_done(seat: Seat, run_id: str, number: int, cells: Cells) -> bool:
    """Whether the workers of ``seat`` were done in round ``number`` of torch's ``run_id``.

    Its torchrun has added itself to the exit barrier then, which outlives its node record.
    """
    adder = f"{seat.member}.{seat.nonce}"
    for key in cells.existing():
        of_round = round_key(key, run_id) if is_exit_barrier(key) else None
        if of_round is not None and of_round[0] == number:
            added = cells.cell(key).addends.get(adder)
            if added is not None and added.value is not None:
                return True
    return False
