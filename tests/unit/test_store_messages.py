# SPDX-License-Identifier: Apache-2.0
"""Transactions spelled as etcd's messages."""

from __future__ import annotations

import pytest

from rdzv.errors import StoreRefused
from rdzv.store import Compare, Delete, Operation, Put, Range
from rdzv.store import etcd_pb2 as pb
from rdzv.store.etcd.answers import txn_request


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
