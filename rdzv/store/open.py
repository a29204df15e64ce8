# SPDX-License-Identifier: Apache-2.0
"""The one place that opens a store."""

from __future__ import annotations

import logging
from importlib import import_module
from random import Random
from typing import cast

from rdzv.errors import ConfigError
from rdzv.flags import named
from rdzv.store.access import Access
from rdzv.store.etcd.client import EtcdStore
from rdzv.store.interface import Store

log = logging.getLogger(__name__)


def open_store(access: Access, *, first: int = 0, random: Random | None = None) -> Store:
    """Build a client; nothing is sent before its first call. Use it within a running event loop.

    ``first`` is the index of the endpoint to begin with, so that many clients can be spread over
    them, and ``random`` draws what comes after it; without it the client has one of its own. Raises
    ``ConfigError`` if the driver's package is not installed.
    """
    if access.user and not access.tls:
        log.warning(
            "the store's endpoints are not https://: the password of %s goes to them in plain text",
            named("--etcd-user"),
            extra={"event": "password_in_plain_text"},
        )
    if access.driver == "etcd3":
        try:
            # Only here: the package costs memory and start-up time that other drivers should not
            # pay.
            driver = import_module("rdzv.store.etcd3.driver")
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{named('--store-driver')} is etcd3, and the package {error.name} is"
                " not installed: run pip install '.[etcd3]' where Muster's source is, or leave the"
                " driver at http2"
            ) from error
        return cast(Store, driver.Etcd3Store(access, first=first, random=random))
    return EtcdStore(access, first=first, random=random)
