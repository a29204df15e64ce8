# SPDX-License-Identifier: Apache-2.0
"""Each of Muster's calls as the client of the etcd3 package 0.12.0 makes it. All of this blocks.

The package is imported with Muster's stubs in place of its own. Its generated code is from 2020: no
maintained protobuf loads it, and as it claims etcd's message names for itself, no other etcd
library could be used beside it. The package takes its messages and stubs from ``etcd3.etcdrpc``
alone, so that module is put there before the import.

Importing this raises ``ModuleNotFoundError`` if the package is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from copy import copy
from types import ModuleType
from typing import Any

import grpc

from rdzv.store import etcd_pb2 as pb
from rdzv.store.etcd.answers import StatusCode, StatusError
from rdzv.store.etcd.endpoint import (
    COMPACT,
    GRANT,
    KEEP_ALIVE,
    RANGE,
    REVOKE,
    STATUS,
    TXN,
    Metadata,
    Method,
)
from rdzv.store.etcd.endpoint import WATCH as WATCH_METHOD


def name_of(method: Method) -> str:
    """Return the last part of the path, by which the package names its stubs."""
    return method.path.rpartition("/")[2]


class _Stub:
    """The callables of one channel, by the names under which the package looks for them."""

    Watch: Any
    unary: tuple[Method, ...] = ()
    streams: tuple[Method, ...] = ()

    def __init__(self, channel: Any) -> None:
        for methods, make in (
            (self.unary, channel.unary_unary),
            (self.streams, channel.stream_stream),
        ):
            for method in methods:
                call = make(
                    method.path,
                    request_serializer=method.request.SerializeToString,
                    response_deserializer=method.response.FromString,
                )
                setattr(self, name_of(method), call)


class KVStub(_Stub):
    """Reads and writes."""

    unary = (RANGE, TXN, COMPACT)


class LeaseStub(_Stub):
    """Leases; a renewal is a stream here, as the package wants it."""

    unary = (GRANT, REVOKE)
    streams = (KEEP_ALIVE,)


class WatchStub(_Stub):
    """Watches."""

    streams = (WATCH_METHOD,)


class MaintenanceStub(_Stub):
    """The status of a member."""

    unary = (STATUS,)


class ClusterStub(_Stub):
    """Members: no call that Muster makes."""


def _stubs() -> ModuleType:
    module = ModuleType("etcd3.etcdrpc", "Muster's stubs, for the etcd3 package.")
    vars(module).update({name: value for name, value in vars(pb).items() if name[0] != "_"})
    for stub in (KVStub, LeaseStub, WatchStub, MaintenanceStub, ClusterStub):
        setattr(module, stub.__name__, stub)
    return module


sys.modules["etcd3.etcdrpc"] = _stubs()

import etcd3  # noqa: E402
import etcd3.transactions  # noqa: E402
import etcd3.watch  # noqa: E402

Etcd3Client: Any = etcd3.Etcd3Client
Etcd3Exception: type[Exception] = etcd3.Etcd3Exception
Watcher: Any = etcd3.watch.Watcher
transactions: Any = etcd3.transactions


class _Lease(transactions.BaseCompare):  # type: ignore[misc]
    """The one comparison that the package does not have."""

    def build_compare(self, compare: Any) -> None:
        compare.target = pb.Compare.LEASE
        compare.lease = int(self.value)


_COMPARES: dict[int, tuple[Any, str]] = {
    pb.Compare.CREATE: (transactions.Create, "create_revision"),
    pb.Compare.MOD: (transactions.Mod, "mod_revision"),
    pb.Compare.VERSION: (transactions.Version, "version"),
    pb.Compare.VALUE: (transactions.Value, "value"),
    pb.Compare.LEASE: (_Lease, "lease"),
}


class _KeptAnswer:
    """A stub that keeps the answer: the package's result of a transaction has no revision."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self.answer: Any = None

    def Txn(self, *args: Any, **options: Any) -> Any:  # noqa: N802
        self.answer = self._stub.Txn(*args, **options)
        return self.answer


