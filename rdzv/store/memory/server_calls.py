# SPDX-License-Identifier: Apache-2.0
"""The embedded server's calls: etcd messages in, the engine's answer out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from rdzv.errors import Compacted, LeaseLost, StoreError, StoreFull
from rdzv.store import etcd_pb2 as pb
from rdzv.store.etcd.answers import StatusCode, StatusError
from rdzv.store.interface import Interval, KeyValue, key_bytes
from rdzv.store.memory.actions import Action, Condition, Erase, Operator, Read, Reply, Target, Write
from rdzv.store.memory.engine import VERSION, MemoryEngine
from rdzv.store.memory.served_connection import ServedCall

_TARGETS: dict[int, tuple[Target, str]] = {
    pb.Compare.VERSION: ("version", "version"),
    pb.Compare.CREATE: ("create", "create_revision"),
    pb.Compare.MOD: ("mod", "mod_revision"),
    pb.Compare.VALUE: ("value", "value"),
    pb.Compare.LEASE: ("lease", "lease"),
}
_OPERATORS: dict[int, Operator] = {
    pb.Compare.EQUAL: "=",
    pb.Compare.GREATER: ">",
    pb.Compare.LESS: "<",
    pb.Compare.NOT_EQUAL: "!=",
}
_SORT_KEYS: dict[int, Callable[[KeyValue], Any]] = {
    pb.RangeRequest.KEY: lambda kv: key_bytes(kv.key),
    pb.RangeRequest.VERSION: lambda kv: kv.version,
    pb.RangeRequest.CREATE: lambda kv: kv.create_revision,
    pb.RangeRequest.MOD: lambda kv: kv.mod_revision,
    pb.RangeRequest.VALUE: lambda kv: kv.value,
}


class UnsupportedError(StoreError):
    """A request that etcd can serve and the embedded server cannot."""


def _status(error: StoreError) -> tuple[StatusCode, str]:
    """Return the error in etcd's words, as clients judge by them."""
    if isinstance(error, LeaseLost):
        return StatusCode.NOT_FOUND, "etcdserver: requested lease not found"
    if isinstance(error, Compacted):
        return (
            StatusCode.OUT_OF_RANGE,
            "etcdserver: mvcc: required revision has been compacted",
        )
    if isinstance(error, StoreFull):
        return StatusCode.RESOURCE_EXHAUSTED, str(error)
    if isinstance(error, UnsupportedError):
        return StatusCode.UNIMPLEMENTED, f"the embedded store has no {error}"
    return StatusCode.INVALID_ARGUMENT, f"etcdserver: {error}"


class Answering:
    """The ``Service`` of a call that answers each request with one message."""

    def __init__(self, call: ServedCall, request: Any, answer: Callable[[Any], Any]) -> None:
        self._call = call
        self._request = request
        self._answer = answer

    def take(self, message: bytes) -> None:
        """Take a request."""
        try:
            self._call.send(self._answer(self._request.FromString(message)).SerializeToString())
        except StatusError as refused:
            self._call.finish(refused.code, str(refused))
        except StoreError as error:
            self._call.finish(*_status(error))
        except DecodeError as error:
            self._call.finish(StatusCode.INTERNAL, f"the request cannot be read: {error}")

    def end(self) -> None:
        """Note that the client makes no more requests."""
        self._call.finish(StatusCode.OK)

    def close(self) -> None:
        """Note that the call is over."""


def put_message(kv: KeyValue) -> pb.KeyValue:
    """Convert a key value to a message."""
    return pb.KeyValue(
        key=key_bytes(kv.key),
        create_revision=kv.create_revision,
        mod_revision=kv.mod_revision,
        version=kv.version,
        value=kv.value,
        lease=kv.lease,
    )


