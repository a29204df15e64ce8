# SPDX-License-Identifier: Apache-2.0
"""How etcd's errors are judged: a write that may be in must never count as not applied."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.store.etcd.answers import Outcome, StatusCode, outcome


@pytest.mark.parametrize(
    ("code", "message", "verdict"),
    [
        (
            StatusCode.UNAVAILABLE,
            "failed to connect to all addresses; last error: UNKNOWN: Connection refused",
            Outcome.NOT_APPLIED,
        ),
        (StatusCode.UNAVAILABLE, "DNS resolution failed for etcd:2379", Outcome.NOT_APPLIED),
        (StatusCode.UNAVAILABLE, "etcdserver: no leader", Outcome.NOT_APPLIED),
        (StatusCode.RESOURCE_EXHAUSTED, "etcdserver: too many requests", Outcome.NOT_APPLIED),
        (StatusCode.UNAVAILABLE, "Socket closed", Outcome.AMBIGUOUS),
        (StatusCode.UNAVAILABLE, "Stream removed (ping timeout)", Outcome.AMBIGUOUS),
        (StatusCode.UNAVAILABLE, "etcdserver: leader changed", Outcome.AMBIGUOUS),
        (StatusCode.UNAVAILABLE, "etcdserver: server stopped", Outcome.AMBIGUOUS),
        (StatusCode.UNAVAILABLE, "etcdserver: request timed out", Outcome.AMBIGUOUS),
        (
            StatusCode.UNAVAILABLE,
            "etcdserver: request timed out, possibly due to previous leader failure",
            Outcome.AMBIGUOUS,
        ),
        (StatusCode.UNKNOWN, "context deadline exceeded", Outcome.AMBIGUOUS),
        (StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", Outcome.AMBIGUOUS),
        (StatusCode.CANCELLED, "", Outcome.AMBIGUOUS),
        (StatusCode.INTERNAL, "", Outcome.AMBIGUOUS),
        (StatusCode.NOT_FOUND, "etcdserver: requested lease not found", Outcome.LEASE_LOST),
        (StatusCode.FAILED_PRECONDITION, "etcdserver: lease already exists", Outcome.LEASE_EXISTS),
        (
            StatusCode.OUT_OF_RANGE,
            "etcdserver: mvcc: required revision has been compacted",
            Outcome.COMPACTED,
        ),
        (StatusCode.OUT_OF_RANGE, "required revision is a future revision", Outcome.REFUSED),
        (StatusCode.RESOURCE_EXHAUSTED, "mvcc: database space exceeded", Outcome.FULL),
        (StatusCode.PERMISSION_DENIED, "etcdserver: permission denied", Outcome.REFUSED),
        (StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token", Outcome.LOGIN_NEEDED),
        (StatusCode.INVALID_ARGUMENT, "etcdserver: user name is empty", Outcome.LOGIN_NEEDED),
        (
            StatusCode.INVALID_ARGUMENT,
            "etcdserver: revision of auth store is old",
            Outcome.LOGIN_NEEDED,
        ),
        (
            StatusCode.INVALID_ARGUMENT,
            "etcdserver: authentication failed, invalid user ID or password",
            Outcome.REFUSED,
        ),
        (
            StatusCode.UNKNOWN,
            "auth: authentication failed, password was given for no password user",
            Outcome.REFUSED,
        ),
        (
            StatusCode.FAILED_PRECONDITION,
            "etcdserver: authentication is not enabled",
            Outcome.NO_LOGIN,
        ),
        (StatusCode.INVALID_ARGUMENT, "etcdserver: duplicate key given", Outcome.REFUSED),
        (StatusCode.UNIMPLEMENTED, "unknown service etcdserverpb.KV", Outcome.REFUSED),
    ],
)
def test_every_known_error(code: StatusCode, message: str, verdict: Outcome) -> None:
    assert outcome(code, message) is verdict


@given(
    st.sampled_from(
        [
            StatusCode.UNAVAILABLE,
            StatusCode.UNKNOWN,
            StatusCode.DEADLINE_EXCEEDED,
            StatusCode.CANCELLED,
            StatusCode.ABORTED,
            StatusCode.INTERNAL,
        ]
    ),
    st.text(),
)
def test_what_is_not_known_is_ambiguous(code: StatusCode, message: str) -> None:
    assert outcome(code, message) is Outcome.AMBIGUOUS
