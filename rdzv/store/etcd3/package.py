# SPDX-License-Identifier: Apache-2.0
"""The etcd3 package 0.12.0, imported with Muster's stubs in place of its own.

Its generated code is from 2020: no maintained protobuf loads it, and as it claims etcd's message
names for itself, no other etcd library could be used beside it. The package takes its messages and
stubs from ``etcd3.etcdrpc`` alone, so that module is put there before the import.

Importing this raises ``ModuleNotFoundError`` if the package is not installed.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from rdzv.store.etcd.endpoint import COMPACT, GRANT, KEEP_ALIVE, RANGE, REVOKE, STATUS, TXN, Method
from rdzv.store.etcd.endpoint import WATCH as WATCH_METHOD
from rdzv.store.pb import etcd_pb2 as pb


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
