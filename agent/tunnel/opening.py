# SPDX-License-Identifier: Apache-2.0
"""The first frame of what comes through the tunnel: which command it is of, and for which host."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from launcher_shim.horovod.exec.attaching import Attaching, read_attaching
from launcher_shim.horovod.exec.frames import ABANDON, HEAD_SIZE, ExecFrameError, Frame, read_head
from rdzv.errors import LauncherError

OPENING_TIMEOUT_S = 10.0
OPENING_MAX = 1024
"""Longest body in bytes."""


class OpeningError(LauncherError):
    """What came is no first frame: one sentence why."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The first frame, to be passed on as it is, and what it says."""

    attaching: Attaching
    abandons: bool
    frame: bytes


async def read_opening(reader: asyncio.StreamReader) -> Opening:
    """Read one; raises ``OpeningError``, or ``OSError`` if the connection breaks."""
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
