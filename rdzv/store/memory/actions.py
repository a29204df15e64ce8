# SPDX-License-Identifier: Apache-2.0
"""The parts of a transaction of the memory engine, and what etcd would refuse in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rdzv.errors import StoreRefused
from rdzv.store.interface import KeyValue
from rdzv.store.intervals import Interval, key_text

MAX_OPERATIONS = 128
"""Bound on the operations in one branch of a transaction: etcd's default of ``--max-txn-ops``."""

Target = Literal["create", "mod", "version", "lease", "value"]
Operator = Literal["=", "!=", "<", ">"]


@dataclass(frozen=True, slots=True)
class Condition:
    """One compare of a transaction, over an interval."""

    interval: Interval
    target: Target
    op: Operator
    operand: int | bytes


@dataclass(frozen=True, slots=True)
class Write:
    """The write of one key."""

    key: bytes
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Erase:
    """The deletion of an interval."""

    interval: Interval


@dataclass(frozen=True, slots=True)
class Read:
    """The read of an interval, as of ``revision`` or, with 0, as it is now."""

    interval: Interval
    revision: int = 0


Action = Write | Erase | Read
Reply = tuple[KeyValue, ...]
"""The keys that a read found, an erase deleted, or a write replaced."""

_MISSING = KeyValue("", b"", 0, 0, 0, 0)


def check(actions: Sequence[Action]) -> None:
    """Raise ``StoreRefused`` for what etcd refuses, whichever branch will run."""
    if len(actions) > MAX_OPERATIONS:
        raise StoreRefused(f"{len(actions)} operations in a branch, at most {MAX_OPERATIONS}")
    erased = [action.interval for action in actions if isinstance(action, Erase)]
    written: set[bytes] = set()
    for action in actions:
        key = action.key if isinstance(action, Write) else action.interval.start
        if not key:
            raise StoreRefused("an operation without a key")
        if isinstance(action, Write):
            if key in written or any(interval.holds(key) for interval in erased):
                raise StoreRefused(f"key {key_text(key)} is written twice in one transaction")
            written.add(key)


def writes(then: Sequence[Action], otherwise: Sequence[Action]) -> bool:
    """Return whether a transaction needs space: etcd asks before it judges the compares."""
    return any(isinstance(action, Write) for action in (*then, *otherwise))


def holds(condition: Condition, kvs: Reply) -> bool:
    """Judge a condition by the keys found in its interval; no key counts as one of all zeros."""
    if not kvs and condition.target == "value":
        return False
    return all(_holds_for(condition, kv) for kv in kvs or (_MISSING,))


def _holds_for(condition: Condition, kv: KeyValue) -> bool:
    actual: int | bytes
    match condition.target:
        case "create":
            actual = kv.create_revision
        case "mod":
            actual = kv.mod_revision
        case "version":
            actual = kv.version
        case "lease":
            actual = kv.lease
        case "value":
            actual = kv.value
    operand = condition.operand
    if isinstance(actual, bytes) != isinstance(operand, bytes):
        raise StoreRefused(f"cannot compare {condition.target} with {operand!r}")
    match condition.op:
        case "=":
            return actual == operand
        case "!=":
            return actual != operand
        case "<":
            return actual < operand  # type: ignore[operator]
        case ">":
            return actual > operand  # type: ignore[operator]
