# SPDX-License-Identifier: Apache-2.0
"""The meaning of what etcd answers: messages, errors and versions. Pure.

etcd reports many different things under one status code, so its message decides. The dangerous
mistake is to call a write that was applied "not applied"; everything unknown is ambiguous. Which
versions are fit for a job is from etcd's change logs, and from what was measured on 3.4.23, 3.5.1
and 3.6.16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any, Literal

from rdzv.dataclass import dataclass
from rdzv.errors import StoreRefused
from rdzv.sentences import named
from rdzv.store import etcd_pb2 as pb
from rdzv.store.interface import (
    Compare,
    Delete,
    Interval,
    KeyValue,
    Operation,
    Put,
    TxnResult,
    WatchEvent,
    key_bytes,
    key_text,
)

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

FLOOR = "3.5.23 or 3.6.5"

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")

END_OF_LIFE = (3, 5)
"""The oldest release line that is still maintained."""


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


def explained(message: str) -> str:
    """Return the message of an error, with what to do about it if that is known."""
    for text, sentence in _EXPLANATIONS:
        if text in message:
            return f"{message}: {sentence}"
    return message


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


Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Defect:
    """A defect of etcd and, for each release line, the first release without it.

    Lines older than any named have it in all releases, newer ones in none. ``fatal``: a job can be
    harmed by it whatever it does.
    """

    what: str
    fixed_in: tuple[Version, ...]
    fatal: bool = True
    since: Version = (3, 0, 0)

    def has(self, version: Version) -> bool:
        """Return whether ``version`` has the defect."""
        if version < self.since:
            return False
        line = [fixed for fixed in self.fixed_in if fixed[:2] == version[:2]]
        return version < line[0] if line else version[:2] < min(self.fixed_in)[:2]


EARLY_PROGRESS = Defect(
    "it reports the progress of a watch ahead of pending events (etcd#15220)",
    ((3, 4, 25), (3, 5, 8)),
)

DEFECTS = (
    Defect("it can lose writes when it is killed", ((3, 5, 3),), since=(3, 5, 0)),
    Defect(
        "a leader that was frozen revokes leases that were renewed meanwhile: healthy members are"
        " lost",
        ((3, 4, 31), (3, 5, 13)),
    ),
    EARLY_PROGRESS,
    Defect("a watch can miss events after a compaction", ((3, 4, 36), (3, 5, 18))),
    Defect(
        "it confirms the renewal of a lease that is gone: a member does not learn that it is lost",
        ((3, 4, 38), (3, 5, 23), (3, 6, 5)),
    ),
    Defect(
        "a watch can show a user keys that the user may not read",
        ((3, 5, 33), (3, 6, 14), (3, 7, 1)),
        fatal=False,
    ),
)


def parse_version(text: str) -> Version | None:
    """Parse a version as etcd reports it; return None for what is none."""
    match = _VERSION.match(text)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


def progress_is_certain(text: str) -> bool:
    """Return whether a server of this version reports progress only after the events."""
    version = parse_version(text)
    return version is not None and not EARLY_PROGRESS.has(version)


def is_embedded(text: str) -> bool:
    """Return whether a version is that of the embedded store."""
    return text.endswith("+memory")


def judge_version(text: str) -> tuple[Literal["ok", "warning", "fault"], str]:
    """Judge whether a server of this version is fit for a job; return why not, too."""
    version = parse_version(text)
    if version is None:
        return "warning", f"{text!r} is not a known version of etcd"
    if is_embedded(text):
        return (
            "warning",
            "the embedded store keeps nothing across a restart: use etcd in production",
        )
    defects = [defect for defect in DEFECTS if defect.has(version)]
    fatal = [defect.what for defect in defects if defect.fatal]
    if fatal:
        return "fault", f"etcd {text}: {'; '.join(fatal)}"
    if version[:2] < END_OF_LIFE:
        return "fault", f"etcd {text} is of a release line that is no longer maintained"
    if defects:
        return "warning", f"etcd {text}: {'; '.join(defect.what for defect in defects)}"
    return "ok", f"etcd {text}"
