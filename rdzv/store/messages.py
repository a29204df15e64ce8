# SPDX-License-Identifier: Apache-2.0
"""Between the store's types and etcd's messages, for the client side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def key_value(message: pb.KeyValue) -> KeyValue:
    """Read a key value."""
    return KeyValue(
        key_text(message.key),
        message.value,
        message.create_revision,
        message.mod_revision,
        message.version,
        message.lease,
    )


def watch_events(messages: Iterable[pb.Event]) -> list[WatchEvent]:
    """Read the events of a watch."""
    return [
        WatchEvent("delete" if message.type == _DELETE else "put", key_value(message.kv))
        for message in messages
    ]


def txn_request(
    compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation]
) -> pb.TxnRequest:
    """Spell a transaction; raises ``StoreRefused`` for a compare that cannot be spelled."""
    return pb.TxnRequest(
        compare=[_compare(compare) for compare in compares],
        success=[_request_op(operation) for operation in then],
        failure=[_request_op(operation) for operation in otherwise],
    )


def txn_result(message: pb.TxnResponse) -> TxnResult:
    """Read what a transaction did."""
    return TxnResult(
        message.succeeded,
        message.header.revision,
        tuple(_response(response) for response in message.responses),
    )


def _compare(compare: Compare) -> pb.Compare:
    interval = Interval.of(compare.key, prefix=compare.prefix)
    target, field = _TARGETS[compare.target]
    try:
        return pb.Compare(
            result=_RESULTS[compare.op],
            target=target,
            key=interval.start,
            range_end=interval.end,
            **{field: compare.operand},
        )
    except TypeError:
        raise StoreRefused(f"cannot compare {compare.target} with {compare.operand!r}") from None


def _request_op(operation: Operation) -> pb.RequestOp:
    if isinstance(operation, Put):
        put = pb.PutRequest(
            key=key_bytes(operation.key), value=operation.value, lease=operation.lease
        )
        return pb.RequestOp(request_put=put)
    interval = Interval.of(operation.key, prefix=operation.prefix)
    span = {"key": interval.start, "range_end": interval.end}
    if isinstance(operation, Delete):
        return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(**span))
    return pb.RequestOp(request_range=pb.RangeRequest(**span))


def _response(message: pb.ResponseOp) -> tuple[KeyValue, ...] | int | None:
    kind = message.WhichOneof("response")
    if kind == "response_range":
        return tuple(map(key_value, message.response_range.kvs))
    if kind == "response_delete_range":
        deleted: int = message.response_delete_range.deleted
        return deleted
    return None
