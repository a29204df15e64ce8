# SPDX-License-Identifier: Apache-2.0
"""The tables of ``muster status`` and ``muster top`` at any width, and where a line is broken."""

from __future__ import annotations

import io
import os
import pty
from dataclasses import replace

import pytest

from console import styling
from console.job import status
from console.job.history import _details, _line
from console.job.output import Grid, Toned, rendered
from console.job.reading import meant_job
from console.job.rows import NOT_RUNNING, PodFacts, beside
from console.job.status import _grids
from console.job.status_json import pods_of, rate, status_json
from console.job.top import TopScene, Verb, meaning_of, moved, top_grids, verb_of
from console.styling import broken, wrapped
from launcher_shim.c10d.rounds.records import Round, Seat
from rdzv.keys import JobKeys
from rdzv.records.drain import LastCommit
from rdzv.records.job import HistoryEntry
from rdzv.records.progress import PodSaves
from tests.support.records import member
from tests.support.views import ASKS, FAILED, NOW_S, TRAINS, reported, run, view

JOINED = HistoryEntry("join", "a", "", NOW_S - 8040)
SAVED = LastCommit(1000, 3, 0, at_unix_s=NOW_S - 30, run="digits")


def test_each_pod_has_its_figures() -> None:
    two = tuple(replace(member(name), slots=2) for name in "ab")
    seen = view(run(), members=two, history=(JOINED,), saves=reported(1200, 10), last_commit=SAVED)
    first, second = (pod.cells() for pod in pods_of(seen, NOW_S))
    assert first == {
        "RANKS": "0-1",
        "STEP": "1,200",
        "STEP/S": "10",
        "FAILS": "0",
        "AGE": "2 h 14 min",
    }
    assert (second["RANKS"], second["STEP"], second["AGE"]) == ("2-3", "1,200", "-")


def test_each_pod_says_what_it_does() -> None:
    doing = {
        "training": view(run()),
        "finishing": view(run(replace(TRAINS, finishing=True))),
        "ready": view(),
        "waiting": view(run(Round(3), ASKS)),
    }
    assert {word: pods_of(seen, NOW_S)[0].doing for word, seen in doing.items()} == {
        word: word for word in doing
    }
    failing = view(run(Round(3), ASKS), failures={"b": replace(FAILED, count=7)})
    (pod,) = (one for one in pods_of(failing, NOW_S) if one.name == "b")
    assert (pod.doing, pod.failures, pod.level) == ("failing", 7, "fault")


def test_a_rate_needs_a_save_on_record() -> None:
    assert rate(view(run(), saves=reported(1200, 10))) is None
    assert rate(view(run(), saves=reported(1200, 10), last_commit=SAVED)) == 10
    # The world began 252 s ago, from a save of the world before it.
    earlier = replace(SAVED, round=2)
    since_start = rate(view(run(), saves=reported(1242, 10), last_commit=earlier))
    assert since_start == 1


@pytest.mark.parametrize(
    ("saves", "saved", "line", "level"),
    [
        (reported(38, 2), None, "last save: NOT SAVED YET; 38 steps at risk", "fault"),
        (reported(1010, 2), SAVED, "last save: step 1,000 by all ranks (commit, ", None),
        (
            {"a": PodSaves("a", "uid-a", "digits", 3, (1010,), 1010, 1010, NOW_S - 31)},
            SAVED,
            "last save: step 1,000",
            "warning",
        ),
    ],
)
def test_what_is_not_saved_stands_in_red(
    saves: dict[str, PodSaves], saved: LastCommit | None, line: str, level: str | None
) -> None:
    seen = view(run(), saves=saves, last_commit=saved)
    (grid,) = (one for one in _grids(seen, wide=False) if one.title.startswith("last save"))
    assert grid.title.startswith(line)
    assert "untagged" not in grid.title
    assert grid.level == level


ROWS = Grid(
    "digits is failing: b\n→ do this",
    ("MEMBER", "STATE", "STEP", "NODE", "WHY"),
    (("b", Toned("failing", "fault"), "1", "gpu-17", "its worker ended"),),
    "fault",
)


