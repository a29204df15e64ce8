# SPDX-License-Identifier: Apache-2.0
"""What grpc brings for the loop of a test that is over, in the loop of the next one."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc.aio
import pytest

from rdzv.store.memory.server import EmbeddedServer

PATIENCE_S = 60.0
DEADLINE_S = 0.5


def in_a_loop_that_closes(target: str) -> None:
    """Begin a call and close its loop; the call ends by its deadline."""
    loop = asyncio.new_event_loop()

    async def begin() -> asyncio.Task[Any]:
        watch = grpc.aio.insecure_channel(target).stream_stream("/etcdserverpb.Watch/Watch")
        call = watch(timeout=DEADLINE_S)
        await call.wait_for_connection()
        return asyncio.ensure_future(call.read())

    reading = loop.run_until_complete(begin())
    left = asyncio.all_tasks(loop)
    loop.close()
    for task in {reading, *left}:
        # Nobody is told of those that never end.
        task._log_destroy_pending = False  # type: ignore[attr-defined]


async def test_what_comes_for_a_closed_loop_is_no_error_of_this_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    came = asyncio.Event()

    def note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        came.set()

    asyncio.get_running_loop().set_exception_handler(note)
    async with EmbeddedServer() as server:
        thread = threading.Thread(target=in_a_loop_that_closes, args=(server.endpoint,))
        thread.start()
        async with asyncio.timeout(PATIENCE_S):
            await came.wait()
        await asyncio.to_thread(thread.join)
    assert caplog.records == []
