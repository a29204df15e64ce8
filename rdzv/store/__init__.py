# SPDX-License-Identifier: Apache-2.0
"""Store drivers and the contract that all of them keep."""

from rdzv.store.interface import (
    DEFAULT_TIMEOUT_S,
    WATCH_PROGRESS_S,
    Compare,
    Delete,
    GuardedWrites,
    KeyValue,
    Operation,
    Page,
    Put,
    Range,
    RangeResult,
    Rest,
    Store,
    StoreStatus,
    TxnResult,
    WatchBatch,
    WatchEvent,
)

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "WATCH_PROGRESS_S",
    "Compare",
    "Delete",
    "GuardedWrites",
    "KeyValue",
    "Operation",
    "Page",
    "Put",
    "Range",
    "RangeResult",
    "Rest",
    "Store",
    "StoreStatus",
    "TxnResult",
    "WatchBatch",
    "WatchEvent",
]
