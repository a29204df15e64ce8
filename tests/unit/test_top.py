# SPDX-License-Identifier: Apache-2.0
"""``muster top``: what is on its screen, at any width, and what its keys ask for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console.job.output import rendered
from console.job.rows import PodFacts
from console.job.status_json import status_json
from console.job.top import TopScene, Verb, meaning_of, moved, top_grids, verb_of
from rdzv.records.drain import LastCommit
from rdzv.records.history import HistoryEntry
from rdzv.records.progress import PodSaves
from tests.support.views import NOW_S, reported, run, view

SAVED = LastCommit(1000, 3, 0, at_unix_s=NOW_S - 30, run="digits")
LOST = HistoryEntry("lost", "c", "its lease expired", NOW_S - 100)
PENDING = PodFacts("d", "Pending", why="0/2 nodes: Insufficient nvidia.com/gpu", runs=False)


def scene(*, pods: tuple[PodFacts, ...] = (), paused: bool = False) -> TopScene:
    seen = view(run(), saves=reported(1200, 10), last_commit=SAVED, history=(LOST,), paused=paused)
    return TopScene("team", "digits", status_json(seen, NOW_S), pods)


def screen(shown: TopScene, width: int | None = 100, **more: str) -> str:
    return rendered(top_grids(shown, NOW_S, **more), width, False)


def test_the_screen_has_the_state_the_figures_the_pods_and_the_last_events() -> None:
    text = screen(scene())
    first, *_ = text.splitlines()
    assert first.startswith("team/digits training")
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


def test_a_pending_pod_is_on_it_with_why() -> None:
    assert "Insufficient nvidia.com/gpu" in screen(scene(pods=(PENDING,)))


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


def test_a_key_is_for_every_member_of_a_store() -> None:
    of_store = replace(scene(), pods=None)
    assert of_store.choices(of_store.line(NOW_S)) == ["a", "b"]


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
