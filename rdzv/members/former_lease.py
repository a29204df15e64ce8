# SPDX-License-Identifier: Apache-2.0
"""The lease of the sidecar before this one, renewed while a full store grants no other.

etcd over its quota (NOSPACE) renews leases and grants none. If the former lease ended meanwhile,
the records of a pod in good health would vanish with it, and no process could write them again.

It is only renewed, never registered on: what the former sidecar has sent may still land, and would
then pass for this one's. Once there is a new one it is left to expire, as records that are not yet
written again hang on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from rdzv.errors import StoreError, StoreFull, StoreRefused
from rdzv.job import JobClient
from rdzv.members.lease import MemberLease
from rdzv.members.registration import Identity


class FormerLease:
    """The lease that the record of this pod, ``identity``, hangs on in the store, if there is one.

    ``complain`` is called with the reason of a renewal that fails.
    """

    def __init__(
        self,
        client: JobClient,
        identity: Identity,
        ttl_s: float,
        clock: Callable[[], float],
        random: Random,
        complain: Callable[[str], None],
    ) -> None:
        self._client = client
        self._identity = identity
        self._ttl_s = ttl_s
        self._clock = clock
        self._random = random
        self._complain = complain
        self._renewing: asyncio.Task[None] | None = None

    @property
    def upheld(self) -> bool:
        """Whether it is being renewed, so that the records on it stay."""
        return self._renewing is not None and not self._renewing.done()

    def after_refusal(self, error: StoreError) -> None:
        """Go on from a registration that failed: uphold the lease where all are refused.

        A refusal of this sidecar alone lets the lease end: others may go on without this pod.
        """
        if isinstance(error, StoreFull):
            self._uphold()
        elif isinstance(error, StoreRefused):
            self.end()

    def end(self) -> None:
        """Renew it no more."""
        if self._renewing is not None:
            self._renewing.cancel()

    def _uphold(self) -> None:
        member = self._client.membership.snapshot().members.get(self._identity.member)
        if self.upheld or member is None or member.pod_uid != self._identity.pod_uid:
            return
        store = self._client.store
        lease = MemberLease(store, self._ttl_s, self._clock, self._random, former_id=member.lease)
        self._renewing = asyncio.create_task(
            lease.renew(self._complain, at_once=True), name="renew-former-lease"
        )
