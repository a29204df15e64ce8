# SPDX-License-Identifier: Apache-2.0
"""When a launcher that does not come to its sidecar is told of, and failures of workers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.launcher_check import (
    FINE,
    LauncherObservations,
    LauncherPolicy,
    LauncherView,
    decide,
    observe,
)
from agent.rundir.reports import MASK, LaunchReport, masked, read_failures
from rdzv.errors import RecordError
from rdzv.records.troubles import REMARKS, Bypass, Failure, after, is_alike, is_told, ordinal
from rdzv.store import KeyValue

POLICY = LauncherPolicy("digits", 2, 4, 29400)
HERE = LaunchReport("a", "torchrun", 7, "2:4", "localhost:29400", "c10d")
READY = LauncherView(expected=True)


class Watching:
    """A watch that is shown one sight after the other."""

    def __init__(self, policy: LauncherPolicy = POLICY) -> None:
        self.policy = policy
        self.now = 1000.0
        self.seen = LauncherObservations()

    def shows(self, sight: LauncherView, after_s: float = 0.0) -> Bypass:
        """What is found ``after_s`` of seeing this, looked at every two seconds."""
        end = self.now + after_s
        while True:
            self.seen = observe(self.now, self.seen, sight, self.policy)
            found = decide(self.now, self.seen, sight, self.policy)
            if self.now >= end:
                return found
            self.now = min(self.now + 2, end)


def test_one_that_has_been_started_right_has_a_minute_to_connect() -> None:
    watching = Watching()
    sight = replace(READY, launch=HERE)
    assert watching.shows(sight, 59) == FINE
    found = watching.shows(sight, 1)
    assert found.kind == "absent"
    # Whether it still runs is not known: one that is killed takes nothing back.
    assert "was started and has not connected to localhost:29400" in found.sentence
    assert watching.shows(replace(sight, runs={"digits": False})) == FINE
    # The run goes on, ends, or the launcher is started again: it has shown that it comes here.
    assert watching.shows(sight, 600) == FINE


@pytest.mark.parametrize(
    ("launch", "part"),
    [
        (replace(HERE, rdzv_endpoint="localhost:29500"), "the rendezvous endpoint localhost:29500"),
        (replace(HERE, rdzv_endpoint="10.0.0.7:29400"), "the rendezvous endpoint 10.0.0.7:29400"),
        (replace(HERE, rdzv_endpoint=""), "the rendezvous endpoint none"),
        (replace(HERE, rdzv_backend="static"), "the rendezvous backend static"),
        (replace(HERE, rdzv_backend=""), "the rendezvous backend static"),
        (replace(HERE, standalone=True), "--standalone"),
    ],
)
def test_one_that_was_sent_elsewhere_is_named_at_once(launch: LaunchReport, part: str) -> None:
    found = Watching().shows(replace(READY, launch=launch))
    assert found.kind == "elsewhere"
    assert part in found.sentence
    assert "localhost:29400" in found.sentence


def test_workers_that_start_without_the_zygote_are_named_and_no_fault() -> None:
    sight = replace(READY, launch=HERE, runs={"digits": False}, workers=1)
    found = Watching().shows(replace(sight, plain=("its limits differ", "its limits differ")))
    assert found.kind in REMARKS
    assert found.sentence == (
        "2 workers started without the zygote, so later than with it: its limits differ"
    )
    other = Watching().shows(replace(sight, plain=("why",), workers=3))
    assert (other.kind, other.slots) == ("plain", 3)
    gone = Watching().shows(replace(READY, launch=replace(HERE, standalone=True), plain=("why",)))
    assert gone.kind == "elsewhere"


@pytest.mark.parametrize("endpoint", ["localhost:29400", "127.0.0.1:29400", "[::1]:29400"])
def test_every_name_of_the_loopback_is_here(endpoint: str) -> None:
    launch = replace(HERE, rdzv_endpoint=endpoint)
    assert Watching().shows(replace(READY, launch=launch)) == FINE


def test_an_endpoint_without_a_port_has_torchs_own() -> None:
    launch = replace(HERE, rdzv_endpoint="localhost")
    assert Watching().shows(replace(READY, launch=launch)) == FINE
    elsewhere = Watching(replace(POLICY, port=29500)).shows(replace(READY, launch=launch))
    assert elsewhere.kind == "elsewhere"


@pytest.mark.parametrize(
    ("nnodes", "wrong"), [("2:4", False), ("1:4", True), ("2:8", True), ("2", True), ("x", True)]
)
def test_one_with_other_bounds_is_named_with_them(nnodes: str, wrong: bool) -> None:
    sight = replace(READY, launch=replace(HERE, nnodes=nnodes), runs={"digits": False})
    found = Watching().shows(sight)
    assert found.kind == ("nnodes" if wrong else "")
    if wrong:
        assert f"--nnodes={nnodes}, but its sidecar 2:4" in found.sentence


def test_a_fixed_size_is_one_number() -> None:
    sight = replace(READY, launch=replace(HERE, nnodes="3"), runs={"digits": False})
    assert Watching(replace(POLICY, min_nodes=3, max_nodes=3)).shows(sight) == FINE


def test_other_bounds_show_without_muster_run_too() -> None:
    found = Watching().shows(replace(READY, runs={"digits": True}))
    assert found.kind == "nnodes"
    assert "2:4" in found.sentence


def test_another_run_id_is_named_unless_others_have_it() -> None:
    watching = Watching()
    alone = replace(READY, runs={"mine": False})
    assert watching.shows(alone, 58) == FINE
    assert watching.shows(replace(alone, others=frozenset({"mine"})), 2) == FINE
    found = watching.shows(replace(alone, others=frozenset({"digits"})), 2)
    assert found.kind == "run_id"
    assert "--rdzv-id=mine" in found.sentence


def test_a_container_that_may_still_pull_is_not_accused() -> None:
    watching = Watching()
    assert watching.shows(READY, 58) == FINE
    found = watching.shows(READY, 2)
    assert found.kind == "unseen"
    assert "may still be starting" in found.sentence
    # It has come at last: its minute begins then.
    assert watching.shows(replace(READY, launch=HERE), 58) == FINE


def test_where_muster_run_has_to_be_it_is_said_to_be_missing() -> None:
    found = Watching(replace(POLICY, relayed=True)).shows(READY, 60)
    assert "muster-run does not run in it" in found.sentence


def test_one_that_has_ended_is_no_longer_accused() -> None:
    watching = Watching()
    assert watching.shows(replace(READY, launch=HERE), 60).kind == "absent"
    assert watching.shows(READY).kind == "unseen"


def test_one_that_has_come_here_is_not_missed_when_it_has_ended() -> None:
    watching = Watching()
    watching.shows(replace(READY, launch=HERE, runs={"digits": False}))
    assert watching.shows(READY, 600) == FINE


def test_ranks_that_train_past_it_are_named() -> None:
    found = Watching().shows(replace(READY, ranks=True), 60)
    assert found.kind == "absent"
    assert "no torchrun has connected" in found.sentence


def test_a_command_that_starts_no_torchrun_is_named_until_it_does() -> None:
    watching = Watching()
    idle = replace(READY, launch=LaunchReport("a"))
    found = watching.shows(idle, 60)
    assert found.kind == "absent"
    assert "started no torchrun" in found.sentence
    assert watching.shows(replace(READY, launch=HERE)) == FINE


def test_a_container_that_was_started_again_is_looked_at_anew() -> None:
    watching = Watching()
    watching.shows(replace(READY, launch=HERE, runs={"digits": False}))
    again = replace(READY, launch=replace(HERE, started="b"))
    assert watching.shows(again, 58) == FINE
    assert watching.shows(again, 2).kind == "absent"


@pytest.mark.parametrize("wrong", [HERE, replace(HERE, standalone=True), None])
def test_nobody_is_expected_of_a_pod_that_takes_no_part(wrong: LaunchReport | None) -> None:
    # A launcher pod, a worker of Horovod, one that drains, is fenced or not ready yet.
    assert Watching().shows(LauncherView(expected=False, launch=wrong), 600) == FINE


@pytest.mark.parametrize("launch", [HERE, LaunchReport("a"), None])
def test_nobody_is_missed_when_the_run_is_over(launch: LaunchReport | None) -> None:
    assert Watching().shows(replace(READY, over=True, launch=launch), 600) == FINE


def test_another_number_of_workers_counts_and_is_said() -> None:
    watching = Watching()
    runs = {"digits": False}
    assert watching.shows(replace(READY, launch=HERE, runs=runs)) == FINE  # not known yet
    assert watching.shows(replace(READY, launch=HERE, runs=runs, workers=1)) == FINE
    found = watching.shows(replace(READY, launch=HERE, runs=runs, workers=2))
    assert (found.kind, found.slots) == ("slots", 2)
    assert found.sentence.startswith("its torchrun started 2 workers, and that counts")
    kv = KeyValue("bypasses/w-0", found.to_json(), 1, 1, 1, 0)
    assert Bypass.from_kv(kv) == found
    # Between two rounds, and in a drain.
    assert watching.shows(replace(READY, launch=HERE, runs=runs)) == found
    assert watching.shows(replace(READY, launch=HERE, runs=runs, expected=False)) == found
    # Another fault is not hidden by it, nor the number by that.
    other = replace(HERE, nnodes="1:2")
    both = watching.shows(replace(READY, launch=other, runs=runs, workers=2))
    assert (both.kind, both.slots) == ("nnodes", 2)
    # Another container, whose torchrun starts as many as declared.
    again = replace(HERE, started="b")
    assert watching.shows(replace(READY, launch=again, runs=runs, workers=1)) == FINE


def test_fewer_workers_than_slots_are_said_too() -> None:
    watching = Watching(replace(POLICY, slots=8))
    found = watching.shows(replace(READY, runs={"digits": False}, workers=1))
    assert (found.kind, found.slots) == ("slots", 1)
    assert "started 1 worker, and that counts; its sidecar was given --slots=8" in found.sentence


def test_the_sentence_stays_the_same_while_nothing_changes() -> None:
    watching = Watching()
    sight = replace(READY, launch=HERE)
    assert {watching.shows(sight, 60), watching.shows(sight, 600)} == {watching.shows(sight)}


def test_what_a_torchrun_calls_itself_makes_no_long_or_forged_sentence() -> None:
    name = "x" * 8000 + "\n\x1b[2J"
    watching = Watching()
    found = watching.shows(replace(READY, runs={name: False}), 60)
    assert found.kind == "run_id"
    assert len(found.sentence) <= 400
    assert found.sentence.isprintable()
    kv = KeyValue("bypasses/w-0", found.to_json(), 1, 1, 1, 0)
    assert Bypass.from_kv(kv) == found, "else it would be written anew at each look"


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
