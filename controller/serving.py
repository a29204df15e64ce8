# SPDX-License-Identifier: Apache-2.0
"""The controller's HTTPS port: the webhook, its health and its metrics."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from controller.admission.injector import Injector
from controller.admission.metrics import AdmissionMetrics
from controller.config import Network
from rdzv.errors import ConfigError
from rdzv.flags import named

log = logging.getLogger(__name__)

REVIEW_MAX_BYTES = 4 * 2**20
"""Limit on a request; the API server takes objects of 3 MiB at most, and sends a pod once."""
LAST_ANSWERS_S = 10.0
"""Timeout for the requests in progress when the controller is stopped."""


REFUSED_AGAIN_S = 60.0
"""Minimum interval between two log lines about refused callers, who may call at any rate."""


@dataclass(slots=True)
class Callers:
    """The rule by which callers may send reviews; any caller may if nothing is known of the server.

    ``networks``: the addresses of the API server; empty for any. ``certificate``: whether it has a
    client certificate, which the TLS context has checked.
    """

    networks: tuple[Network, ...] = ()
    certificate: bool = False
    _told_s: float = -REFUSED_AGAIN_S

    def fault(self, address: str, *, has_certificate: bool) -> str:
        """Return why a caller is refused; empty if it is not."""
        found = ipaddress.ip_address(address.partition("%")[0])
        found = getattr(found, "ipv4_mapped", None) or found
        if self.networks and not any(found in network for network in self.networks):
            return f"{found} is no address of the API server ({named('--api-server-cidrs')})"
        if self.certificate and not has_certificate:
            return f"{found} has shown no client certificate ({named('--api-server-ca')})"
        return ""

    def admit(self, request: web.Request) -> None:
        """Raise ``HTTPForbidden`` for a caller that is not the API server, and log it."""
        transport = request.transport
        peer = transport and transport.get_extra_info("peername")
        shown = transport and transport.get_extra_info("peercert")
        fault = self.fault(peer[0], has_certificate=bool(shown)) if peer else "it has hung up"
        if not fault:
            return
        if time.monotonic() - self._told_s >= REFUSED_AGAIN_S:
            self._told_s = time.monotonic()
            log.warning(
                "refused a review: %s; pods start without Muster if the API server sent it",
                fault,
                extra={"event": "review_refused"},
            )
        raise web.HTTPForbidden(text=f"{fault}\n")


def ask_for_certificates(context: ssl.SSLContext, authority: str) -> None:
    """Ask clients for a certificate of this authority; raises ``ConfigError`` if it is no file.

    A client may have none: the kubelet and a Prometheus call all paths but ``/inject``.
    """
    try:
        context.load_verify_locations(authority)
    except OSError as error:
        raise ConfigError(
            f"{named('--api-server-ca')}: cannot load {authority} ({error}): name a file in PEM"
        ) from error
    context.verify_mode = ssl.CERT_OPTIONAL


def application(
    injector: Injector,
    metrics: AdmissionMetrics,
    ready: asyncio.Event,
    callers: Callers | None = None,
) -> web.Application:
    """Build the application that serves ``/inject``, ``/healthz``, ``/readyz`` and ``/metrics``.

    ``callers`` are those of ``/inject``; the kubelet and a Prometheus call the other paths.
    """
    callers = callers or Callers()

    async def inject(request: web.Request) -> web.Response:
        callers.admit(request)
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
