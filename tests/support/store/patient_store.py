# SPDX-License-Identifier: Apache-2.0
"""Drivers with generous timeouts, for what a store does and not how soon.

By themselves they give up an attempt after a second, and what was written in it is ambiguous: that
is what tests of failures ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partialmethod
from typing import Any

from rdzv.pacing import Patience
from rdzv.store.access import Access
from rdzv.store.etcd.admin import Rights
from rdzv.store.etcd.client import EtcdStore
from rdzv.store.etcd.endpoint import EtcdEndpoint, Method
from rdzv.store.etcd3.driver import Etcd3Store

CALL_S = 150.0
"""What a call has where the test says nothing else: it ends what hangs."""


class LongPatience(Patience):
    """Waits for an answer as long as the call has time."""

    __slots__ = ()

    @property
    def attempt_s(self) -> float:
        return 2 * CALL_S


class PatientEtcdStore(EtcdStore):
    """Each call has ``CALL_S``, and no second attempt is made for want of time."""

    range = partialmethod(EtcdStore.range, timeout_s=CALL_S)
    page = partialmethod(EtcdStore.page, timeout_s=CALL_S)
    txn = partialmethod(EtcdStore.txn, timeout_s=CALL_S)
    lease_grant = partialmethod(EtcdStore.lease_grant, timeout_s=CALL_S)
    lease_keep_alive = partialmethod(EtcdStore.lease_keep_alive, timeout_s=CALL_S)
    lease_revoke = partialmethod(EtcdStore.lease_revoke, timeout_s=CALL_S)
    compact = partialmethod(EtcdStore.compact, timeout_s=CALL_S)
    status = partialmethod(EtcdStore.status, timeout_s=CALL_S)

    def _endpoints(self, access: Access) -> Sequence[EtcdEndpoint]:
        endpoints = super()._endpoints(access)
        for endpoint in endpoints:
            endpoint.patience = LongPatience()
        return endpoints


class PatientEtcd3Store(PatientEtcdStore, Etcd3Store):
    """The same of the driver ``etcd3``."""


class PatientRights(Rights):
    """Makes users and roles, with ``CALL_S`` for each call: passwords cost etcd much work."""

    def __init__(self, access: Access) -> None:
        super().__init__(access)
        for endpoint in self._calls.rotation:
            endpoint.patience = LongPatience()

    async def call(self, method: Method, request: Any, timeout_s: float = CALL_S) -> Any:
        return await super().call(method, request, timeout_s)


def make_patient(store: EtcdStore) -> EtcdStore:
    """From now on let no attempt of ``store`` end before its call does; returns it."""
    for endpoint in store._calls.rotation:
        endpoint.patience = LongPatience()
    return store