def caller_of(client: Any, timeout_s: float, metadata: Metadata) -> Any:
    """Return a client with the connection of ``client`` and its own deadline and metadata.

    The package has one deadline and one token a client.
    """
    caller = copy(client)
    caller.timeout, caller.metadata = timeout_s, metadata
    return caller


def make_call(
    client: Any, method: Method, request: Any, timeout_s: float, metadata: Metadata
) -> Any:
    """Make one call; raise ``StatusError`` if it fails."""
    caller = caller_of(client, timeout_s, metadata)
    make = _BY_PACKAGE.get(method.path)
    try:
        if make is None:
            return _over_its_channel(caller, method, request)
        return make(caller, request)
    except (grpc.RpcError, Etcd3Exception) as error:
        raise status_error(error) from None


def status_error(error: BaseException) -> StatusError:
    """Convert an error; the package's own ones hide what they come from."""
    cause = error if isinstance(error, grpc.RpcError) else error.__context__
    if isinstance(cause, grpc.Call):
        return StatusError(StatusCode(cause.code().value[0]), cause.details())
    return StatusError(StatusCode.UNKNOWN, repr(error))


def _range(client: Any, request: pb.RangeRequest) -> Any:
    if request.limit or request.revision:
        # The package supports neither.
        return _over_its_channel(client, RANGE, request)
    if request.range_end:
        return client.get_range_response(request.key, request.range_end)
    return client.get_response(request.key)


def _txn(client: Any, request: pb.TxnRequest) -> Any:
    if any(op.request_range.revision for op in (*request.success, *request.failure)):
        # The package's reads within a transaction ignore the revision, silently.
        return _over_its_channel(client, TXN, request)
    client.kvstub = kept = _KeptAnswer(client.kvstub)
    client.transaction(
        [_compare(compare) for compare in request.compare],
        _operations(request.success),
        _operations(request.failure),
    )
    return kept.answer


def _compare(message: pb.Compare) -> Any:
    kind, field = _COMPARES[message.target]
    compare = kind(message.key, message.range_end or None)
    compare.op, compare.value = message.result, getattr(message, field)
    return compare


def _operations(messages: Iterable[pb.RequestOp]) -> list[Any]:
    operations = []
    for message in messages:
        kind = message.WhichOneof("request")
        request = getattr(message, kind)
        if kind == "request_put":
            operation = transactions.Put(request.key, request.value, request.lease)
        elif kind == "request_delete_range":
            operation = transactions.Delete(request.key, request.range_end or None)
        else:
            operation = transactions.Get(request.key, request.range_end or None)
        operations.append(operation)
    return operations


def _grant(client: Any, request: pb.LeaseGrantRequest) -> None:
    client.lease(request.TTL, request.ID)


def _keep_alive(client: Any, request: pb.LeaseKeepAliveRequest) -> Any:
    # Read to the end of the stream: otherwise the package leaves it open.
    (response,) = client.refresh_lease(request.ID)
    return response


def _revoke(client: Any, request: pb.LeaseRevokeRequest) -> None:
    client.revoke_lease(request.ID)


def _compact(client: Any, request: pb.CompactionRequest) -> None:
    client.compact(request.revision)


def _over_its_channel(client: Any, method: Method, request: Any) -> Any:
    """Make a call that the package has no method for, or only one that drops most of the answer."""
    send = client.channel.unary_unary(
        method.path,
        request_serializer=method.request.SerializeToString,
        response_deserializer=method.response.FromString,
    )
    return send(request, timeout=client.timeout, metadata=client.metadata)


_BY_PACKAGE: dict[str, Callable[[Any, Any], Any]] = {
    RANGE.path: _range,
    TXN.path: _txn,
    GRANT.path: _grant,
    KEEP_ALIVE.path: _keep_alive,
    REVOKE.path: _revoke,
    COMPACT.path: _compact,
}
