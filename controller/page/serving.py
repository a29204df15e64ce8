# SPDX-License-Identifier: Apache-2.0
"""Serves the page on the loopback address: a user who may forward the pod's ports may see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from controller.jobs.jobs import Jobs
from controller.page.document import DOCUMENT, POLICY
from controller.page.summary import summary
from rdzv.errors import ConfigError
from rdzv.flags import named

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ADDRESS = "127.0.0.1"
OWN_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Accepted hosts, which a browser sends if the port is forwarded. Any other host would be that of
a website whose DNS name resolves to this address (DNS rebinding)."""
STREAMS_MAX = 32
REST_S = 1.0
"""Minimum interval between two updates of one stream."""
ALIVE_S = 15.0
"""Time without a change after which a comment is sent, so that abandoned connections end."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


def page(jobs: Jobs) -> web.Application:
    """Build the application that serves ``/``, ``/jobs`` and ``/jobs/stream``."""
    streams: set[web.StreamResponse] = set()

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.host.rpartition(":")[0] if request.host[-1:].isdigit() else request.host
        if host not in OWN_NAMES and request.host not in OWN_NAMES:
            return web.Response(status=403, text="forward the port, and ask for localhost\n")
        return await handler(request)

    def picture() -> str:
        return json.dumps(summary(jobs.states().values()), separators=(",", ":"))

    async def document(request: web.Request) -> web.Response:
        return web.Response(text=DOCUMENT, content_type="text/html", headers=HEADERS)

    async def all_jobs(request: web.Request) -> web.Response:
        return web.Response(text=picture(), content_type="application/json", headers=HEADERS)

    async def stream(request: web.Request) -> web.StreamResponse:
        if len(streams) >= STREAMS_MAX:
            return web.Response(status=503, text="too many look at it already\n")
        answer = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        streams.add(answer)
        try:
            await answer.prepare(request)
            shown = ""
            while True:
                sequence, now = jobs.sequence, picture()
                await answer.write(f"data: {now}\n\n".encode() if now != shown else b":\n\n")
                shown = now
                await asyncio.sleep(REST_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(ALIVE_S):
                        await jobs.changed_after(sequence)
        except ConnectionResetError:
            return answer
        finally:
            streams.discard(answer)

    pages = web.Application(middlewares=[guarded])
    pages.router.add_get("/", document)
    pages.router.add_get("/jobs", all_jobs)
    pages.router.add_get("/jobs/stream", stream)
    return pages


@asynccontextmanager
async def serving_page(jobs: Jobs, port: int) -> AsyncIterator[int]:
    """Serve until the block ends; yields the port. Raises ``ConfigError`` if it cannot be bound."""
    runner = web.AppRunner(page(jobs), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, ADDRESS, port).start()
        except OSError as error:
            raise ConfigError(
                f"{named('--page-port')}: {port} of {ADDRESS} cannot be had ({error.strerror}):"
                " give another, or 0 for no page"
            ) from error
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
