# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.c10d.rounds.inputs import RoundPolicy
from muster.boundary import CUT
from muster.gate import parse
from rdzv.drain.gate import ON_CUT_S, Gate, Here, Move, local
from rdzv.drain.inputs import LiveRound
from rdzv.errors import RecordError
from rdzv.records.drain import Commit, Drain, LastCommit, Vote
from rdzv.records.progress import RankProgress

MASTER = "10.0.0.1:29500"
ROUND = LiveRound("run", 3, True, ("a", "b"), master=MASTER, mod_revision=70)
HOLD = Commit(5, "run", 3, "hold", leaving=("uid-a",), mod_revision=60)
SAVE = replace(HOLD, phase="commit", step=10)
DRAIN = Drain("uid-a", "a", "spot", "sigterm")
HELD = Gate(5, "run", 3, MASTER, "hold")


def rank(step: int, local_rank: int = 0, ranks: int = 1, **changes: object) -> RankProgress:
    base = RankProgress(local_rank, ranks, MASTER, step, drain=True, held=False)
    return replace(base, **changes)  # type: ignore[arg-type]


def move(
    commit: Commit | None,
    *ranks: RankProgress,
    shown: Gate | None = None,
    live: LiveRound | None = ROUND,
    drain: Drain | None = None,
    vote: Vote | None = None,
    last: LastCommit | None = None,
    of_former_life: bool = False,
    on_cut_s: float = math.inf,
    **changes: object,
) -> Move:
    here = Here("a", "uid-a", shown, ranks)
    return local(
        replace(here, **changes),  # type: ignore[arg-type]
        commit=commit,
        round=live,
        drain=drain,
        vote=vote,
        last_commit=last,
        on_cut_s=on_cut_s,
        of_former_life=of_former_life,
    )


def gate_of(commit: Commit | None, *ranks: RankProgress, **given: Any) -> Gate:
    """The gate that is to be shown next."""
    gate = move(commit, *ranks, **given).gate
    assert gate is not None
    return gate


def vote_of(commit: Commit | None, *ranks: RankProgress, **given: Any) -> Vote:
    """The vote that is to be written next."""
    vote = move(commit, *ranks, **given).vote
    assert vote is not None
    return vote


def test_the_gate_comes_before_the_vote() -> None:
    held = move(HOLD, rank(8))
    assert (held.gate, held.vote) == (HELD, None)
    voted = move(HOLD, rank(8), shown=HELD)
    assert (voted.gate, voted.vote) == (None, Vote(5, 3, "uid-a", 9))
    assert move(HOLD, rank(8), shown=HELD, vote=Vote(5, 3, "uid-a", 9)).vote is None


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([rank(8)], 9),
        ([rank(8, held=True)], 8),
        ([rank(8, 0, 2, held=True), rank(7, 1, 2)], 8),
        ([rank(8, 0, 2), rank(9, 1, 2, held=True)], 9),
        ([rank(8, 0, 2)], None),
        ([rank(8, drain=False)], None),
        ([rank(8, drain=False, away=True)], 9),
        ([rank(8, 0, 2, drain=False, away=True), rank(8, 1, 2, held=True)], 9),
        ([rank(8, 0, 2, drain=False, away=True), rank(8, 1, 2, drain=False)], None),
        ([rank(8), rank(3, 1, master="10.0.0.1:1")], 9),
        ([rank(8, master="10.0.0.1:1")], None),
        ([], None),
    ],
)
def test_a_vote_is_the_first_step_that_no_rank_has_passed(
    ranks: list[RankProgress], expected: int | None
) -> None:
    vote = vote_of(HOLD, *ranks, shown=HELD)
    away = expected is not None and any(rank.away for rank in ranks)
    assert (vote.vote, vote.away) == (expected, away)


def test_no_vote_while_a_rank_reads_a_file_that_cannot_be_written() -> None:
    vote = Vote(5, 3, "uid-a", 9)
    assert move(HOLD, rank(8, page=True), shown=HELD, page_alone=True).vote == vote
    assert move(HOLD, rank(8), shown=HELD, page_alone=True).vote is None
    two = (rank(8, 0, 2, page=True), rank(8, 1, 2))
    assert move(HOLD, *two, shown=HELD, page_alone=True).vote is None
    gone = rank(8, 1, master="10.0.0.1:1")
    assert move(HOLD, rank(8, page=True), gone, shown=HELD, page_alone=True).vote == vote


