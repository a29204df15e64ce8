# SPDX-License-Identifier: Apache-2.0
"""Upkeep of the webhook's certificate: in a Secret, in this process, and in the caBundle.

Every replica does so: the Secret's resourceVersion lets one write win, and the others load what it
wrote. So no leader is needed.
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
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from controller.certificates import Pair, due, make_pair, renewal
from controller.cluster import paths
from controller.cluster.api import CONFLICT, ClusterApi, Object
from controller.cluster.collection import Collection
from rdzv.errors import ClusterError, ClusterRefused
from rdzv.reconcile import Loop, Outlook, first_of

log = logging.getLogger(__name__)

AGAIN_S = 5.0
"""Retry interval after the API server refused or was unavailable."""
LOOK_MOST_S = 3600.0
"""Maximum interval between checks, so that a change of the clock is noticed."""

_NAMES = {
    "ca.crt": "authority",
    "ca.key": "authority_key",
    "tls.crt": "certificate",
    "tls.key": "key",
}
"""Fields of the pair, by key of the Secret."""


class CertificateKeeper(Loop):
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
        super().__init__()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.ready = asyncio.Event()
        """Set once the API server trusts the loaded certificate."""
        self._api = api
        self._secrets = paths.core(namespace, paths.SECRETS)
        self._secret = secret
        self._configuration = configuration
        self._names = tuple(names)
        self._now = now
        self._loaded: Pair | None = None
        collection, _, _ = paths.webhook_configuration(configuration).rpartition("/")
        self._watched = (
            _object_in(api, self._secrets, secret),
            _object_in(api, collection, configuration),
        )

    @property
    def certificate(self) -> bytes | None:
        """The loaded certificate in PEM; None before the first."""
        return None if self._loaded is None else self._loaded.certificate

    async def run(self) -> None:
        """Maintain the certificate until cancelled."""
        secret, configuration = self._watched
        async with secret.following(), configuration.following():
            await super().run()

    async def step(self) -> Outlook:
        """Reconcile Secret, TLS context and caBundle."""
        waits = [partial(one.changed_after, one.sequence) for one in self._watched]
        look_in_s = await self._keep()
        return Outlook(
            lambda: first_of(*(wait() for wait in waits)),
            self.clock() + look_in_s,
            again=look_in_s == 0,
        )

    async def _keep(self) -> float:
        """Bring all in line; return the seconds until the next check."""
        try:
            held = await self._held_pair()
            await self._load(held)
            await self._make_known(held)
        except ClusterError as error:
            if isinstance(error, ClusterRefused) and error.status == CONFLICT:
                return 0.0  # another replica has written: its pair is as good
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
        """Return the Secret's pair; issue and store a new one if it is missing or due."""
        secret = await self._api.get(f"{self._secrets}/{self._secret}")
        held = pair_in(secret)
        why = due(held, self._names, self._now())
        if held is not None and why is None:
            return held
        made = await asyncio.to_thread(make_pair, held, self._names, self._now())
        await self._api.replace(f"{self._secrets}/{self._secret}", with_pair(secret, made))
        log.info(
            "issued a new certificate for the webhook: %s", why, extra={"event": "certificate_made"}
        )
        return made

    async def _load(self, pair: Pair) -> None:
        if pair != self._loaded:
            await asyncio.to_thread(load_into, self.context, pair)
            self._loaded = pair

    async def _make_known(self, pair: Pair) -> None:
        """Write the authority to the caBundle of the webhook configuration, unless it is there."""
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


def _object_in(api: ClusterApi, collection: str, name: str) -> Collection[str]:
    """Watch one object of a collection: its versions, and no more, are kept."""
    selector = quote(f"metadata.name={name}")
    return Collection(api, f"{collection}?fieldSelector={selector}", _version_of)


def _version_of(found: Object) -> str:
    return str(found["metadata"]["resourceVersion"])


def pair_in(secret: Object) -> Pair | None:
    """Parse the pair in a Secret; None if any part of it is missing or unreadable."""
    data = secret.get("data") or {}
    try:
        found = {field: base64.b64decode(data[key], validate=True) for key, field in _NAMES.items()}
    except (KeyError, binascii.Error):
        return None
    return Pair(**found)


def with_pair(secret: Object, pair: Pair) -> Object:
    """Return the Secret with another pair and the same resourceVersion."""
    data: dict[str, Any] = {
        key: base64.b64encode(getattr(pair, field)).decode() for key, field in _NAMES.items()
    }
    return {**secret, "data": {**(secret.get("data") or {}), **data}}


def load_into(context: ssl.SSLContext, pair: Pair) -> None:
    """Load the pair for new connections, through temporary files: ``ssl`` reads only files."""
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = Path(folder) / "tls.crt", Path(folder) / "tls.key"
        certificate.write_bytes(pair.certificate)
        key.touch(mode=0o600)
        key.write_bytes(pair.key)
        context.load_cert_chain(certificate, key)
