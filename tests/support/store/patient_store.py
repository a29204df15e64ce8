# SPDX-License-Identifier: Apache-2.0
"""Drivers with generous time-outs, for what a store does and not how soon.

By themselves they give up an attempt after a second, and what was written in it is ambiguous: that
is what tests of failures ask for.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from rdzv.store.etcd.client import EtcdStore
from rdzv.store.etcd.deadlines import Patience

CALL_S = 60.0
"""What a call has where the test says nothing else."""

CALLS = (
    *("range", "page", "txn", "compact", "status"),
    *("lease_grant", "lease_keep_alive", "lease_revoke"),
)

Driver = TypeVar("Driver", bound=EtcdStore)


class LongPatience(Patience):
    """Waits for an answer as long as the call has time."""

    __slots__ = ()

    @property
    def attempt_s(self) -> float:
        return 2 * CALL_S


def patient(store: Driver) -> Driver:
    """Let each call of ``store`` have ``CALL_S``, and make no second attempt for want of time."""
    for endpoint in store._calls.rotation:
        endpoint.patience = LongPatience()
    for name in CALLS:
        setattr(store, name, partial(getattr(store, name), timeout_s=CALL_S))
    return store
