# SPDX-License-Identifier: Apache-2.0
"""The meaning of an etcd error for the request: pure, from status code and message.

etcd reports many different things under one status code, so its message decides. The dangerous
mistake is to call a write that was applied "not applied"; everything unknown is ambiguous.
"""

from __future__ import annotations

from enum import Enum, auto

from rdzv.flags import named


class StatusCode(Enum):
    """gRPC's codes, by their numbers on the wire."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class StatusError(Exception):
    """The end of a call with another code than OK, of the server's or of the transport's."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message or code.name)
        self.code = code


class Outcome(Enum):
    """The outcome of a request that was answered by an error."""

    NOT_APPLIED = auto()
    AMBIGUOUS = auto()
    REFUSED = auto()
    FULL = auto()
    """Refused for want of space, perhaps after it was applied: a retry would do no better."""
    LOGIN_NEEDED = auto()
    """Refused for its token, before anything was done: with a new one it may pass."""
    NO_LOGIN = auto()
    """Authentication is off: the store takes no password."""
    EXISTS = auto()
    """A user or role of that name exists."""
    MISSING = auto()
    """There is no user or role of that name."""
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
    # etcd, before it proposes a write, and also after it has applied the one that made it full.
    ("mvcc: database space exceeded", Outcome.FULL),
    ("etcdserver: authentication is not enabled", Outcome.NO_LOGIN),
    # etcd also reports this, with the code for the unknown, for a user made without a password.
    ("authentication failed", Outcome.REFUSED),
    ("etcdserver: invalid auth token", Outcome.LOGIN_NEEDED),
    ("etcdserver: revision of auth store is old", Outcome.LOGIN_NEEDED),
    ("etcdserver: user name is empty", Outcome.LOGIN_NEEDED),
    ("etcdserver: user name already exists", Outcome.EXISTS),
    ("etcdserver: role name already exists", Outcome.EXISTS),
    ("etcdserver: user name not found", Outcome.MISSING),
    ("etcdserver: role name not found", Outcome.MISSING),
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
    """Classify one error of a unary call."""
    for text, verdict in _BY_MESSAGE:
        if text in message:
            return verdict
    return Outcome.REFUSED if code in _REFUSALS else Outcome.AMBIGUOUS


NO_SPACE_CURE = "etcdctl compact, then etcdctl defrag on every member, then etcdctl alarm disarm"

_NOT_VERIFIED = (
    f"the store's certificate does not come from the authority in {named('--etcd-cacert')}, is not"
    " for this host name, or is out of date; see docs/security.md#set-up"
)
_NO_TLS = (
    "the two do not agree on TLS: check that the endpoint speaks it, and"
    f" {named('--etcd-cert')}; see docs/security.md#set-up"
)
_EXPLANATIONS = (
    (
        "mvcc: database space exceeded",
        f"the store takes no writes (NOSPACE) until there is room: {NO_SPACE_CURE}; see"
        " docs/faq.md#etcdserver-mvcc-database-space-exceeded",
    ),
    ("CERTIFICATE_VERIFY_FAILED", _NOT_VERIFIED),
    ("BAD_SIGNATURE", _NOT_VERIFIED),
    ("Hostname Verification Check failed", _NOT_VERIFIED),
    ("TSI_PROTOCOL_FAILURE", _NO_TLS),
    ("Handshake read failed", _NO_TLS),
    ("TLS handshake failed", _NO_TLS),
    (
        "etcdserver: user name is empty",
        f"the store requires authentication: give {named('--etcd-user')} with"
        f" --etcd-password-file, or a client certificate in {named('--etcd-cert')}; see"
        " docs/security.md#set-up",
    ),
    (
        "etcdserver: permission denied",
        "permission denied: muster store-role shows what a job needs; see docs/security.md#set-up",
    ),
)


def explained(message: str) -> str:
    """Return the message of an error, with what to do about it if that is known."""
    for text, sentence in _EXPLANATIONS:
        if text in message:
            return f"{message}: {sentence}"
    return message
