# SPDX-License-Identifier: Apache-2.0
"""etcd's answers and errors, judged; its messages, its versions, and what is measured of calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rdzv.store
from agent.telemetry.metrics import UNSEEN_MAX, CountedStore, StoreMetrics
from rdzv.errors import StoreRefused, StoreUnavailable
from rdzv.pacing import ANSWERS, ATTEMPT_S, MAX_ATTEMPT_S, Patience
from rdzv.store import Compare, Delete, Operation, Put, Range, etcd_pb2
from rdzv.store import etcd_pb2 as pb
from rdzv.store.etcd.answers import (
    Outcome,
    StatusCode,
    judge_version,
    outcome,
    progress_is_certain,
    txn_request,
)
from rdzv.store.interface import DEFAULT_TIMEOUT_S
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.clocks.hand import HandClock
from tests.support.store.cut import Cut

ERRORS: dict[Outcome, list[tuple[StatusCode, str]]] = {
    Outcome.NOT_APPLIED: [
        (
            StatusCode.UNAVAILABLE,
            "failed to connect to all addresses; last error: UNKNOWN: Connection refused",
        ),
        (StatusCode.UNAVAILABLE, "DNS resolution failed for etcd:2379"),
        (StatusCode.UNAVAILABLE, "etcdserver: no leader"),
        (StatusCode.RESOURCE_EXHAUSTED, "etcdserver: too many requests"),
    ],
    Outcome.AMBIGUOUS: [
        (StatusCode.UNAVAILABLE, "Socket closed"),
        (StatusCode.UNAVAILABLE, "Stream removed (ping timeout)"),
        (StatusCode.UNAVAILABLE, "etcdserver: leader changed"),
        (StatusCode.UNAVAILABLE, "etcdserver: server stopped"),
        (StatusCode.UNAVAILABLE, "etcdserver: request timed out"),
        (
            StatusCode.UNAVAILABLE,
            "etcdserver: request timed out, possibly due to previous leader failure",
        ),
        (StatusCode.UNKNOWN, "context deadline exceeded"),
        (StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"),
        (StatusCode.CANCELLED, ""),
        (StatusCode.INTERNAL, ""),
    ],
    Outcome.LEASE_LOST: [(StatusCode.NOT_FOUND, "etcdserver: requested lease not found")],
    Outcome.LEASE_EXISTS: [(StatusCode.FAILED_PRECONDITION, "etcdserver: lease already exists")],
    Outcome.COMPACTED: [
        (StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted")
    ],
    Outcome.FULL: [(StatusCode.RESOURCE_EXHAUSTED, "mvcc: database space exceeded")],
    Outcome.LOGIN_NEEDED: [
        (StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token"),
        (StatusCode.INVALID_ARGUMENT, "etcdserver: user name is empty"),
        (StatusCode.INVALID_ARGUMENT, "etcdserver: revision of auth store is old"),
    ],
    Outcome.NO_LOGIN: [
        (StatusCode.FAILED_PRECONDITION, "etcdserver: authentication is not enabled")
    ],
    Outcome.REFUSED: [
        (StatusCode.OUT_OF_RANGE, "required revision is a future revision"),
        (StatusCode.PERMISSION_DENIED, "etcdserver: permission denied"),
        (
            StatusCode.INVALID_ARGUMENT,
            "etcdserver: authentication failed, invalid user ID or password",
        ),
        (
            StatusCode.UNKNOWN,
            "auth: authentication failed, password was given for no password user",
        ),
        (StatusCode.INVALID_ARGUMENT, "etcdserver: duplicate key given"),
        (StatusCode.UNIMPLEMENTED, "unknown service etcdserverpb.KV"),
    ],
}


@pytest.mark.parametrize(
    ("code", "message", "verdict"),
    [(*error, verdict) for verdict, errors in ERRORS.items() for error in errors],
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


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        (Put("", b""), "request_put"),
        (Delete(""), "request_delete_range"),
        (Range(""), "request_range"),
    ],
)
def test_an_operation_whose_fields_are_all_empty_is_still_one(
    operation: Operation, kind: str
) -> None:
    request = txn_request([], [operation], [operation])
    sent = pb.TxnRequest.FromString(request.SerializeToString())
    assert [op.WhichOneof("request") for op in (*sent.success, *sent.failure)] == [kind, kind]


def test_each_part_of_a_transaction_keeps_its_place_and_its_words() -> None:
    request = txn_request(
        [Compare("/a", "mod", "=", 7), Compare("/b", "value", "!=", b"v", prefix=True)],
        [Put("/c", b"new", lease=9), Delete("/d", prefix=True)],
        [Range("/e", prefix=True, revision=5)],
    )
    first, second = request.compare
    assert (first.key, first.range_end, first.mod_revision) == (b"/a", b"", 7)
    assert (first.target, first.result) == (pb.Compare.MOD, pb.Compare.EQUAL)
    assert (second.key, second.range_end, second.value) == (b"/b", b"/c", b"v")
    assert (second.target, second.result) == (pb.Compare.VALUE, pb.Compare.NOT_EQUAL)
    put, delete = request.success[0].request_put, request.success[1].request_delete_range
    assert (put.key, put.value, put.lease) == (b"/c", b"new", 9)
    assert (delete.key, delete.range_end) == (b"/d", b"/e")
    (read,) = (op.request_range for op in request.failure)
    assert (read.key, read.range_end, read.revision) == (b"/e", b"/f", 5)


def test_a_compare_that_cannot_be_spelled_is_refused_in_one_sentence() -> None:
    with pytest.raises(StoreRefused, match="cannot compare version with b'1'"):
        txn_request([Compare("/a", "version", "=", b"1")], [], [])


def test_the_watch_is_behind_for_as_long_as_an_answer_is_ahead_of_it(clock: HandClock) -> None:
    metrics = StoreMetrics(clock)
    assert metrics.unseen_for_s(0) == 0.0
    metrics.answered(5)
    clock.now_s += 3
    metrics.answered(7)
    clock.now_s += 2
    assert metrics.unseen_for_s(4) == 5.0
    assert metrics.unseen_for_s(5) == 2.0
    assert metrics.unseen_for_s(7) == 0.0
    metrics.answered(6)  # an answer that was overtaken
    assert metrics.unseen_for_s(7) == 0.0


def test_a_store_that_was_restored_is_not_behind_for_ever(clock: HandClock) -> None:
    metrics = StoreMetrics(clock)
    metrics.unseen_for_s(900)
    metrics.answered(1000)
    assert metrics.unseen_for_s(12) == 0.0


def test_what_nobody_asks_for_stays_bounded(clock: HandClock) -> None:
    metrics = StoreMetrics(clock)
    for revision in range(1, 10 * UNSEEN_MAX):
        metrics.answered(revision)
    assert metrics.unseen_for_s(UNSEEN_MAX) == 0.0


async def test_calls_are_timed_and_failures_counted_by_kind(clock: HandClock) -> None:
    cut = Cut()
    metrics = StoreMetrics(clock)
    store = CountedStore(MemoryStore(MemoryEngine(), faults=cut), metrics)
    await store.txn([], [Put("/a", b"1")])
    await store.range("/a")
    cut.cut()
    with pytest.raises(StoreUnavailable):
        await store.range("/a", timeout_s=0.05)
    text = metrics.text()
    assert 'muster_store_call_seconds_count{call="range"} 2.0' in text
    assert 'muster_store_call_seconds_count{call="txn"} 1.0' in text
    assert 'muster_store_errors_total{kind="StoreUnavailable"} 1.0' in text
    assert metrics.unseen_for_s(1) >= 0.0
    await store.close()


PROTO = Path(rdzv.store.__file__).parent / "proto" / "etcd.proto"
FIELD = re.compile(r"^\s+(?:repeated )?\w+ (?P<name>\w+) = (?P<number>\d+);", re.MULTILINE)


def test_the_stubs_are_fresh() -> None:
    text = PROTO.read_text()
    declared = {
        block[0]: {match["name"]: int(match["number"]) for match in FIELD.finditer(block[1])}
        for block in re.findall(r"^message (\w+) \{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    }
    generated = {
        name: {field.name: field.number for field in message.fields}
        for name, message in etcd_pb2.DESCRIPTOR.message_types_by_name.items()
    }
    assert generated == declared, "run scripts/generate-stubs"


def test_the_stubs_can_live_beside_another_etcd_library() -> None:
    assert etcd_pb2.DESCRIPTOR.package == "muster.etcd"
    assert etcd_pb2.DESCRIPTOR.name == "rdzv/store/etcd.proto"


@pytest.mark.parametrize(
    ("version", "level", "part"),
    [
        ("3.6.16", "ok", "3.6.16"),
        ("3.6.14", "ok", ""),
        ("3.7.1", "ok", ""),
        ("4.0.0", "ok", ""),
        ("3.5.33", "ok", ""),
        ("3.6.13", "warning", "may not read"),
        ("3.5.23", "warning", "may not read"),
        ("3.6.5", "warning", "may not read"),
        ("3.7.0", "warning", "may not read"),
        ("3.6.4", "fault", "a lease that is gone"),
        ("3.5.22", "fault", "a lease that is gone"),
        ("3.5.17", "fault", "miss events"),
        ("3.5.12", "fault", "frozen"),
        ("3.5.7", "fault", "ahead of pending events"),
        ("3.5.1", "fault", "lose writes"),
        ("3.4.45", "fault", "no longer maintained"),
        ("3.4.24", "fault", "ahead of pending events"),
        ("3.4.23", "fault", "frozen"),
        ("3.3.27", "fault", "frozen"),
        ("3.6.0+memory", "warning", "keeps nothing"),
        ("nightly", "warning", "not a known version"),
        ("", "warning", "not a known version"),
    ],
)
def test_a_version_is_judged_with_the_reason(version: str, level: str, part: str) -> None:
    found, why = judge_version(version)
    assert found == level
    assert part in why


@pytest.mark.parametrize(
    ("version", "untold"),
    [
        pytest.param("3.5.8", "ahead of pending events", id="mended in 3.5"),
        pytest.param("3.4.25", "ahead of pending events", id="mended in 3.4"),
        pytest.param("3.5.1", "may not read", id="not fatal beside what is"),
        pytest.param("3.4.23", "lose writes", id="not that old"),
    ],
)
def test_what_does_not_matter_of_a_version_is_not_told(version: str, untold: str) -> None:
    assert untold not in judge_version(version)[1]


@pytest.mark.parametrize(
    ("version", "certain"),
    [
        ("3.7.1", True),
        ("3.6.0+memory", True),
        ("3.6.0-rc.2", True),
        ("3.5.8", True),
        ("3.5.7", False),
        ("3.4.25", True),
        ("3.4.24", False),
        ("3.3.27", False),
        ("nightly", False),
        ("", False),
    ],
)
def test_progress_is_relied_on_by_version(version: str, certain: bool) -> None:
    assert progress_is_certain(version) is certain


def after(*answers_s: float) -> Patience:
    patience = Patience()
    for took_s in answers_s:
        patience.answered(took_s)
    return patience


@pytest.mark.parametrize(
    ("answers_s", "attempt_s"),
    [
        pytest.param([], ATTEMPT_S, id="nothing answered yet"),
        pytest.param([0.001], ATTEMPT_S, id="fast"),
        pytest.param([0.16], ATTEMPT_S, id="fast enough for the usual time"),
        pytest.param([0.2], 1.2, id="slow"),
        pytest.param([0.25], 1.5, id="slower"),
        pytest.param([0.6], MAX_ATTEMPT_S, id="up to a bound"),
        pytest.param([0.9] * 20, MAX_ATTEMPT_S, id="an election"),
        pytest.param([*[0.9] * 20, 0.002], ATTEMPT_S, id="one fast answer ends an election"),
        pytest.param([0.002, *[0.4] * (ANSWERS - 1)], ATTEMPT_S, id="few slow answers"),
        pytest.param([0.002, *[0.4] * ANSWERS], MAX_ATTEMPT_S, id="enough of them"),
    ],
)
def test_a_line_is_given_time_by_its_answers(answers_s: list[float], attempt_s: float) -> None:
    assert after(*answers_s).attempt_s == pytest.approx(attempt_s)


def test_an_attempt_is_a_whole_one_within_what_callers_give_by_default() -> None:
    assert MAX_ATTEMPT_S < DEFAULT_TIMEOUT_S


def test_an_attempt_in_vain_lets_the_next_one_wait_for_longer() -> None:
    patience = after(*[0.002] * ANSWERS)
    patience.missed(ATTEMPT_S)
    assert patience.attempt_s == MAX_ATTEMPT_S
    patience.answered(0.2)
    assert patience.attempt_s == pytest.approx(1.2)


def test_a_line_that_has_just_become_slow_lets_one_expect_the_same_of_the_next() -> None:
    next_one = after(*[0.002] * ANSWERS)
    next_one.expect(after(*[0.002] * ANSWERS, 0.4))
    assert next_one.attempt_s == MAX_ATTEMPT_S
    next_one.answered(0.002)
    assert next_one.attempt_s == ATTEMPT_S


@pytest.mark.parametrize(("line_s", "attempt_s"), [([0.25], 1.5), ([], ATTEMPT_S)])
def test_a_fast_line_that_is_left_tells_nothing_of_the_next(
    line_s: list[float], attempt_s: float
) -> None:
    line = after(*line_s)
    line.expect(after(0.002))
    line.expect(Patience())
    assert line.attempt_s == pytest.approx(attempt_s)


@pytest.mark.parametrize(
    ("line_s", "waited_s", "whole", "blamed"),
    [
        (0.002, 0.3, False, True),
        (0.002, ATTEMPT_S, True, True),
        (0.4, 0.3, False, False),
        (0.4, ATTEMPT_S, False, True),
        (0.4, MAX_ATTEMPT_S, True, True),
    ],
)
def test_a_short_attempt_on_a_slow_line_is_no_reason_to_leave(
    line_s: float, waited_s: float, *, whole: bool, blamed: bool
) -> None:
    assert after(line_s).whole(waited_s) is whole
    assert after(line_s).blames(waited_s) is blamed