REFUSED = replace(HOLD, phase="void", refused=True)
ENDING = replace(HELD, ending=True)


def test_i2_ranks_are_held_while_their_world_is_about_to_end_without_a_save() -> None:
    assert move(REFUSED, rank(8), shown=HELD).gate == ENDING
    # Nobody votes in an attempt that is over.
    assert move(REFUSED, rank(8), shown=ENDING) == Move(reason="the gate stays hold")
    assert move(REFUSED, rank(8), shown=ENDING, cut=True).gate == replace(ENDING, cut=True)


def test_a_world_that_finishes_is_not_held_as_it_does_not_end_otherwise() -> None:
    gate = move(REFUSED, rank(8), shown=ENDING, live=replace(ROUND, finishing=True)).gate
    assert gate == replace(HELD, phase="void")


SAVING = Gate(5, "run", 3, MASTER, "commit", 10)
VOTE = Vote(5, 3, "uid-a", 9, mod_revision=80)
DONE = replace(SAVE, phase="done")


@pytest.mark.parametrize(
    ("commit", "shown"), [(HOLD, HELD), (SAVE, SAVING), (DONE, replace(SAVING, phase="done"))]
)
def test_a_gate_at_which_ranks_wait_is_cut_while_the_store_takes_no_writes(
    commit: Commit, shown: Gate
) -> None:
    cut = replace(shown, cut=True)
    assert move(commit, rank(10), shown=shown, cut=True).gate == cut
    # A vote or an acknowledgement could be of a rank that is about to give up.
    acked = rank(10, acked=(5, 10))
    assert move(commit, acked, shown=cut, cut=True, vote=None) == NO_PART
    assert move(commit, acked, shown=cut, cut=True, vote=VOTE) == NO_PART
    assert move(commit, acked, shown=cut, vote=VOTE).gate == shown


NO_PART = Move(reason="this pod takes no part in it")


def test_a_gate_at_which_no_rank_waits_is_not_cut() -> None:
    for commit in (None, replace(HOLD, phase="void"), replace(HOLD, phase="idle")):
        assert not gate_of(commit, rank(8), cut=True).cut


def test_i7_an_epoch_that_a_rank_has_given_up_is_not_voted_in_and_not_acknowledged() -> None:
    gave_up = rank(8, failed=(5, CUT))
    assert move(HOLD, gave_up, shown=HELD).vote is None
    assert move(HOLD, rank(8, failed=(4, CUT)), shown=HELD).vote == Vote(5, 3, "uid-a", 9)
    for acked in (None, (5, 10)):
        vote = move(SAVE, rank(12, acked=acked, failed=(5, CUT)), shown=SAVING, vote=VOTE).vote
        assert vote == replace(VOTE, failed=CUT)


def test_a_sidecar_that_starts_without_the_store_leaves_the_gate_as_it_lies() -> None:
    for shown in (HELD, replace(HELD, phase="done"), None):
        found = move(None, rank(8), shown=shown, live=None).gate
        assert found in (None, Gate())
    cut = move(None, rank(8), shown=HELD, live=None, cut=True).gate
    assert cut == replace(HELD, cut=True)


def test_the_gate_speaks_of_the_live_round_only() -> None:
    before = move(replace(SAVE, round=2), rank(8)).gate
    assert before == Gate(5, "run", 3, MASTER)
    between = move(SAVE, rank(8), live=LiveRound("run", 4, False, master="x")).gate
    assert between == Gate(5, "run", 4, "")


def test_i7_the_gate_says_granted_only_once_it_is_on_record() -> None:
    for commit, drain, expected in [
        (SAVE, DRAIN, False),
        (replace(SAVE, phase="done"), DRAIN, False),
        (replace(SAVE, phase="done", granted=("uid-a",)), DRAIN, True),
        (replace(SAVE, phase="done", granted=("uid-a",)), None, False),
        (None, replace(DRAIN, outcome="uncommitted"), True),
    ]:
        gate = gate_of(commit, rank(8), drain=drain, deadline_boot_s=99.0)
        assert (gate.leaving, gate.granted) == (drain is not None, expected)
        assert gate.deadline_boot_s == (99.0 if drain else None)


