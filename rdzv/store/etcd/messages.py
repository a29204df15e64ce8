# SPDX-License-Identifier: Apache-2.0
"""The conversion between the store's types and etcd's messages, for the client side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rdzv.errors import StoreRefused
from rdzv.store.interface import (
    Compare,
    Delete,
    KeyValue,
    Operation,
    Put,
    TxnResult,
    WatchEvent,
)
from rdzv.store.intervals import Interval, key_bytes, key_text
from rdzv.store.pb import etcd_pb2 as pb

_TARGETS = {
    "create": (pb.Compare.CREATE, "create_revision"),
    "mod": (pb.Compare.MOD, "mod_revision"),
    "version": (pb.Compare.VERSION, "version"),
    "lease": (pb.Compare.LEASE, "lease"),
    "value": (pb.Compare.VALUE, "value"),
}
_RESULTS = {
    "=": pb.Compare.EQUAL,
    "!=": pb.Compare.NOT_EQUAL,
    "<": pb.Compare.LESS,
    ">": pb.Compare.GREATER,
}
_DELETE = pb.Event.DELETE


def span(key: str, *, prefix: bool) -> dict[str, bytes]:
    """Return the fields by which requests name one key, or all that start with it."""
    if not prefix:
        return {"key": key_bytes(key)}
    interval = Interval.of(key, prefix=True)
    return {"key": interval.start, "range_end": interval.end}


def key_value(message: pb.KeyValue) -> KeyValue:
    """Convert a key value from its message."""
    return KeyValue(
        key_text(message.key),
        message.value,
        message.create_revision,
        message.mod_revision,
        message.version,
        message.lease,
    )


def watch_events(messages: Iterable[pb.Event]) -> list[WatchEvent]:
    """Convert the events of a watch from their messages."""
    return [
        WatchEvent("delete" if message.type == _DELETE else "put", key_value(message.kv))
        for message in messages
    ]


def txn_request(
    compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation]
) -> pb.TxnRequest:
    """Build a transaction's message; raise ``StoreRefused`` for a compare that has none."""
    request = pb.TxnRequest()
    # Each message is built in place: a finished one would be copied.
    for compare in compares:
        _spell_compare(compare, request.compare)
    for operation in then:
        _spell_operation(operation, request.success.add())
    for operation in otherwise:
        _spell_operation(operation, request.failure.add())
    return request


def txn_result(message: pb.TxnResponse) -> TxnResult:
    """Convert the result of a transaction from its message."""
    return TxnResult(
        message.succeeded,
        message.header.revision,
        tuple(_response(response) for response in message.responses),
    )


def _spell_compare(compare: Compare, among: Any) -> None:
    target, field = _TARGETS[compare.target]
    try:
        among.add(
            result=_RESULTS[compare.op],
            target=target,
            **span(compare.key, prefix=compare.prefix),
            **{field: compare.operand},
        )
    except TypeError:
        raise StoreRefused(f"cannot compare {compare.target} with {compare.operand!r}") from None


def _spell_operation(operation: Operation, into: pb.RequestOp) -> None:
    if isinstance(operation, Put):
        put = into.request_put
        put.key, put.value = key_bytes(operation.key), operation.value
        put.lease = operation.lease
        return
    keys = Interval.of(operation.key, prefix=operation.prefix)
    if isinstance(operation, Delete):
        delete = into.request_delete_range
        delete.key, delete.range_end = keys.start, keys.end
        return
    read = into.request_range
    read.key, read.range_end = keys.start, keys.end
    read.revision = operation.revision


def _response(message: pb.ResponseOp) -> tuple[KeyValue, ...] | int | None:
    kind = message.WhichOneof("response")
    if kind == "response_range":
        return tuple(map(key_value, message.response_range.kvs))
    if kind == "response_delete_range":
        deleted: int = message.response_delete_range.deleted
        return deleted
    return None
