# SPDX-License-Identifier: Apache-2.0
"""The table of ``muster status``: figures of each pod, colours, and widths of a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console import styling
from console.job import status
from console.job.history import _details, _line
from console.job.output import Grid, Toned, rendered
from console.job.reading import meant_job
from console.job.rows import NOT_RUNNING, PodFacts, beside
from console.job.status import _grids
from console.job.status_json import pods_of, rate
from launcher_shim.c10d.rounds.records import Round, Seat
from rdzv.keys import JobKeys
from rdzv.records.drain import LastCommit
from rdzv.records.history import HistoryEntry
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


def test_pods_that_do_not_run_are_beside_what_the_store_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = PodFacts("d", "Pending", why="0/2 nodes are available", runs=False)
    monkeypatch.setenv(NOT_RUNNING, beside([waits])[NOT_RUNNING])
    (grid,) = status._beside()
    assert grid.rows[0][:2] == ("d", "pending")
    assert status._waiting() == ["d is pending: 0/2 nodes are available"]