def test_a_pod_that_was_let_go_is_told_when_the_job_has_ended() -> None:
    committed = replace(DRAIN, outcome="committed")
    closed = replace(ROUND, number=4, members=("b",), closed=True)
    for live, drain, ended in [
        (replace(closed, succeeded=True), committed, True),
        (closed, committed, False),
        (replace(closed, succeeded=True), DRAIN, False),
        (replace(closed, succeeded=True), None, False),
        (replace(ROUND, number=4), committed, False),
    ]:
        assert gate_of(SAVE, rank(8), live=live, drain=drain).ended is ended


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([rank(10, acked=(5, 10))], replace(VOTE, acked=10, ranks=(0,))),
        ([rank(10, acked=(4, 10))], None),
        ([rank(10, 0, 2, acked=(5, 10)), rank(10, 1, 2)], None),
        ([rank(9, drain=False, away=True)], None),
        ([rank(9, drain=False)], replace(VOTE, failed="local rank 0 has left its training loop")),
        (
            [rank(10, 0, 2, acked=(5, 10)), rank(10, 1, 2, acked=(5, 10), rank=1)],
            replace(VOTE, acked=10, ranks=(0, 1)),
        ),
        (
            [rank(10, 0, 2, acked=(5, 10)), rank(10, 1, 2, failed=(5, "disk full"))],
            replace(VOTE, failed="disk full"),
        ),
    ],
)
def test_a_pod_acknowledges_once_all_its_ranks_have(
    ranks: list[RankProgress], expected: Vote | None
) -> None:
    assert move(SAVE, *ranks, shown=SAVING, vote=VOTE).vote == expected


def test_i11_ranks_that_cannot_be_asked_to_save_keep_no_others_waiting() -> None:
    failed = replace(VOTE, failed="its run directory takes no writes")
    assert move(SAVE, rank(9), shown=HELD, vote=VOTE, refused=True).vote == failed
    assert move(SAVE, rank(9), shown=HELD, vote=failed, refused=True).gate is not None
    assert move(HOLD, rank(9), shown=None, vote=VOTE, refused=True).vote is None
    # A rank of 0.1 reads another file than the page.
    assert move(SAVE, rank(9), shown=SAVING, vote=VOTE, page_alone=True).vote == failed
    assert move(SAVE, rank(9, page=True), shown=SAVING, vote=VOTE, page_alone=True).vote is None
    saved = rank(10, acked=(5, 10))
    assert vote_of(SAVE, saved, shown=SAVING, vote=VOTE, page_alone=True).acked == 10


def test_ranks_of_a_pod_that_saved_different_steps_are_a_failure() -> None:
    ranks = [rank(10, 0, 2, acked=(5, 10)), rank(12, 1, 2, acked=(5, 12))]
    failed = vote_of(SAVE, *ranks, shown=SAVING, vote=VOTE).failed
    assert "different steps: [10, 12]" in failed


def test_nobody_speaks_for_another_pod_or_for_a_member_outside_the_round() -> None:
    acked = rank(10, acked=(5, 10))
    assert move(SAVE, acked, shown=SAVING, vote=replace(VOTE, pod_uid="uid-z")).vote is None
    assert move(HOLD, rank(8), shown=HELD, member="c").vote is None


ROUNDS = st.integers(0, 2**40)
GATES = st.builds(
    Gate,
    epoch=ROUNDS,
    run=st.text(max_size=8),
    round=st.integers(-1, 2**40),
    master=st.text(max_size=8),
    phase=st.sampled_from(["idle", "hold", "commit", "done", "void"]),
    step=st.none() | st.integers(),
    leaving=st.booleans(),
    granted=st.booleans(),
    deadline_boot_s=st.none() | st.floats(0, 1e9),
    reason=st.text(max_size=20),
    ended=st.booleans(),
    last_commit=st.none() | st.builds(LastCommit, st.integers(), ROUNDS, ROUNDS),
    of_former_life=st.booleans(),
    ending=st.booleans(),
    cut=st.booleans(),
)


