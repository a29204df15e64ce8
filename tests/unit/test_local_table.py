# SPDX-License-Identifier: Apache-2.0
"""The live table of ``muster local``, as a terminal shows it, and the grammar of ``--event``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from io import StringIO
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agent.verdict.view import JobView
from console.local.job_in_store import awaited
from console.local.run import LocalRun
from console.local.screen import STEPS_UNKNOWN_AFTER_S, draw_table, node_standing
from console.local.settings import ACTIONS, Event, by_world, read_event
from console.local.timeline import Progress
from rdzv.errors import ConfigError
from rdzv.records.drain import Commit, Drain, Outcome
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import Snapshot, listing_of
from tests.support.records import member

NOW_S = 30.0


def run(
    progress: Mapping[str, tuple[Progress, ...]] | None = None,
    *,
    began_s: float | None = None,
    next_event: tuple[str, float] | None = None,
    view: JobView | None = None,
    waits: str = "",
    last_step_s: float = 0.0,
) -> LocalRun:
    """As much of a run as a table shows: two nodes that run, and one that was drained."""
    progress = progress or {}
    nodes = {
        "node-10": SimpleNamespace(state="running", restarts=2),
        "node-2": SimpleNamespace(state="running", restarts=0),
        "node-3": SimpleNamespace(state="drained", restarts=0),
    }
    in_round = {"node-2": (0,), "node-10": (1,)} if began_s is not None else {}
    rounds = SimpleNamespace(
        nodes=in_round,
        ranks_of=lambda name: in_round.get(name, ()),
        round=SimpleNamespace(number=4, shown=4),
        began_s=began_s,
    )
    leader = next((rank for ranks in progress.values() for rank in ranks if rank.rank == 0), None)
    shown = SimpleNamespace(
        nodes=nodes,
        progress=progress,
        rounds=rounds,
        leader=leader,
        last_step_s=last_step_s,
        view=view,
        awaited=waits,
        now_s=NOW_S,
        next_event=next_event,
    )
    return cast(LocalRun, shown)


def drawn(shown: LocalRun) -> tuple[str, list[list[str]]]:
    """The title, and the words of each line below it."""
    title, *others = on_a_screen(shown, 120)
    bare = [re.sub("[\u2500-\u257f]", " ", line).split() for line in others]
    return title, [words for words in bare if words]


def on_a_screen(shown: LocalRun, columns: int) -> list[str]:
    console = Console(width=columns, file=StringIO())
    with console.capture() as text:
        console.print(draw_table(shown))
    return [line.rstrip() for line in text.get().splitlines()]


def test_before_the_first_world_it_shows_the_nodes_in_their_order() -> None:
    title, (headings, *rows) = drawn(run(next_event=("drain node-2", NOW_S + 5)))
    assert title == "no world yet; 30 s, next: drain node-2 in 5 s"
    assert headings == ["node", "state", "ranks", "restarts"]
    assert rows == [["node-2", "running"], ["node-3", "drained"], ["node-10", "running", "2"]]


def test_a_round_without_reported_steps_says_so_after_a_while() -> None:
    title, (_, *rows) = drawn(run(began_s=NOW_S - 1))
    assert title == "round 4: 2 ranks; 30 s"
    assert rows == [
        ["node-2", "running", "0"],
        ["node-3", "drained"],
        ["node-10", "running", "1", "2"],
    ]
    title, _ = drawn(run(began_s=NOW_S - STEPS_UNKNOWN_AFTER_S - 1))
    assert title == "round 4: 2 ranks, no step seen for 11 s; 30 s"
    title, _ = drawn(run(began_s=1.0, last_step_s=NOW_S - 12))
    assert title == "round 4: 2 ranks, no step seen for 12 s; 30 s"


def test_a_world_that_reports_steps_has_a_column_of_them() -> None:
    progress = {
        "node-2": (Progress(1, 0, 2, 0, 41, 0.0),),
        "node-10": (Progress(2, 1, 2, 0, 40, 0.0),),
    }
    title, (headings, *rows) = drawn(run(progress, began_s=NOW_S - 20))
    assert title == "world of 2 at step 41, round 4; 30 s"
    assert headings == ["node", "state", "ranks", "step", "restarts"]
    assert rows == [
        ["node-2", "training", "0", "41"],
        ["node-3", "drained"],
        ["node-10", "training", "1", "40", "2"],
    ]


def job(
    outcomes: Mapping[str, Outcome], *, least: int = 1, commit: Commit | None = None
) -> JobView:
    """A job of node-2, node-3 and node-10; those that drain do so with an outcome."""
    members = {name: member(name, min_workers=least) for name in ("node-2", "node-3", "node-10")}
    drains = {}
    for name, outcome in outcomes.items():
        uid = members[name].pod_uid
        drains[uid] = Drain(uid, name, "asked for by hand", "operator", outcome=outcome)
    snapshot = Snapshot(
        job=Job(JobPolicy(least, 4)), members=members, drains=drains, revision=5, commit=commit
    )
    return JobView("local", "local", snapshot, listing_of(snapshot), (), (), {}, {})


RANKS = {"node-2": (Progress(1, 0, 2, 0, 41, 0.0),), "node-10": (Progress(2, 1, 2, 0, 40, 0.0),)}


def test_a_node_drained_by_hand_is_idle_and_shows_no_step() -> None:
    seen = job({"node-10": "committed"})
    _, (_, *rows) = drawn(run(RANKS, began_s=NOW_S - 20, view=seen))
    assert rows[0] == ["node-2", "training", "0", "41"]
    assert rows[2] == ["node-10", "drained,", "idle", "2"]


def test_a_drain_shows_its_phase() -> None:
    saving = Commit(1, "local", 4, "commit", leaving=("uid-node-10",), step=50)
    _, (_, *rows) = drawn(run(RANKS, began_s=NOW_S - 20, view=job({"node-10": ""}, commit=saving)))
    assert rows[2] == ["node-10", "saving", "1", "40", "2"]


def test_a_node_without_a_place_waits() -> None:
    waits = node_standing("running", "node-2", job({}), has_ranks=True, in_round=False)
    assert (waits.state, waits.trains) == ("waiting", False)
    ended = node_standing("killed", "node-2", job({}), has_ranks=True, in_round=True)
    assert (ended.state, ended.trains) == ("killed", False)


def test_a_job_that_has_lost_too_many_nodes_says_what_it_waits_for() -> None:
    drained: dict[str, Outcome] = dict.fromkeys(("node-2", "node-3", "node-10"), "uncommitted")
    assert awaited(job(drained), "") == (
        "nothing can train: no node is left (min 1); node-10, node-2 and node-3 are drained"
        " (muster drain node-10 --cancel takes it back); Ctrl-C ends the run"
    )
    del drained["node-2"]
    assert awaited(job(drained), "") == ""
    assert awaited(job(drained, least=2), "add node-3 at 75 s") == (
        "nothing can train: 1 node left (min 2); node-10 and node-3 are drained"
        " (muster drain node-10 --cancel takes it back); next: add node-3 at 75 s"
    )
    assert awaited(job(drained, least=2), "").endswith(
        "; muster set --min 1 trains with fewer; Ctrl-C ends the run"
    )
    assert awaited(job({**drained, "node-2": ""}), "") == "", "one that drains may train on"
    assert awaited(None, "") == ""


def test_the_headline_says_what_it_waits_for_and_is_cut_to_the_terminal() -> None:
    shown = run(RANKS, began_s=NOW_S - 20, waits="nothing can train: " + "node-1 " * 20)
    for columns in (40, 80, 120, 200):
        title, second, *_ = on_a_screen(shown, columns)
        assert title.startswith("nothing can train: node-1")
        assert len(title) <= columns
        assert title.endswith("\N{HORIZONTAL ELLIPSIS}") is (columns < 200)
        assert second.startswith("\u250f"), "the table follows on the next line"


nodes = st.integers(0, 9999).map("node-{}".format)
ranks = st.integers(0, 9999).map("rank{}".format)
times_s = st.integers(0, 10**6).map(lambda tenths: tenths / 10)
sizes = st.none() | st.integers(1, 99999)
actions = st.sampled_from(sorted(set(ACTIONS) - {"add"}))
events = st.one_of(
    st.builds(Event, times_s, st.just("add"), st.none() | nodes, sizes),
    st.builds(Event, times_s, actions, nodes | ranks, sizes),
)


@given(events)
def test_what_an_event_says_of_itself_reads_back_as_it(event: Event) -> None:
    target = f":{event.target}" if event.target else ""
    world = f"world{event.world_size}+" if event.world_size else ""
    assert read_event(f"{event.action}{target}@{world}{event.at_s}s") == event


def refusal(text: str) -> str | None:
    try:
        read_event(text)
    except ConfigError as refused:
        return str(refused)
    return None


@given(st.text() | st.from_regex(r"[a-z-]+:?[a-z0-9-]*@[0-9.]*[a-z]?"))
def test_anything_else_is_refused_in_one_sentence(text: str) -> None:
    sentence = refusal(text)
    if sentence is None:
        assert read_event(text).action in ACTIONS
        assert read_event(text).at_s >= 0
    else:
        assert sentence.startswith("--event ")
        assert "\n" not in sentence


@pytest.mark.parametrize(
    ("text", "event"),
    [
        ("stop:node-12@2m", Event(120, "stop", "node-12")),
        ("add@15", Event(15, "add", None)),
        ("add@1.5h", Event(5400, "add", None)),
        ("add@world2", Event(0, "add", None, 2)),
        ("drain:rank0@world16+1.5m", Event(90, "drain", "rank0", 16)),
    ],
)
def test_events_as_written(text: str, event: Event) -> None:
    assert read_event(text) == event


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("explode:node-0@15s", "no action 'explode'; there are add, drain, kill"),
        ("kill@15s", "say which node, as in kill:node-1@15s"),
        ("kill:15s", "write ACTION:NODE@TIME"),
        ("kill:worker@15s", "no node 'worker'"),
        ("kill:node-01@15s", "no node 'node-01'"),
        ("add:rank0@15s", "a new node has no rank"),
        ("add@15x", "no time '15x'"),
        ("add@-1s", "no time '-1s'"),
        ("add@world0+5s", "no time 'world0"),
        ("add@world2+", "or a time after a world's first step, as world3"),
    ],
)
def test_a_mistake_is_named(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_event(text)


def test_neighbours_of_one_size_wait_for_the_same_world() -> None:
    texts = ("add@world2", "add@world2+9s", "kill:rank0@world3", "stop:node-1@5s", "add@world2")
    groups = by_world(read_event(text) for text in texts)
    assert [[str(event) for event in group] for group in groups] == [
        ["add@world2+0s", "add@world2+9s"],
        ["kill:rank0@world3+0s"],
        ["add@world2+0s"],
    ]
