# SPDX-License-Identifier: Apache-2.0
"""Keeps the webhook's certificate: in a Secret, in this process, and in what the API server trusts.

Every replica does it: the Secret's resourceVersion lets one write win, and the others read what it
wrote. So no leader is needed, and none can be missing.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import ssl
import tempfile
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from controller.certificates.pair import Pair, due, make, renewal
from controller.cluster import paths
from controller.cluster.api import ClusterApi, Object
from controller.cluster.watching import watch_one
from rdzv.errors import ClusterError, ClusterRefused

log = logging.getLogger(__name__)

CONFLICT = 409
AGAIN_S = 5.0
"""After the API server refused, or was away."""
LOOK_MOST_S = 3600.0
"""A clock that was set is noticed by then."""

_NAMES = {
    "ca.crt": "authority",
    "ca.key": "authority_key",
    "tls.crt": "certificate",
    "tls.key": "key",
}
"""Keys of the Secret, by field of the pair."""


class CertificateKeeper:
    """The certificate of one webhook, and the TLS context of its server."""

    def __init__(
        self,
        api: ClusterApi,
        namespace: str,
        secret: str,
        configuration: str,
        names: Sequence[str],
        now: Callable[[], datetime],
    ) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.ready = asyncio.Event()
        """Set once there is a certificate that the API server trusts."""
        self._api = api
        self._secrets = paths.core(namespace, paths.SECRETS)
        self._secret = secret
        self._configuration = configuration
        self._names = tuple(names)
        self._now = now
        self._loaded: Pair | None = None

    async def run(self) -> None:
        """Keep it until cancelled."""
        changed = asyncio.Event()
        collection, _, _ = paths.webhook_configuration(self._configuration).rpartition("/")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch_one(self._api, self._secrets, self._secret, changed.set))
            tasks.create_task(watch_one(self._api, collection, self._configuration, changed.set))
            while True:
                changed.clear()
                wait_s = await self._step()
                try:
                    async with asyncio.timeout(wait_s):
                        await changed.wait()
                except TimeoutError:
                    continue  # it is time to look whether a new one is due

    async def _step(self) -> float:
        """Bring all three in line; return after how many seconds to look again, unasked."""
        try:
            held = await self._held_pair()
            await self._load(held)
            await self._make_known(held)
        except ClusterError as error:
            log.warning(
                "cannot maintain the webhook's certificate, retrying: %s",
                error,
                extra={"event": "certificate_not_kept"},
            )
            return AGAIN_S
        self.ready.set()
        left_s = (renewal(held) - self._now()).total_seconds()
        return min(max(left_s, AGAIN_S), LOOK_MOST_S)

    async def _held_pair(self) -> Pair:
        """The pair that the Secret has, or the new one that it has from now on."""
        while True:
            secret = await self._api.get(f"{self._secrets}/{self._secret}")
            held = pair_in(secret)
            why = due(held, self._names, self._now())
            if held is not None and why is None:
                return held
            made = await asyncio.to_thread(make, held, self._names, self._now())
            try:
                await self._api.replace(f"{self._secrets}/{self._secret}", with_pair(secret, made))
            except ClusterRefused as error:
                if error.status == CONFLICT:
                    continue  # another replica has written: its pair is as good
                raise
            log.info(
                "issued a new certificate for the webhook: %s",
                why,
                extra={"event": "certificate_made"},
            )
            return made

    async def _load(self, pair: Pair) -> None:
        if pair != self._loaded:
            await asyncio.to_thread(load_into, self.context, pair)
            self._loaded = pair

    async def _make_known(self, pair: Pair) -> None:
        """Have the API server trust the authority."""
        path = paths.webhook_configuration(self._configuration)
        found = await self._api.get(path)
        bundle = base64.b64encode(pair.authority).decode()
        webhooks = found.get("webhooks") or []
        if all(one["clientConfig"].get("caBundle") == bundle for one in webhooks):
            return
        for one in webhooks:
            one["clientConfig"]["caBundle"] = bundle
        await self._api.replace(path, found)
        log.info(
            "updated the caBundle of the webhook configuration",
            extra={"event": "certificate_trusted"},
        )


def pair_in(secret: Object) -> Pair | None:
    """The pair that a Secret has; None where anything of it is missing."""
    data = secret.get("data") or {}
    try:
        found = {field: base64.b64decode(data[key], validate=True) for key, field in _NAMES.items()}
    except (KeyError, binascii.Error):
        return None
    return Pair(**found)


def with_pair(secret: Object, pair: Pair) -> Object:
    """The Secret with another pair, for the same resourceVersion."""
    data: dict[str, Any] = {
        key: base64.b64encode(getattr(pair, field)).decode() for key, field in _NAMES.items()
    }
    return {**secret, "data": {**(secret.get("data") or {}), **data}}


def load_into(context: ssl.SSLContext, pair: Pair) -> None:
    """Have new connections get this certificate; the library takes it from files alone."""
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = Path(folder) / "tls.crt", Path(folder) / "tls.key"
        certificate.write_bytes(pair.certificate)
        key.touch(mode=0o600)
        key.write_bytes(pair.key)
        context.load_cert_chain(certificate, key)
