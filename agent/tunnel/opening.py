# SPDX-License-Identifier: Apache-2.0
"""The first frame of a tunnel connection: which command it is about, and on which host."""

from __future__ import annotations

import asyncio

from launcher_shim.horovod.exec.frames import (
    ABANDON,
    HEAD_SIZE,
    Attaching,
    ExecFrameError,
    Frame,
    read_attaching,
    read_head,
)
from rdzv.dataclass import dataclass
from rdzv.errors import LauncherError

OPENING_TIMEOUT_S = 10.0
OPENING_MAX = 1024
"""Longest body of a first frame, in bytes."""


class OpeningError(LauncherError):
    """A missing or invalid first frame; one sentence why."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The first frame, to be passed on unchanged, and what it says."""

    attaching: Attaching
    abandons: bool
    frame: bytes


async def read_opening(reader: asyncio.StreamReader) -> Opening:
    """Read the first frame; raise ``OpeningError``, or ``OSError`` if the connection breaks."""
    try:
        async with asyncio.timeout(OPENING_TIMEOUT_S):
            head = await reader.readexactly(HEAD_SIZE)
            kind, length, number = read_head(head)
            if length > OPENING_MAX:
                raise OpeningError(f"its first frame has {length} bytes")
            body = await reader.readexactly(length)
        attaching = read_attaching(Frame(kind, body, number))
    except TimeoutError as error:
        raise OpeningError("no first frame came in time") from error
    except asyncio.IncompleteReadError as error:
        raise OpeningError("it ended before its first frame") from error
    except ExecFrameError as error:
        raise OpeningError(str(error)) from error
    return Opening(attaching, kind == ABANDON, head + body)