def test_a_table_is_plain_without_a_terminal_and_coloured_on_one() -> None:
    plain = rendered([ROWS], None, styled=False)
    assert plain == (
        "digits is failing: b\n→ do this\n"
        "MEMBER  STATE    STEP  NODE    WHY\n"
        "b       failing  1     gpu-17  its worker ended\n"
    )
    shown = rendered([ROWS], 120, styled=True)
    assert "\x1b[31mdigits is failing: b\x1b[0m" in shown
    assert "\x1b[31mfailing\x1b[0m" in shown
    assert "\x1b[36m→ do this\x1b[0m" in shown


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 200])
def test_lines_fit_the_terminal(width: int) -> None:
    long = replace(ROWS, rows=(("pod-" + "x" * 60, *ROWS.rows[0][1:4], "word " * 30),))
    lines = rendered([long], width, styled=False).splitlines()
    assert max(len(line) for line in lines if "x" * 60 not in line) <= width
    assert any("word" in line for line in lines)


def test_no_color_is_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert styling.is_styled(Terminal())  # type: ignore[arg-type]
    assert "✗" in styling.symbol("fault", Terminal())  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "1")
    assert styling.symbol("fault", Terminal()) == "fault   "  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "hint"),
    [
        (JobKeys("default", "digit"), "did you mean digits?"),
        (JobKeys("default", "light"), "there is one in namespace local: add -n local"),
        (JobKeys("team", "digitz"), "did you mean digits in namespace default?"),
        (JobKeys("default", "zzz"), "it has default/digits, local/light"),
    ],
)
def test_the_job_that_was_meant_is_named(wanted: JobKeys, hint: str) -> None:
    assert meant_job(wanted, [JobKeys("default", "digits"), JobKeys("local", "light")]) == hint


def test_a_store_without_jobs_says_what_to_look_for() -> None:
    assert meant_job(JobKeys("default", "x"), []).startswith("see whether its pods have started")


def test_ranks_follow_the_order_of_the_world() -> None:
    world = Round(3, True, frozen=(Seat("b", "n", 1), Seat("a", "n", 1)))
    assert {pod.name: pod.ranks for pod in pods_of(view(run(world)), NOW_S)} == {"b": "0", "a": "1"}


def test_details_of_history_are_words() -> None:
    details = {"outcome": "expired", "saved_after_s": 0.1437, "took_s": 24.995, "pod_uid": "u"}
    entry = HistoryEntry("drain", "b", "spot", NOW_S, details)
    assert _details(entry) == ["outcome expired", "saved after 0.144 s", "took 25 s"]
    assert _line(entry).endswith(
        "drain      b: spot (outcome expired, saved after 0.144 s, took 25 s)"
    )


def test_pods_that_do_not_run_are_shown_beside_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = PodFacts("d", "Pending", why="0/2 nodes are available", runs=False)
    monkeypatch.setenv(NOT_RUNNING, beside([waits])[NOT_RUNNING])
    (grid,) = status._beside()
    assert grid.rows[0][:2] == ("d", "pending")
    assert status._waiting() == ["d is pending: 0/2 nodes are available"]


LOST = HistoryEntry("lost", "c", "its lease expired", NOW_S - 100)
PENDING = PodFacts("d", "Pending", why="0/2 nodes: Insufficient nvidia.com/gpu", runs=False)


def scene(*, pods: tuple[PodFacts, ...] = (), paused: bool = False) -> TopScene:
    seen = view(run(), saves=reported(1200, 10), last_commit=SAVED, history=(LOST,), paused=paused)
    return TopScene("team", "digits", status_json(seen, NOW_S), pods)


def screen(shown: TopScene, width: int | None = 100, **more: str) -> str:
    return rendered(top_grids(shown, NOW_S, **more), width, False)


def test_the_screen_has_the_state_the_figures_the_pods_and_the_last_events() -> None:
    text = screen(scene(pods=(PENDING,)))
    first, *_ = text.splitlines()
    assert first.startswith("team/digits training")
    assert "0/2 nodes: Insufficient nvidia.com/gpu" in text
    for figure in ("step 1,200", "10 steps/s, 0.1 s a step", "step 1,000 saved 30 s ago"):
        assert figure in text
    assert "1 min 40 s  lost" in text
    assert "its lease expired" in text


