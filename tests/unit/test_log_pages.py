# SPDX-License-Identifier: Apache-2.0
"""``muster logs``: which rank and world a line is of, lines of files and of several pods."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from console.logs.command import LINE_MAX, LocalLogs, LogFile
from console.logs.following import HOLD_S, Merge
from console.logs.lines import LAST, NOBODY, Line, Source, rank_of, shown, stamped
from console.logs.printing import NOW, Pages, Selection, first_failure, world_of
from console.whereabouts import RunningJob
from rdzv.errors import ConfigError
from rdzv.records.job import Happening, HistoryEntry

THREE = ["a", "b", "c"]


def entry(
    revision: int, what: Happening, member: str = "a", why: str = "", **details: Any
) -> HistoryEntry:
    return HistoryEntry(what, member, why, float(revision), details, revision)


def world(revision: int, number: int, members: Sequence[str], **more: object) -> HistoryEntry:
    details: dict[str, Any] = {
        "round": number,
        "nodes": len(members),
        "members": list(members),
        **more,
    }
    return entry(revision, "round", members[0], **details)


def drained(revision: int, member: str, step: int) -> HistoryEntry:
    return entry(revision, "drain", member, "evicted", outcome="committed", step=step)


def line(member: str, at_s: float, text: str = "x", also: str = "") -> Line:
    return Line(int(at_s * 1e9), Source(member, also), text)


def printed(pages: Pages, *lines: Line) -> list[str]:
    return [str(one) for each in lines for one in pages.print(each)]


def pages(*entries: HistoryEntry, slots: int = 1, wanted: Selection | None = None) -> Pages:
    made = Pages(wanted or Selection())
    made.take_in(entries)
    made.seat(dict.fromkeys(THREE, slots))
    made.begin()
    return made


def titles(*entries: HistoryEntry) -> list[str]:
    return [str(one) for one in pages(*entries).rest()]


def test_a_drain_between_two_worlds_names_its_step() -> None:
    assert titles(world(10, 3, THREE), drained(20, "b", 45), world(30, 4, ["a", "c"], step=45)) == [
        "── world of 3 nodes: a, b, c (round 3) ──",
        "── world 3 → 2 at step 45: b left, 0 lost (round 4) ──",
    ]


def test_a_join_loses_nothing_if_the_world_before_saved_for_it() -> None:
    first, joined = world(10, 3, ["a"]), entry(15, "join", "b")
    saved = world(20, 4, ["a", "b"], step=7, saved_round=3)
    assert (
        titles(first, joined, saved)[1] == "── world 1 → 2 at step 7: b joined, 0 lost (round 4) ──"
    )
    older = world(20, 4, ["a", "b"], step=7, saved_round=2)
    assert titles(first, joined, older)[1] == "── world 1 → 2: b joined, from step 7 (round 4) ──"


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([entry(20, "lost", "b")], "b was lost, from step 40"),
        (
            [entry(20, "failed", "b", "rank 1: ValueError")],
            "b failed (rank 1: ValueError), from step 40",
        ),
        ([entry(20, "drain", "b", outcome="expired", step=None)], "b left (expired), from step 40"),
        ([drained(20, "b", 45), entry(21, "lost", "b")], "b was lost, from step 40"),
    ],
)
def test_no_claim_is_made_on_steps_after_a_failure(entries: list[HistoryEntry], why: str) -> None:
    after = world(30, 4, ["a", "c"], step=40, saved_round=3)
    assert titles(world(10, 3, THREE), *entries, after)[1] == f"── world 3 → 2: {why} (round 4) ──"


def test_a_failed_member_that_comes_back_is_named() -> None:
    failed = entry(20, "failed", "b", "rank 1: ValueError")
    again = world(30, 4, THREE)
    assert titles(world(10, 3, THREE), failed, again)[1] == (
        "── world 3 → 3: b failed (rank 1: ValueError) (round 4) ──"
    )


def test_entries_of_older_sidecars_name_no_members() -> None:
    old = [entry(at, "round", round=at, nodes=nodes) for at, nodes in ((10, 2), (30, 3))]
    assert titles(old[0], entry(20, "join", "c"), old[1]) == [
        "── world of 2 nodes (round 10) ──",
        "── world 2 → 3: c joined (round 30) ──",
    ]


def test_rounds_of_a_later_generation_count_from_zero() -> None:
    assert titles(world(10, 1_000_002, ["a"])) == ["── world of 1 node: a (round 2) ──"]


def test_a_line_has_the_rank_of_its_pod_in_its_world() -> None:
    job = pages(world(10, 3, THREE), drained(20, "a", 45), world(30, 4, ["b", "c"], step=45))
    assert printed(job, line("c", 9), line("c", 11), line("c", 31), line("a", 32)) == [
        "[c] x",
        "── world of 3 nodes: a, b, c (round 3) ──",
        "[2] x",
        "── world 3 → 2 at step 45: a left, 0 lost (round 4) ──",
        "[1] x",
        "[a] x",
    ]


def test_torchruns_own_prefix_tells_the_rank_in_a_pod_of_several() -> None:
    job = pages(world(10, 3, THREE), slots=4)
    lines = [
        line("b", 11, "[default2]:step 1"),
        line("b", 12, "W1128 restarts"),
        line("b", 13, "[x9]:"),
    ]
    assert printed(job, *lines)[1:] == ["[6] step 1", "[4-7] W1128 restarts", "[4-7] [x9]:"]


def test_another_container_of_a_pod_is_named() -> None:
    assert printed(pages(world(10, 3, THREE)), line("b", 11, also="tb"))[1:] == ["[1 tb] x"]


def test_one_rank_alone() -> None:
    lines = [line("a", 11, "0"), line("c", 11, "2"), line("c", 31, "1"), line("d", 31, "none")]
    entries = (world(10, 3, THREE), drained(20, "a", 45), world(30, 4, ["b", "c"]))
    for rank, texts in ((0, ["0"]), (2, ["2"]), (LAST, ["2", "1"])):
        shown_lines = printed(pages(*entries, wanted=Selection(rank)), *lines)
        assert [one[4:] for one in shown_lines if one.startswith("[")] == texts


def test_one_world_alone() -> None:
    entries = (world(10, 3, THREE), world(30, 4, THREE), world(50, 5, THREE))
    lines = [line("a", at, str(at)) for at in (9, 11, 31, 51)]
    for number, texts in ((4, ["31"]), (NOW, ["51"]), (None, ["9", "11", "31", "51"])):
        shown_lines = printed(pages(*entries, wanted=Selection(None, number)), *lines)
        assert [one.partition("] ")[2] for one in shown_lines if one.startswith("[")] == texts
    with pytest.raises(ConfigError, match=r"--world 9: no world .* which has 3, 4, 5"):
        pages(*entries, wanted=Selection(None, 9))


def test_a_world_that_is_known_late_is_announced_once() -> None:
    job = pages(world(10, 3, THREE))
    assert printed(job, line("a", 31)) == ["── world of 3 nodes: a, b, c (round 3) ──", "[0] x"]
    assert job.take_in([world(30, 4, ["c", "a"])])
    assert not job.take_in([world(30, 4, ["c", "a"])])
    assert [str(one) for one in job.rest()] == ["── world 3 → 2: b left (round 4) ──"]
    assert printed(job, line("a", 32)) == ["[1] x"]


def test_a_clock_that_is_behind_begins_no_world_before_the_one_before_it() -> None:
    late = HistoryEntry("round", "a", "", 5.0, {"round": 4, "nodes": 1, "members": ["a"]}, 30)
    job = pages(world(10, 3, THREE), late)
    assert [one.began_unix_s for one in job.worlds] == [10.0, 10.0]


def test_the_first_error_of_the_newest_failed_round() -> None:
    history = [
        entry(1, "failed", "a", "old", round=2),
        entry(5, "failed", "b", "first", round=3),
        entry(6, "failed", "a", "follows", round=3),
        entry(7, "round", round=4, nodes=2),
    ]
    found = first_failure(history)
    assert found is not None
    assert found.why == "first"
    assert first_failure(history[3:]) is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a\x1b]0;owned\x07b", r"a\x1b]0;owned\x07b"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("10%\r50%\r90%", "90%"),
        ("90%\r", "90%"),
        ("a\tb", "a\tb"),
        ("\x9b2J", r"\x9b2J"),
        ("x\u202ey", r"x\u202ey"),
    ],
)
def test_no_control_character_reaches_the_terminal(text: str, what: str) -> None:
    assert shown(text) == what


def test_the_error_of_a_worker_is_no_word_to_the_terminal() -> None:
    failed = entry(2, "failed", "b", "ValueError: \x1b]0;mine\x07\nmuster: all is well")
    (_, title) = titles(world(1, 0, THREE), failed, world(3, 1, THREE))
    assert "ValueError" in title
    assert title.isprintable()


def test_a_stamp_is_exact_to_the_nanosecond() -> None:
    assert stamped("1970-01-01T00:00:02.000000001Z x y", 7) == (2_000_000_001, "x y")
    assert stamped("1970-01-01T01:00:02.5+01:00 x", 7) == (2_500_000_000, "x")
    assert stamped("1970-01-01T00:00:02Z", 7) == (2_000_000_000, "")
    assert stamped("rest of a long line", 7) == (7, "rest of a long line")
    assert stamped("9999-99-99T00:00:00Z x", 7) == (7, "9999-99-99T00:00:00Z x")


@pytest.mark.parametrize("text", ["", "first", "-1", "1.5"])
def test_a_wrong_rank_or_world_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--rank"):
        rank_of(text)
    with pytest.raises(ConfigError, match="--world"):
        world_of(text)


def test_lines_that_horovodrun_prints_have_the_rank_that_it_says() -> None:
    source = Source("digits-launcher")
    seating = NOBODY
    origin, text = seating.origin(source, "[2]<stderr>:loss 0.4")
    assert (origin.label, text) == ("[2]", "loss 0.4")
    assert seating.has(origin, 2)
    assert not seating.has(origin, 1)
    origin, text = seating.origin(source, "[2] is no rank")
    assert (origin.label, text) == ("[digits-launcher]", "[2] is no rank")


@pytest.fixture
def file(tmp_path: Path) -> LogFile:
    return LogFile(tmp_path / "torchrun.log", Source("node-0"))


def add(file: LogFile, content: bytes) -> list[str]:
    with file.path.open("ab") as log:
        log.write(content)
    return list(file.lines())


def test_a_line_comes_once_it_is_whole(file: LogFile) -> None:
    assert add(file, b"one\ntw") == ["one"]
    assert add(file, b"") == []
    assert add(file, "o \u2192".encode()[:-1]) == []
    assert add(file, "\u2192".encode()[-1:] + b"\n") == ["two \u2192"]


def test_a_line_that_never_ends_comes_in_pieces(file: LogFile) -> None:
    pieces = add(file, b"x" * (3 * LINE_MAX))
    rest = add(file, b"\nnext\n")
    assert sum(map(len, [*pieces, *rest[:-1]])) == 3 * LINE_MAX
    assert max(map(len, pieces)) < 2 * LINE_MAX
    assert rest[-1] == "next"


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        ({}, ["[node-0] a", "[node-0] b", "[node-1] c"]),
        ({"tail": 1}, ["[node-0] b", "[node-1] c"]),
        ({"tail": 0}, []),
        ({"with_sidecar": True, "tail": 1}, ["[node-0 sidecar] s", "[node-0] b", "[node-1] c"]),
    ],
    ids=str,
)
def test_past_lines_are_node_by_node(
    tmp_path: Path, more: dict[str, Any], lines: list[str]
) -> None:
    written = {"node-0/torchrun.log": "a\nb\n", "node-1/torchrun.log": "c\n"}
    written["node-0/sidecar.log"] = "s\n"
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    printed: list[str] = []
    job = RunningJob("127.0.0.1:1", "local", "local", 1, str(tmp_path))
    logs = LocalLogs(job, Pages(), lambda one: printed.append(str(one)), **more)
    logs.show_past()
    assert printed == lines


def test_a_new_world_is_announced_though_it_says_nothing(tmp_path: Path) -> None:
    printed: list[str] = []
    job = RunningJob("127.0.0.1:1", "local", "local", 1, str(tmp_path))
    logs = LocalLogs(job, Pages(), lambda one: printed.append(str(one)))
    details = {"round": 2, "nodes": 1, "members": ["node-0"]}
    logs.pages.take_in([HistoryEntry("round", "node-0", "", 1.0, details, 7)])
    asyncio.run(logs.look())
    assert printed == ["── world of 1 node: node-0 (round 2) ──"]


def merging_drained(merge: Merge[str], now_s: float) -> list[str]:
    found = []
    while (item := merge.take(now_s)) is not None:
        found.append(item)
    return found


def test_an_item_waits_for_an_earlier_one_of_another_source() -> None:
    merge: Merge[str] = Merge()
    a, b = merge.open(0), merge.open(0)
    merge.put(a, 20, "later", 1, 0)
    assert merge.take(0) is None
    assert merge.due_s() == HOLD_S
    merge.put(b, 10, "earlier", 1, 0.1)
    assert merging_drained(merge, 0.1) == ["earlier"]  # and then b may have another one before 20
    assert merging_drained(merge, 0.1 + HOLD_S) == ["later"]


def test_no_item_waits_longer_than_the_hold_though_others_keep_coming() -> None:
    merge: Merge[str] = Merge()
    sources = [merge.open(0) for _ in range(3)]
    merge.put(sources[0], 100, "old", 1, 0)
    for number in range(10):
        at_s = number * HOLD_S / 10
        merge.put(sources[1], number, "new", 1, at_s)
        merging_drained(merge, at_s)
    assert "old" in merging_drained(merge, HOLD_S)


def test_a_source_that_has_ended_is_not_waited_for() -> None:
    merge: Merge[str] = Merge()
    a, b = merge.open(0), merge.open(0)
    merge.put(a, 20, "a", 1, 0)
    merge.put(b, 30, "b", 1, 0)
    merge.close(a)
    merge.close(b)
    assert merging_drained(merge, 0) == ["a", "b"]


def test_a_quiet_source_holds_nobody_up() -> None:
    merge: Merge[str] = Merge()
    a = merge.open(0)
    merge.open(0)
    merge.put(a, 1, "a", 1, HOLD_S)
    assert merging_drained(merge, HOLD_S) == ["a"]


def test_each_source_keeps_its_own_order_and_all_come_out() -> None:
    random, merge = Random(7), Merge[str]()
    sources = {name: merge.open(0) for name in "abc"}
    put: list[str] = []
    got: list[str] = []
    for number in range(300):
        name = random.choice("abc")
        merge.put(sources[name], random.randrange(50), f"{name}{number:03}", 1, number)
        put.append(f"{name}{number:03}")
        if number % 7 == 0:
            got += merging_drained(merge, number)
    for source in sources.values():
        merge.close(source)
    got += merging_drained(merge, 300)
    for name in "abc":
        assert [one for one in got if one[0] == name] == [one for one in put if one[0] == name]
    assert len(got) == 300


def test_sources_share_one_budget_of_memory() -> None:
    merge: Merge[str] = Merge(budget_bytes=100)
    a, b = merge.open(0), merge.open(0)
    merge.put(a, 1, "huge", 1000, 0)
    assert not merge.has_room(a)
    assert merge.has_room(b)
    merge.put(b, 2, "small", 40, 0)
    assert merge.has_room(b)
    merge.put(b, 3, "small", 40, 0)
    assert not merge.has_room(b)
    merging_drained(merge, HOLD_S)
    assert merge.has_room(a)
    assert merge.has_room(b)
