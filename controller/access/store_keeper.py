# SPDX-License-Identifier: Apache-2.0
"""Upkeep of the store's own credentials: members' certificate, clients' authority, user root.

They are in Secrets that the chart creates empty, so that neither an upgrade nor a tool that renders
the chart without a cluster replaces them. As with the webhook's, every replica maintains them, and
the first write wins.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from controller.certificate_keeper import pair_in, with_pair
from controller.certificates import (
    ClientAuthority,
    ClientPair,
    due,
    make_clients_authority,
    make_members,
)
from controller.cluster import paths
from controller.cluster.api import CONFLICT, ClusterApi, Object
from rdzv.errors import ClusterError, ClusterRefused, ConfigError, StoreError
from rdzv.reconcile import Loop, Outlook
from rdzv.store.access import Access
from rdzv.store.etcd.admin import ROOT, Accounts

log = logging.getLogger(__name__)

AGAIN_S = 2.0
"""Retry interval if the API server or the store refuses or is unavailable, as during an install."""
LOOK_S = 60.0
"""Interval between checks: the bound on noticing a store restored from before authentication."""
ROOT_LIFE = timedelta(days=365)
ROOT_SPARE = timedelta(days=120)

AUTHORITY, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
CLIENTS, CLIENTS_KEY = "client-ca.crt", "client-ca.key"
USER, PASSWORD = "username", "password"

_MADE = {"event": "store_certificate_made"}
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True, slots=True)
class StoreSecrets:
    """The Secrets of the controller's namespace that it maintains or reads.

    ``access`` holds the members' authority, the clients' authority with its key, and the
    controller's own credentials. ``members`` is the Secret of the members' certificate, and
    ``hosts`` are its DNS names; without hosts somebody else maintains it. ``own``: the store is the
    chart's, so the controller maintains ``access``, too, and enables authentication. Without
    ``access`` the store has no authentication.
    """

    namespace: str
    access: str
    members: str = ""
    hosts: tuple[str, ...] = ()
    own: bool = True


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """The controller's access to the store, and the authorities that it uses for jobs."""

    access: Access
    clients: ClientAuthority
    members_authority: bytes


