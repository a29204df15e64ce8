# SPDX-License-Identifier: Apache-2.0
"""What an etcd error says about the request: pure, from status code and message.

etcd reports many different things under one status code, so its message decides. The dangerous
mistake is to call a write that was applied "not applied"; everything unknown is ambiguous.
"""

from __future__ import annotations

from enum import Enum, auto

from grpc import StatusCode


class Outcome(Enum):
    """What became of a request that got an error for an answer."""

    NOT_APPLIED = auto()
    AMBIGUOUS = auto()
    REFUSED = auto()
    LEASE_LOST = auto()
    LEASE_EXISTS = auto()
    COMPACTED = auto()


_BY_MESSAGE = (
    # The client library's own: no connection, hence nothing was sent.
    ("failed to connect to all addresses", Outcome.NOT_APPLIED),
    ("DNS resolution failed", Outcome.NOT_APPLIED),
    # etcd, before it proposes anything.
    ("etcdserver: no leader", Outcome.NOT_APPLIED),
    ("etcdserver: too many requests", Outcome.NOT_APPLIED),
    ("etcdserver: rpc not supported for learner", Outcome.NOT_APPLIED),
    ("etcdserver: requested lease not found", Outcome.LEASE_LOST),
    ("etcdserver: lease already exists", Outcome.LEASE_EXISTS),
    ("required revision has been compacted", Outcome.COMPACTED),
)

_REFUSALS = frozenset(
    {
        StatusCode.INVALID_ARGUMENT,
        StatusCode.NOT_FOUND,
        StatusCode.ALREADY_EXISTS,
        StatusCode.PERMISSION_DENIED,
        StatusCode.UNAUTHENTICATED,
        StatusCode.RESOURCE_EXHAUSTED,
        StatusCode.FAILED_PRECONDITION,
        StatusCode.OUT_OF_RANGE,
        StatusCode.UNIMPLEMENTED,
        StatusCode.DATA_LOSS,
    }
)


def outcome(code: StatusCode, message: str) -> Outcome:
    """Judge one error of a unary call."""
    for text, verdict in _BY_MESSAGE:
        if text in message:
            return verdict
    return Outcome.REFUSED if code in _REFUSALS else Outcome.AMBIGUOUS
