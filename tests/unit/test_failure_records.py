# SPDX-License-Identifier: Apache-2.0
"""Failures of workers: what is counted, what is kept of them, and what is never shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.rundir.reports import MASK, masked, read_failures
from rdzv.errors import RecordError
from rdzv.records.troubles import Failure, after, is_alike, is_told, ordinal
from rdzv.store import KeyValue

ECC = Failure("b", "digits", 7, 0, "RuntimeError", "CUDA error: uncorrectable ECC", "train.py:31")
PEER = replace(ECC, member="c", rank=1, text="Connection closed by peer", follows=True)


def kv(failure: Failure) -> KeyValue:
    return KeyValue(f"x/failures/{failure.member}", failure.to_json(), 1, 3, 1, 0)


def test_a_failure_says_who_and_what_and_how_often() -> None:
    error = "RuntimeError: CUDA error: uncorrectable ECC (train.py:31)"
    assert ECC.sentence == f"rank 0: {error}"
    assert replace(ECC, count=7).sentence == f"rank 0: {error}, 7th in a row"
    assert Failure("b", "digits", 7, text="it was killed").sentence == "it was killed"
    assert Failure("b", "digits", 7, 0, "KeyboardInterrupt").sentence == "rank 0: KeyboardInterrupt"


def test_a_place_in_the_source_of_gloo_takes_no_room_from_what_is_wrong() -> None:
    place = f"/__w/pytorch/pytorch/{40 * 'long/'}device.cc:84"
    for text in (f"[{place}] Unable to find", f"[enforce fail at {place}] Unable to find"):
        brief = replace(ECC, text=text).brief_error
        assert brief == "RuntimeError: Unable to find (train.py:31)"


@given(st.builds(Failure, st.just("b"), st.text(), st.integers(0), text=st.text(max_size=400)))
def test_a_record_comes_back_as_it_was_in_one_bounded_line(failure: Failure) -> None:
    assert Failure.from_kv(kv(failure)) == replace(failure, mod_revision=3)
    assert len(failure.text) <= 300
    assert failure.text.isprintable()


@pytest.mark.parametrize("changes", [{"count": 0}, {"round": "x"}, {"text": 3}])
def test_i8_other_records_are_none(changes: dict[str, object]) -> None:
    value = json.dumps({**json.loads(ECC.to_json()), **changes}).encode()
    with pytest.raises(RecordError):
        Failure.from_kv(KeyValue("x/failures/b", value, 1, 1, 1, 0))


@pytest.mark.parametrize(
    ("before", "now", "progressed", "count"),
    [
        (None, ECC, False, 1),
        (ECC, replace(ECC, round=8), False, 2),
        (replace(ECC, count=6), replace(ECC, round=8), False, 7),
        (replace(ECC, count=6), replace(ECC, round=8), True, 1),
        (replace(ECC, run="other"), ECC, False, 1),
        (ECC, ECC, False, None),
    ],
    ids=["first", "second", "seventh", "after progress", "of another run", "counted already"],
)
def test_failures_are_counted_in_a_row(
    before: Failure | None, now: Failure, progressed: bool, count: int | None
) -> None:
    records = {} if before is None else {"b": before}
    record, _ = after(now, records, progressed=progressed)
    assert (record.count if record else None) == count


def test_who_only_follows_is_not_accused() -> None:
    assert after(PEER, {"b": ECC}, progressed=False)[0] is None
    assert after(PEER, {"b": replace(ECC, round=6)}, progressed=False)[0] == PEER
    assert after(PEER, {"b": replace(ECC, follows=True)}, progressed=False)[0] == PEER


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        (replace(ECC, member="a"), True),
        (replace(ECC, member="a", text="another device"), True),
        (replace(ECC, member="a", kind="OSError"), False),
        (replace(ECC, member="a", where="train.py:7"), False),
        (replace(ECC, member="a", round=6), False),
        (replace(ECC, member="a", run="other"), False),
        (replace(ECC, member="a", follows=True), False),
        (ECC, False),
    ],
)
def test_failures_are_alike_by_type_and_place_in_one_round(other: Failure, *, alike: bool) -> None:
    assert is_alike(ECC, {other.member: other}) == alike
    assert not is_alike(replace(ECC, follows=True), {other.member: other})


def test_a_crash_loop_leaves_room_in_the_history() -> None:
    told = [number for number in range(1, 1000) if is_told(replace(ECC, count=number))]
    assert told == [1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512]


def test_numbers_are_spelled() -> None:
    numbers = (1, 2, 3, 4, 11, 12, 13, 21, 22, 103, 111, 112)
    said = "1st 2nd 3rd 4th 11th 12th 13th 21st 22nd 103rd 111th 112th"
    assert " ".join(map(ordinal, numbers)) == said


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot open s3://key:pass@bucket/x", f"cannot open s3://{MASK}@bucket/x"),
        ("403 for https://h/p?X-Amz-Signature=abc&x=1", f"403 for https://h/p?{MASK}"),
        ("token='abc' is no good", f"token={MASK} is no good"),
        ("HF_TOKEN: abcdef, retry", f"HF_TOKEN: {MASK}, retry"),
        ("bad key hf_AbCdEfGhIjKlMnOpQr", f"bad key {MASK}"),
        ("no such commit " + "0123456789abcdef" * 2, f"no such commit {MASK}"),
        ("CUDA error: out of memory, tried 2.34 GiB", "CUDA error: out of memory, tried 2.34 GiB"),
        (
            "cudnn_convolution_backward at /usr/lib/python3.11/site-packages/torch",
            "cudnn_convolution_backward at /usr/lib/python3.11/site-packages/torch",
        ),
    ],
)
def test_i9_what_may_be_a_credential_is_masked(text: str, shown: str) -> None:
    assert masked(text) == shown


def test_i8_whatever_lies_in_the_directory_is_skipped(tmp_path: Path) -> None:
    good = {"schema": 1, "pid": 7, "rank": 3, "local_rank": 1, "master": "10.0.0.1:29500"}
    good.update(kind="ValueError", text="bad shape", where="train.py:3", at_boot_s=12.5)
    (tmp_path / "1.json").write_text(json.dumps(good))
    (tmp_path / "0.json").write_text(json.dumps({**good, "at_boot_s": 9.0, "rank": 2}))
    (tmp_path / "2.json").write_text("{")
    (tmp_path / "3.json").write_text(json.dumps({**good, "rank": "x"}))
    (tmp_path / "4.json").symlink_to("/etc/passwd")
    assert [one.rank for one in read_failures(tmp_path)] == [2, 3]
    assert read_failures(tmp_path / "none") == ()
