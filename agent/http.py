# SPDX-License-Identifier: Apache-2.0
"""Health, readiness and metrics over HTTP, on the member's own address: all that others can reach.

``/healthz`` says that the event loop keeps time and nothing else: a store that is away must never
get a sidecar killed. ``/readyz`` says that launchers beside it can start.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from agent.config import Config
from agent.loop_lag import LoopLag
from agent.metrics import CONTENT_TYPE, Metrics
from rdzv.errors import ConfigError

UNHEALTHY_LAG_S = 30.0
"""Late by more than any lease bears: something inside hangs, and a restart can cure it."""


@asynccontextmanager
async def serving(
    config: Config, loop_lag: LoopLag, not_ready: Callable[[], str | None], metrics: Metrics
) -> AsyncIterator[None]:
    """Serve until the block ends; ``not_ready`` says why the member is not ready, or None.

    Raises ``ConfigError`` if the address and port cannot be had.
    """

    async def healthz(request: web.Request) -> web.Response:
        late_s = loop_lag.worst_s
        if late_s > UNHEALTHY_LAG_S:
            return web.Response(status=503, text=f"the event loop was {late_s:.0f} s late\n")
        return web.Response(text="healthy\n")

    async def readyz(request: web.Request) -> web.Response:
        reason = not_ready()
        if reason is not None:
            return web.Response(status=503, text=f"{reason}\n")
        return web.Response(text="ready\n")

    async def metricsz(request: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metricsz)
    # Signals are the root task group's; whoever keeps a connection idle loses it soon.
    runner = web.AppRunner(app, access_log=None, handle_signals=False, keepalive_timeout=15)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, config.address, config.http_port).start()
        except OSError as error:
            raise _cannot_listen(config, error) from error
        yield
    finally:
        await runner.cleanup()


def _cannot_listen(config: Config, error: OSError) -> ConfigError:
    where = f"{config.address} port {config.http_port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"--http-port (MUSTER_HTTP_PORT): {where} is taken by another process: give another one"
        )
    return ConfigError(
        f"--address (MUSTER_ADDRESS): {where} cannot be listened on ({error.strerror}):"
        " give an address of this pod"
    )