class ServedCalls:
    """Every call but the watch."""

    def __init__(self, engine: MemoryEngine) -> None:
        self._engine = engine

    def header(self) -> pb.ResponseHeader:
        """Build the header of a response: who answers, and at which revision."""
        engine = self._engine
        return pb.ResponseHeader(
            cluster_id=engine.cluster_id, member_id=1, revision=engine.revision, raft_term=1
        )

    def range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        """Serve KV.Range."""
        reply = self._engine.read(_interval(request), request.revision)
        return self._range_response(request, reply)

    def put(self, request: pb.PutRequest) -> pb.PutResponse:
        """Serve KV.Put."""
        return self._one(pb.RequestOp(request_put=request)).response_put

    def delete_range(self, request: pb.DeleteRangeRequest) -> pb.DeleteRangeResponse:
        """Serve KV.DeleteRange."""
        operation = pb.RequestOp(request_delete_range=request)
        return self._one(operation).response_delete_range

    def txn(self, request: pb.TxnRequest) -> pb.TxnResponse:
        """Serve KV.Txn."""
        return self._txn(request)

    def compact(self, request: pb.CompactionRequest) -> pb.CompactionResponse:
        """Serve KV.Compact."""
        self._engine.compact(request.revision)
        return pb.CompactionResponse(header=self.header())

    def lease_grant(self, request: pb.LeaseGrantRequest) -> pb.LeaseGrantResponse:
        """Serve Lease.LeaseGrant; without an id the server chooses one."""
        lease_id = request.ID or secrets.randbits(62) + 1
        if not self._engine.grant(lease_id, request.TTL):
            raise StatusError(StatusCode.FAILED_PRECONDITION, "etcdserver: lease already exists")
        return pb.LeaseGrantResponse(header=self.header(), ID=lease_id, TTL=request.TTL)

    def lease_revoke(self, request: pb.LeaseRevokeRequest) -> pb.LeaseRevokeResponse:
        """Serve Lease.LeaseRevoke."""
        self._engine.revoke(request.ID)
        return pb.LeaseRevokeResponse(header=self.header())

    def lease_keep_alive(self, request: pb.LeaseKeepAliveRequest) -> pb.LeaseKeepAliveResponse:
        """Serve Lease.LeaseKeepAlive; answer a lease that is gone with a time to live of 0."""
        try:
            ttl_s = int(self._engine.keep_alive(request.ID))
        except LeaseLost:
            ttl_s = 0
        return pb.LeaseKeepAliveResponse(header=self.header(), ID=request.ID, TTL=ttl_s)

    def lease_time_to_live(self, request: pb.LeaseTimeToLiveRequest) -> pb.LeaseTimeToLiveResponse:
        """Serve Lease.LeaseTimeToLive; answer a lease that is gone with -1."""
        self._engine.expire_leases()
        if request.ID not in self._engine.leases:
            return pb.LeaseTimeToLiveResponse(header=self.header(), ID=request.ID, TTL=-1)
        lease = self._engine.leases[request.ID]
        return pb.LeaseTimeToLiveResponse(
            header=self.header(),
            ID=request.ID,
            TTL=int(lease.deadline_s - self._engine.clock()),
            granted_TTL=lease.ttl_s,
            keys=sorted(lease.keys) if request.keys else (),
        )

    def lease_leases(self, request: pb.LeaseLeasesRequest) -> pb.LeaseLeasesResponse:
        """Serve Lease.LeaseLeases."""
        self._engine.expire_leases()
        leases = [pb.LeaseStatus(ID=lease_id) for lease_id in self._engine.leases]
        return pb.LeaseLeasesResponse(header=self.header(), leases=leases)

    def status(self, request: pb.StatusRequest) -> pb.StatusResponse:
        """Serve Maintenance.Status."""
        size, in_use = self._engine.size_bytes
        return pb.StatusResponse(
            header=self.header(),
            version=VERSION,
            db_size=size,
            db_size_in_use=in_use,
            leader=1,
            raft_term=1,
            raft_index=self._engine.revision,
            raft_applied_index=self._engine.revision,
            errors=self._engine.alarms,
        )

    def alarm(self, request: pb.AlarmRequest) -> pb.AlarmResponse:
        """Serve Maintenance.Alarm: there is never one, but ``etcdctl endpoint health`` asks."""
        return pb.AlarmResponse(header=self.header())

    def auth_status(self, request: pb.AuthStatusRequest) -> pb.AuthStatusResponse:
        """Serve Auth.AuthStatus: there is no authentication."""
        return pb.AuthStatusResponse(header=self.header(), enabled=False)

    def _one(self, operation: pb.RequestOp) -> pb.ResponseOp:
        return self._txn(pb.TxnRequest(success=[operation])).responses[0]

    def _txn(self, request: pb.TxnRequest) -> pb.TxnResponse:
        engine = self._engine
        succeeded, replies = engine.txn(
            [_condition(compare) for compare in request.compare],
            [_action(operation) for operation in request.success],
            [_action(operation) for operation in request.failure],
        )
        ran: Sequence[pb.RequestOp] = request.success if succeeded else request.failure
        return pb.TxnResponse(
            header=self.header(),
            succeeded=succeeded,
            responses=map(self._response, ran, replies),
        )

    def _response(self, operation: pb.RequestOp, reply: Reply) -> pb.ResponseOp:
        kind = operation.WhichOneof("request")
        if kind == "request_range":
            return pb.ResponseOp(
                response_range=self._range_response(operation.request_range, reply)
            )
        if kind == "request_put":
            put = pb.PutResponse(header=self.header())
            if operation.request_put.prev_kv and reply:
                put.prev_kv.CopyFrom(put_message(reply[0]))
            return pb.ResponseOp(response_put=put)
        wanted = reply if operation.request_delete_range.prev_kv else ()
        deleted = pb.DeleteRangeResponse(
            header=self.header(), deleted=len(reply), prev_kvs=map(put_message, wanted)
        )
        return pb.ResponseOp(response_delete_range=deleted)

    def _range_response(self, request: pb.RangeRequest, reply: Reply) -> pb.RangeResponse:
        response = pb.RangeResponse(header=self.header(), count=len(reply))
        if request.count_only:
            return response
        kvs = list(reply)
        if request.sort_target or request.sort_order:
            descending = request.sort_order == pb.RangeRequest.DESCEND
            kvs.sort(key=_SORT_KEYS[request.sort_target], reverse=descending)
        if request.limit:
            response.more = len(kvs) > request.limit
            kvs = kvs[: request.limit]
        response.kvs.extend(map(put_message, kvs))
        if request.keys_only:
            for message in response.kvs:
                message.value = b""
        return response


def _interval(message: Any) -> Interval:
    return Interval(message.key, message.range_end)


def _condition(compare: pb.Compare) -> Condition:
    target, field = _TARGETS[compare.target]
    return Condition(
        _interval(compare), target, _OPERATORS[compare.result], getattr(compare, field)
    )


def _action(operation: pb.RequestOp) -> Action:
    match operation.WhichOneof("request"):
        case "request_range":
            return Read(_interval(operation.request_range), operation.request_range.revision)
        case "request_put":
            put = operation.request_put
            if put.ignore_value or put.ignore_lease:
                raise UnsupportedError("puts that keep the value or the lease")
            return Write(put.key, put.value, put.lease)
        case "request_delete_range":
            return Erase(_interval(operation.request_delete_range))
        case _:
            raise UnsupportedError("nested transactions")