def test_the_pod_that_the_others_wait_for_is_marked() -> None:
    told = {
        name: PodSaves(name, f"uid-{name}", "digits", 3, ranks=(rank,), waits=(share,))
        for rank, (name, share) in enumerate((("a", 0.71), ("b", 0.03)))
    }
    seen = status_json(view(run(), saves=told), NOW_S)
    assert [one["slow"] for one in seen["members"]] == [False, True]  # type: ignore[attr-defined]
    rows = {line.split()[0]: line for line in screen(TopScene("t", "j", seen)).splitlines() if line}
    assert " 71%  " in rows["a"]
    assert " 3% slow  " in rows["b"]
    assert "all others wait for rank 1 (b)" in screen(TopScene("t", "j", seen))


def test_a_share_that_is_none_is_left_out() -> None:
    hostile = {"members": [{"name": "a", "state": "listed", "waits": "much", "slow": 7}]}
    assert "much" not in screen(TopScene("t", "j", hostile))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    shown = scene(pods=(PENDING,))
    text = screen(shown, width, chosen="a", keys="q quit")
    assert max(map(len, text.splitlines())) <= width


def test_a_job_whose_sidecars_are_silent_is_shown_by_its_pods() -> None:
    silent = TopScene("team", "digits", None, (PENDING,), "no sidecar runs")
    text = screen(silent)
    assert "team/digits below min" in text
    assert "no figures yet" in text


def test_the_chosen_pod_is_marked_and_drained() -> None:
    shown = scene()
    assert "> b" in screen(shown, chosen="b")
    words = ("--job", "digits", "--", "b")
    assert verb_of("drain", "digits", "b", paused=False) == Verb("drain", words, "drain b?")
    assert verb_of("drain", "digits", None, paused=False) is None


def test_a_key_is_for_pods_that_the_api_server_lists_and_for_the_job_that_the_user_named() -> None:
    hostile = {
        "job": "other",
        "members": [{"name": name, "state": "listed"} for name in ("a", "--cancel", "other-0")],
    }
    shown = TopScene("team", "digits", hostile, (PodFacts("a", "Running"),))
    line = shown.line(NOW_S)
    assert shown.choices(line) == ["a"]
    assert line.name == "digits"
    of_store = replace(scene(), pods=None)
    assert of_store.choices(of_store.line(NOW_S)) == ["a", "b"], "of a store, each member"


def test_p_pauses_a_job_and_resumes_one_that_is_paused() -> None:
    verbs = [verb_of("pause", "digits", None, paused=paused) for paused in (False, True)]
    assert [verb.name for verb in verbs if verb is not None] == ["pause", "resume"]


def test_keys() -> None:
    assert [meaning_of(key) for key in ("\x1b[A", "j", "D", "x", "q")] == [
        "up", "down", "drain", "", "quit",
    ]  # fmt: skip
    assert moved(["a", "b"], None, 1) == "a"
    assert moved(["a", "b"], "a", 1) == "b"
    assert moved(["a", "b"], "b", 1) == "b"
    assert moved(["a", "b"], "gone", -1) == "a"
    assert moved([], "a", 1) is None


TEXT = "warning  access  authentication is off: see docs/security.md#set-up, which takes 30 s"


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_a_line_is_broken_at_words_alone(columns: int) -> None:
    lines = broken(TEXT, columns, 17).splitlines()
    assert max(map(len, lines)) <= columns
    assert " ".join(" ".join(lines).split()) == " ".join(TEXT.split())
    indent = " " * (17 if columns >= 60 else 2)
    assert all(line.startswith(indent) and line[len(indent)] != " " for line in lines[1:])


def test_a_number_stays_with_its_unit_and_a_path_whole() -> None:
    assert broken("it has 30 s", 10, 2) == "it has\n  30 s"
    path = "/tmp/a-directory/with-a-long-name/torchrun.log"
    assert path in broken(f"see {path} for more", 20, 2)


def test_a_terminal_that_tells_no_size_has_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        lines = wrapped(TEXT, terminal, 17).splitlines()
    os.close(ours)
    assert lines == broken(TEXT, 80, 17).splitlines()
    assert wrapped(TEXT, io.StringIO(), 17) == TEXT, "what goes to none stays one line"
