# SPDX-License-Identifier: Apache-2.0
"""The first frame of what comes through the tunnel: which host it is for."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from launcher_shim.horovod.exec.frames import BODY_MAX, HEAD_SIZE, START, ExecFrameError, read_head
from rdzv.errors import LauncherError

OPENING_TIMEOUT_S = 10.0


class OpeningError(LauncherError):
    """What came is no first frame: one sentence why."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The first frame, to be passed on as it is, and the host that it names."""

    host: str
    frame: bytes


async def read_opening(reader: asyncio.StreamReader) -> Opening:
    """Read one; raises ``OpeningError``, or ``OSError`` if the connection breaks."""
    try:
        async with asyncio.timeout(OPENING_TIMEOUT_S):
            head = await reader.readexactly(HEAD_SIZE)
            kind, length = read_head(head)
            if kind != START or length > BODY_MAX:
                raise OpeningError(f"it began with a frame of kind {kind}")
            body = await reader.readexactly(length)
        host = json.loads(body)["host"]
    except TimeoutError as error:
        raise OpeningError("no first frame came in time") from error
    except asyncio.IncompleteReadError as error:
        raise OpeningError("it ended before its first frame") from error
    except (ExecFrameError, ValueError, KeyError, TypeError) as error:
        raise OpeningError("its first frame names no host") from error
    if not isinstance(host, str):
        raise OpeningError("its first frame names no host")
    return Opening(host, head + body)