class StoreKeeper(Loop):
    """The upkeep of the store's credentials.

    ``entry`` is set once the store admits the controller, if there is an access Secret.
    """

    def __init__(
        self,
        api: ClusterApi,
        names: StoreSecrets,
        endpoints: tuple[str, ...],
        folder: Path,
        now: Callable[[], datetime],
    ) -> None:
        super().__init__()
        self.ready = asyncio.Event()
        self.entry: StoreEntry | None = None
        self._api = api
        self._names = names
        self._endpoints = endpoints
        self._folder = folder
        self._now = now
        self.certificates: dict[str, bytes] = {}
        """The certificates in PEM, as of the last check: of the store's members and user root."""
        self._access: Access | None = None

    async def entered(self) -> Access:
        """Wait until the store admits the controller; return its access."""
        await self.ready.wait()
        assert self._access is not None
        return self._access

    async def step(self) -> Outlook:
        """Maintain the credentials."""
        try:
            await self.keep()
        except (ClusterError, StoreError, ConfigError) as error:
            if isinstance(error, ClusterRefused) and error.status == CONFLICT:
                return Outlook(again=True)  # another replica has written: its are as good
            log.warning(
                "cannot maintain the store's certificates, retrying: %s",
                error,
                extra={"event": "store_not_kept"},
            )
            return Outlook(look_at_s=self.clock() + AGAIN_S)
        self.ready.set()
        return Outlook(look_at_s=self.clock() + LOOK_S)

    async def keep(self) -> None:
        """Check and repair the credentials once; load the controller's own."""
        names = self._names
        if names.members and names.hosts:
            await self._keep_members()
        if not names.access:
            # A store with TLS and without authentication.
            members = await self._read(names.members)
            self._access = await asyncio.to_thread(
                self._written, {AUTHORITY: members[AUTHORITY]} if AUTHORITY in members else {}
            )
            return
        data = await (self._keep_access() if names.own else self._read(names.access))
        missing = [key for key in (AUTHORITY, CLIENTS, CLIENTS_KEY) if key not in data]
        if missing:
            raise ConfigError(
                f"the Secret {names.access} has no {', '.join(missing)}: docs/controller.md says"
                " what it needs"
            )
        access = await asyncio.to_thread(self._written, data)
        entry = StoreEntry(
            access, ClientAuthority(data[CLIENTS], data[CLIENTS_KEY]), data[AUTHORITY]
        )
        if names.own:
            await _enabled(access)
        if CERTIFICATE in data:
            self.certificates["root"] = data[CERTIFICATE]
        self.entry, self._access = entry, access

    async def _keep_members(self) -> None:
        path = paths.core(self._names.namespace, paths.SECRETS, self._names.members)
        secret = await self._api.get(path)
        held = pair_in(secret)
        why = due(held, self._names.hosts, self._now())
        if held is None or why is not None:
            held = await asyncio.to_thread(make_members, held, self._names.hosts, self._now())
            await self._api.replace(path, with_pair(secret, held))
            log.info("issued a new certificate for the store's members: %s", why, extra=_MADE)
        self.certificates["store"] = held.certificate

    async def _keep_access(self) -> Mapping[str, bytes]:
        """Read and complete the Secret that the controller, the upkeep and the members share."""
        path = paths.core(self._names.namespace, paths.SECRETS, self._names.access)
        members = await self._read(self._names.members)
        if AUTHORITY not in members:
            raise ConfigError(f"the Secret {self._names.members} has no {AUTHORITY} yet")
        secret = await self._api.get(path)
        data = _decoded(secret)
        wanted = await asyncio.to_thread(complete, data, members[AUTHORITY], self._now())
        if wanted != data:
            await self._api.replace(path, {**secret, "data": _encoded(wanted)})
            log.info("issued a new certificate for the store's user root", extra=_MADE)
        return wanted

    async def _read(self, name: str) -> Mapping[str, bytes]:
        return _decoded(await self._api.get(paths.core(self._names.namespace, paths.SECRETS, name)))

    def _written(self, data: Mapping[str, bytes]) -> Access:
        """Write the credentials to private files; return the access, whose client rereads them."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        given: dict[str, str] = {}
        fields = {AUTHORITY: "cacert", CERTIFICATE: "cert", KEY: "key", PASSWORD: "password_file"}
        for name, field in fields.items():
            if name not in data:
                continue
            path = self._folder / name
            given[field] = str(path)
            if path.exists() and path.read_bytes() == data[name]:
                continue
            fresh = path.with_suffix(".new")
            with os.fdopen(os.open(fresh, _WRITE, 0o600), "wb") as file:
                file.write(data[name])
            fresh.replace(path)
        if USER in data:
            given["user"] = data[USER].decode().strip()
        return Access(self._endpoints, **given)  # type: ignore[arg-type]


def complete(
    held: Mapping[str, bytes], members_authority: bytes, now: datetime
) -> dict[str, bytes]:
    """Return the access Secret's data with missing, invalid and expiring parts replaced."""
    wanted = {**held, AUTHORITY: members_authority}
    try:
        clients = ClientAuthority(wanted.get(CLIENTS, b""), wanted.get(CLIENTS_KEY, b""))
    except ConfigError:
        wanted[CLIENTS], wanted[CLIENTS_KEY] = make_clients_authority(now)
        clients = ClientAuthority(wanted[CLIENTS], wanted[CLIENTS_KEY])
    root = ClientPair(wanted.get(CERTIFICATE, b""), wanted.get(KEY, b""))
    if not clients.fault(root, ROOT, now + ROOT_SPARE):
        return wanted
    root = clients.sign(ROOT, ROOT_LIFE, now)
    return {**wanted, CERTIFICATE: root.certificate, KEY: root.key}


async def _enabled(access: Access) -> None:
    accounts = Accounts(access)
    try:
        if await accounts.enable():
            log.info("enabled authentication in the store", extra={"event": "store_auth_enabled"})
    finally:
        await accounts.close()


def _decoded(secret: Object) -> dict[str, bytes]:
    try:
        return {
            key: base64.b64decode(value, validate=True)
            for key, value in (secret.get("data") or {}).items()
        }
    except (binascii.Error, TypeError) as error:
        raise ConfigError(f"a Secret of the store cannot be read: {error}") from None


def _encoded(data: Mapping[str, bytes]) -> dict[str, str]:
    return {key: base64.b64encode(value).decode() for key, value in data.items()}
