# SPDX-License-Identifier: Apache-2.0
"""The first line of ``muster status``: the state of a job, why, and what a round waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from agent.verdict.decision import STUCK_S, JobVerdict, verdict
from agent.verdict.runs import RunView
from agent.verdict.states import STATES
from agent.verdict.view import FAILING_S, JobView
from console.job.status_json import pods_of
from launcher_shim.c10d.rounds.records import Node, Round, Seat
from rdzv.records.drain import Drain
from rdzv.records.job import HistoryEntry, Job
from rdzv.records.policy import JobPolicy
from rdzv.records.progress import CENTRAL_RUN, PodSaves
from rdzv.records.troubles import Bypass
from rdzv.sentences import duration
from rdzv.snapshot import Snapshot, listing_of
from tests.support.records import member
from tests.support.views import ASKS, FAILED, NOW_S, TRAINS, committing, reported, run, view

ERROR = "b failed 8 s ago: rank 1: ValueError: bad shape (t.py:3)"


@pytest.mark.parametrize(
    ("seen", "state", "why"),
    [
        (view(names=""), "starting", "no sidecar has registered yet"),
        (view(run(), paused=True), "paused", ""),
        (view(least=3), "below min", "2 of at least 3 pods can train"),
        (view(), "starting", "no torchrun has asked for a world yet"),
        (
            view(bypasses={"a": Bypass("elsewhere", "its torchrun goes elsewhere")}),
            "starting",
            "a: its torchrun goes elsewhere",
        ),
        (
            view(run(Round(3), ASKS), least=2),
            "gathering",
            "1 of at least 2 torchruns are connected; waiting",
        ),
        (view(run(Round(3), ASKS), least=3), "below min", "2 of at least 3 pods can train"),
        (view(run()), "training", "a world of 2 nodes"),
        (view(run(), saves=reported(1204, 9)), "training", "a world of 2 nodes at step 1,204"),
        (
            view(run(), saves=reported(1204, STUCK_S)),
            "stuck",
            "a world of 2 nodes at step 1,204, and no rank has reported a step for 5 min 0 s",
        ),
        (view(run(), commit=committing("hold", "uid-b")), "draining", "a world of 2 nodes; all"),
        (view(run(), commit=committing("commit")), "saving", "a world of 2 nodes; all save"),
        (view(run(), commit=committing("void")), "training", "a world of 2 nodes"),
        (view(run(replace(TRAINS, finishing=True))), "finishing", "first ranks have ended well"),
        (view(run(Round(3), ASKS), failures={"b": FAILED}), "failing", ERROR),
        (
            view(run(Round(3), ASKS), least=3, failures={"b": FAILED}),
            "below min",
            "2 of at least 3",
        ),
        (
            view(run(), failures={"b": FAILED}),
            "training",
            f"a world of 2 nodes, no step is reported yet; {ERROR}",
        ),
        (
            view(run(), failures={"b": FAILED}, saves=reported(1204, 9)),
            "training",
            "a world of 2 nodes at step 1,204",
        ),
        (
            view(run(), failures={"b": replace(FAILED, count=7)}),
            "failing",
            f"{ERROR}, 7th in a row",
        ),
        (
            view(run(), failures={"b": replace(FAILED, count=7, at_unix_s=NOW_S - 61)}),
            "training",
            "a world of 2 nodes",
        ),
        (
            view(
                run(Round(3), ASKS),
                failures={"b": replace(FAILED, at_unix_s=NOW_S - FAILING_S - 1)},
            ),
            "gathering",
            "waiting for",
        ),
        (view(run(replace(TRAINS, closed="success"))), "done", ""),
        (view(run(replace(TRAINS, closed="failure"))), "failing", "every torchrun has ended"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_verdict_names_the_state_and_the_cause(seen: JobView, state: str, why: str) -> None:
    found = verdict(seen, NOW_S)
    assert (found.state, found.why[: len(why)]) == (state, why)
    assert found.as_json()["state"] == state
    assert state in STATES


def test_the_cure_stands_on_a_line_of_its_own() -> None:
    first, second = verdict(view(run(Round(3), ASKS), failures={"b": FAILED}), NOW_S).lines("x", 0)
    assert first == f"x is failing: {ERROR}"
    assert second.startswith("→ read the log of b's training container; ")
    assert second.endswith("muster drain b --job digits")
    training = verdict(view(run()), NOW_S).lines("digits", NOW_S)
    assert training == ["digits has been training for 4 min 12 s: a world of 2 nodes"]
    assert JobVerdict("done").lines("x", 0) == ["x is done"]
    assert JobVerdict("done", since_unix_s=1).lines("x", 42) == ["x was done 41 s ago"]


def test_a_world_that_has_just_formed_after_a_long_wait_is_no_success() -> None:
    failures = {"b": replace(FAILED, count=5, at_unix_s=NOW_S - 150)}
    formed = HistoryEntry("round", "a", "", NOW_S - 2)
    assert verdict(view(run(), failures=failures, history=(formed,)), NOW_S).state == "failing"
    assert verdict(view(run(), failures=failures), NOW_S).state == "training"


def test_a_job_that_waits_after_failed_starts_says_so_and_what_ends_it() -> None:
    opened = Round(6, former=("a", "b"), mod_revision=4, failed_starts=4, waits=1)
    nodes = tuple(replace(ASKS[0], member=name, ask=7) for name in "ab")
    failures = {name: replace(FAILED, member=name, round=5) for name in "ab"}
    found = verdict(view(run(opened, nodes), least=2, failures=failures), NOW_S)
    error = "ValueError: bad shape (t.py:3)"
    assert found.state == "failing"
    assert found.why.startswith(
        f"waits 40 s before round 6: all failed alike before a step was reported, 4 times: {error}"
    )
    assert found.do.endswith("muster resume digits")
    begun = HistoryEntry("wait", "a", "", NOW_S - 13, {"round": 6})
    late = view(run(opened, nodes), least=2, failures=failures, history=(begun,))
    assert verdict(late, NOW_S).why.startswith("waits 40 s (27 s left) before round 6: all failed")
    new = (nodes[0], replace(nodes[1], ask=1))
    tried = verdict(view(run(opened, new), least=2, failures=failures), NOW_S)
    assert "waits" not in tried.why


@pytest.mark.parametrize(
    ("seconds", "spelt"),
    [(41.9, "41 s"), (252, "4 min 12 s"), (8040, "2 h 14 min"), (183_600, "2 d 3 h")],
)
def test_durations_have_two_units(seconds: float, spelt: str) -> None:
    assert duration(seconds) == spelt


def test_a_clock_that_is_known_to_be_behind_makes_no_job_stuck() -> None:
    seen = replace(
        view(run(), saves=reported(10, 601)),
        history=(
            HistoryEntry("join", "b", "", NOW_S - 700, revision=5),
            HistoryEntry("join", "a", "", NOW_S - 1300, revision=6),
        ),
    )
    assert verdict(seen, NOW_S).state == "training"
    assert verdict(replace(seen, saves=reported(10, 901)), NOW_S).state == "stuck"


def test_the_error_of_a_library_is_cut_and_has_no_place_of_its_source() -> None:
    gloo = (
        "[/__w/pytorch/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:47232: "
        + 40 * "long "
    )
    failed = replace(FAILED, kind="RuntimeError", text=gloo, where="lightning.py:332")
    found = verdict(view(run(Round(3), ASKS), failures={"b": failed}), NOW_S)
    assert "pair.cc" not in found.why
    assert "RuntimeError: Read error [127.0.0.1]:47232: long" in found.why
    assert "… (lightning.py:332)" in found.why
    assert len(found.why) < 170
    assert failed.error.startswith("RuntimeError: [/__w/")


def test_a_drain_that_min_holds_says_so() -> None:
    drains = {"uid-b": Drain("uid-b", "b", "spot", "hand", 30.0)}
    seen = view(run(), least=2, drains=drains, commit=committing("done", "uid-b"))
    found = verdict(seen, NOW_S)
    assert found.state == "draining"
    assert found.why.endswith("b stays until its deadline, as fewer than min (2) would be left")
    assert found.do.endswith("or: muster drain b --job digits --cancel")
    free = replace(
        seen, snapshot=view(run(), least=1, drains=drains, commit=seen.snapshot.commit).snapshot
    )
    assert "min" not in verdict(free, NOW_S).why


LAUNCHER = replace(member("l", 9), role="launcher", slots=0)


def horovod_told(name: str, rank: int, step: int, ago_s: float = 9.0) -> PodSaves:
    at = NOW_S - ago_s
    return PodSaves(name, f"uid-{name}", CENTRAL_RUN, 0, step=step, ranks=(rank,), at_unix_s=at)


@pytest.mark.parametrize(
    ("told", "state", "why"),
    [
        ((), "starting", "no rank that horovodrun starts has reported yet"),
        (
            (horovod_told("b", 1, 7), horovod_told("a", 0, 1204)),
            "training",
            "horovodrun trains on 2 nodes at step 1,204",
        ),
        ((horovod_told("a", 0, -1),), "training", "horovodrun trains on 1 node; its ranks report"),
        (
            (horovod_told("a", 0, 12, STUCK_S),),
            "stuck",
            "horovodrun trains on 1 node at step 12, and no rank has reported a step for 5 min 0 s",
        ),
        # Of a pod of that name which has gone.
        ((replace(horovod_told("a", 0, 12), pod_uid="uid-0"),), "starting", "no rank that"),
    ],
)
def test_a_horovodrun_trains_once_its_ranks_report(
    told: Sequence[PodSaves], state: str, why: str
) -> None:
    seen = view(members=(LAUNCHER,), saves={one.member: one for one in told})
    found = verdict(seen, NOW_S)
    assert (found.state, found.why[: len(why)]) == (state, why)


def test_pods_of_a_horovodrun_have_ranks_and_its_saves_are_not_missed() -> None:
    told = (horovod_told("b", 0, 1204), horovod_told("a", 1, 3))
    seen = view(members=(LAUNCHER,), saves={one.member: one for one in told})
    rows = {one.name: (one.doing, one.ranks, one.step) for one in pods_of(seen, NOW_S)}
    assert rows["b"] == ("training", "0", 1204)
    assert rows["a"] == ("training", "1", 1204)
    assert seen.last_save is not None
    assert {
        one.doing
        for one in pods_of(view(members=(LAUNCHER,), saves=seen.saves, paused=True), NOW_S)
    } == {"waiting", "excluded"}
    sentence = seen.last_save.sentence(NOW_S)
    assert sentence == "last save: unknown, the script saves by itself; at step 1,204, 9 s ago"


FORMING_NOW_S = 1000.0


def asks(name: str) -> Node:
    return Node(name, "asking", "n", 1, "10.0.0.1", 1, 0)


@pytest.mark.parametrize(
    ("least", "round_", "asking", "said"),
    [
        (1, Round(0), "ab", "all ask: it begins in moments"),
        (1, Round(0), "a", "waiting for the torchrun of b (joined 40 s ago)"),
        (
            2,
            Round(0),
            "a",
            "1 of at least 2 torchruns are connected; waiting for the torchrun of b",
        ),
        (1, Round(0, True, frozen=(Seat("a", "n", 1),)), "", ""),
    ],
    ids=["all", "one is silent", "below min", "complete"],
)
def test_what_a_round_waits_for_is_told(least: int, round_: Round, asking: str, said: str) -> None:
    members = {name: member(name, min_workers=least) for name in "ab"}
    snapshot = Snapshot(job=Job(JobPolicy(least, 4)), members=members, revision=5)
    run = RunView("digits", round_, tuple(asks(name) for name in asking))
    joined = HistoryEntry("join", "b", "", FORMING_NOW_S - 40)
    view = JobView("team", "digits", snapshot, listing_of(snapshot), (run,), (joined,), {}, {})
    assert view.awaited(run, FORMING_NOW_S).startswith(said)
    assert bool(view.awaited(run, FORMING_NOW_S)) == bool(said)
