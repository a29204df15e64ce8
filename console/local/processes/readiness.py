# SPDX-License-Identifier: Apache-2.0
"""The readiness of a sidecar, as it reports it over HTTP."""

from __future__ import annotations

import asyncio

POLL_INTERVAL_S = 0.1
ANSWER_TIMEOUT_S = 2.0


async def until_ready(port: int) -> None:
    """Poll ``/readyz`` on the loopback until it answers 200; the caller sets the deadline."""
    while not await _is_ready(port):  # noqa: ASYNC110 - another process has no event to give
        await asyncio.sleep(POLL_INTERVAL_S)


async def _is_ready(port: int) -> bool:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /readyz HTTP/1.0\r\n\r\n")
                status_line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False  # it does not listen yet
    return status_line.split()[1:2] == [b"200"]