@given(GATES)
def test_a_gate_comes_back_as_it_was(gate: Gate) -> None:
    assert Gate.from_json("gate.json", gate.to_json()) == gate


@given(st.binary(max_size=60) | st.dictionaries(st.text(), st.integers()).map(str).map(str.encode))
def test_i8_other_bytes_are_no_gate(content: bytes) -> None:
    with pytest.raises(RecordError, match=r"gate\.json"):
        Gate.from_json("gate.json", content)


def test_the_gate_tells_whether_a_former_life_made_the_last_commit() -> None:
    last = LastCommit(7, 2, 4, job_uid="old", mod_revision=9)
    for former in (True, False):
        made = gate_of(None, last=last, of_former_life=former)
        assert (made.last_commit, made.of_former_life) == (LastCommit(7, 2, 4), former)
        read = parse(made.to_json())
        assert read.last_commit is not None
        assert (read.last_commit, read.last_commit.of_former_life) == (7, former)


@pytest.mark.parametrize(("run", "shown"), [(ROUND.run, True), ("", True), ("before", False)])
def test_ranks_are_shown_the_last_commit_of_their_run(run: str, shown: bool) -> None:
    made = gate_of(None, last=LastCommit(600, 2, 4, run=run))
    assert made.last_commit == (LastCommit(600, 2, 4) if shown else None)


IDLE = Commit(5, "run", 3, mod_revision=60)
OPEN = Gate(5, "run", 3, MASTER)


def on_cut(
    shown: Gate, leaseless_s: float, commit: Commit | None = IDLE, live: LiveRound | None = ROUND
) -> Gate:
    """The next gate of a job that says ``--on-cut=hold``."""
    given = move(
        commit, rank(8), shown=shown, live=live, on_cut_s=ON_CUT_S, leaseless_s=leaseless_s
    )
    return given.gate or shown


def test_i1_ranks_wait_once_their_pod_has_had_no_lease_for_long() -> None:
    assert RoundPolicy(1, 1).orphan_hold_s >= ON_CUT_S, "others keep the world for that long"
    assert on_cut(OPEN, ON_CUT_S - 0.1) == OPEN
    held = on_cut(OPEN, ON_CUT_S)
    assert (held.phase, held.on_cut, held.epoch, held.step) == ("hold", True, 5, None)
    rank_gate = parse(held.to_json()).gate
    assert (rank_gate.phase, rank_gate.master) == ("hold", MASTER)
    assert Gate.from_json("gate.json", held.to_json()) == held


def test_i5_ranks_that_wait_for_a_lease_train_on_with_it() -> None:
    held = on_cut(OPEN, 60.0)
    assert on_cut(held, 700.0) == held
    assert on_cut(held, 0.0) == OPEN
    # A sidecar that starts meanwhile knows neither the round nor for how long.
    assert on_cut(held, 0.1, None, None) == held
    opened = on_cut(held, 0.0, None, None)
    assert (opened.phase, opened.on_cut) == ("idle", False)


def test_i3_ranks_that_have_to_save_first_wait_as_the_store_says() -> None:
    for commit in (HOLD, SAVE, replace(SAVE, phase="done")):
        shown = on_cut(OPEN, 0.0, commit)
        assert shown.phase == commit.phase
        assert on_cut(shown, 60.0, commit) == shown, "they stop by themselves"
    # Without a lease the pod could neither vote nor acknowledge.
    held = on_cut(OPEN, ON_CUT_S)
    assert [on_cut(held, 70.0, commit).on_cut for commit in (HOLD, SAVE)] == [True, True]
    assert on_cut(held, 0.0, SAVE) == on_cut(OPEN, 0.0, SAVE)
    void = replace(HOLD, phase="void")
    assert on_cut(on_cut(OPEN, 0.0, void), 60.0, void).on_cut


def test_i5_a_job_that_does_not_ask_for_it_trains_on_without_the_store() -> None:
    assert move(IDLE, rank(8), shown=OPEN, leaseless_s=1e6).gate is None
