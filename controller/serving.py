# SPDX-License-Identifier: Apache-2.0
"""The controller's HTTPS port: the webhook, its health and its metrics."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from controller.admission.injector import Injector
from controller.admission.metrics import AdmissionMetrics
from rdzv.errors import ConfigError
from rdzv.flags import named

REVIEW_MAX_BYTES = 4 * 2**20
"""Limit on a request; the API server takes objects of 3 MiB at most, and sends a pod once."""
LAST_ANSWERS_S = 10.0
"""Timeout for the requests in progress when the controller is stopped."""


def application(
    injector: Injector, metrics: AdmissionMetrics, ready: asyncio.Event
) -> web.Application:
    """Build the application that serves ``/inject``, ``/healthz``, ``/readyz`` and ``/metrics``."""

    async def inject(request: web.Request) -> web.Response:
        try:
            answer = await injector.answer(await request.read())
        except ConfigError as error:
            return web.Response(status=400, text=f"{error}\n")
        return web.Response(body=answer, content_type="application/json")

    async def healthz(request: web.Request) -> web.Response:
        return web.Response(text="healthy\n")

    async def readyz(request: web.Request) -> web.Response:
        if not ready.is_set():
            return web.Response(status=503, text="the API server does not trust it yet\n")
        return web.Response(text="ready\n")

    async def metricsz(request: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain"})

    pages = web.Application(client_max_size=REVIEW_MAX_BYTES)
    pages.router.add_post("/inject", inject)
    pages.router.add_get("/healthz", healthz)
    pages.router.add_get("/readyz", readyz)
    pages.router.add_get("/metrics", metricsz)
    return pages


@asynccontextmanager
async def serving(
    pages: web.Application, address: str, port: int, context: ssl.SSLContext
) -> AsyncIterator[int]:
    """Serve until the block ends; yields the port. Raises ``ConfigError`` if it cannot be bound."""
    runner = web.AppRunner(pages, access_log=None, shutdown_timeout=LAST_ANSWERS_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, address, port, ssl_context=context)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"{named('--port')}: {port} of {address} cannot be had ({error.strerror}): give"
                " another"
            ) from error
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
