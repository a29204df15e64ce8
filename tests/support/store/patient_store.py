# SPDX-License-Identifier: Apache-2.0
"""The drivers, given the time that a busy machine takes to answer.

By themselves they give up an attempt after a second, and what was written in it is ambiguous: that
is what tests of failures ask for, and no answer to what a store does.
"""

from __future__ import annotations

from collections.abc import Sequence

from rdzv.store import Compare, Operation, Page, RangeResult, TxnResult
from rdzv.store.access import Access
from rdzv.store.etcd.certificates import CertificateFiles
from rdzv.store.etcd.client import EtcdStore
from rdzv.store.etcd.deadlines import Patience
from rdzv.store.etcd.endpoint import EtcdEndpoint
from rdzv.store.etcd3.driver import Etcd3Store
from rdzv.store.interface import StoreStatus

CALL_S = 30.0
"""What a call has where the test says nothing else."""

ATTEMPT_S = 60.0
"""More than any call has: none is made in a second attempt for want of time."""


class LongPatience(Patience):
    """Waits for an answer as long as the call has time."""

    __slots__ = ()

    @property
    def attempt_s(self) -> float:
        return ATTEMPT_S


def wait_long(store: object) -> None:
    """Let ``store``, of either driver, give up no attempt before its call ends."""
    assert isinstance(store, EtcdStore)
    for endpoint in store._calls.rotation:
        endpoint.patience = LongPatience()


class PatientEtcdStore(EtcdStore):
    """The default driver; whoever gives a call a time of its own still gets that one."""

    async def range(
        self, key: str, *, prefix: bool = False, timeout_s: float = CALL_S
    ) -> RangeResult:
        return await super().range(key, prefix=prefix, timeout_s=timeout_s)

    async def page(
        self,
        prefix: str,
        *,
        limit: int,
        after: str = "",
        revision: int = 0,
        timeout_s: float = CALL_S,
    ) -> Page:
        return await super().page(
            prefix, limit=limit, after=after, revision=revision, timeout_s=timeout_s
        )

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout_s: float = CALL_S,
    ) -> TxnResult:
        return await super().txn(compares, then, otherwise, timeout_s=timeout_s)

    async def lease_grant(self, lease_id: int, ttl_s: int, *, timeout_s: float = CALL_S) -> None:
        await super().lease_grant(lease_id, ttl_s, timeout_s=timeout_s)

    async def lease_keep_alive(self, lease_id: int, *, timeout_s: float = CALL_S) -> float:
        return await super().lease_keep_alive(lease_id, timeout_s=timeout_s)

    async def lease_revoke(self, lease_id: int, *, timeout_s: float = CALL_S) -> None:
        await super().lease_revoke(lease_id, timeout_s=timeout_s)

    async def compact(self, revision: int, *, timeout_s: float = CALL_S) -> None:
        await super().compact(revision, timeout_s=timeout_s)

    async def status(self, *, timeout_s: float = CALL_S) -> StoreStatus:
        return await super().status(timeout_s=timeout_s)

    def _endpoints(self, access: Access, files: CertificateFiles | None) -> Sequence[EtcdEndpoint]:
        endpoints = super()._endpoints(access, files)
        for endpoint in endpoints:
            endpoint.patience = LongPatience()
        return endpoints


class PatientEtcd3Store(PatientEtcdStore, Etcd3Store):
    """The driver on the etcd3 package."""


PATIENT: dict[type[EtcdStore], type[EtcdStore]] = {
    EtcdStore: PatientEtcdStore,
    Etcd3Store: PatientEtcd3Store,
}
"""Each driver and the patient one that is made of it."""
