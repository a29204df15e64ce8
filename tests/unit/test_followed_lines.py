# SPDX-License-Identifier: Apache-2.0
"""The lines of a command in a sidecar, as its output comes in pieces."""

from __future__ import annotations

import pytest

from console.remote.pods import JobPod
from console.remote.sidecar import LINE_MAX, Lines, StatusNews, last_object

RUNS = JobPod("team", "a", "uid-a", phase="Running", sidecar="muster", sidecar_runs=True)


def test_lines_are_whole() -> None:
    lines = Lines()
    pieces = ("a", "b\nc", "\n", "\nd", "e\nf")
    assert [lines.take(piece) for piece in pieces] == [
        [],
        ["ab"],
        ["c"],
        [
            "",
        ],
        ["de"],
    ]


@pytest.mark.parametrize("before", ["", "whole\n", "x" * (LINE_MAX // 2)])
def test_a_line_that_is_too_long_is_refused(before: str) -> None:
    lines = Lines()
    lines.take(before)
    with pytest.raises(ValueError, match="a line of more than 1 MiB"):
        lines.take("x" * (LINE_MAX + 1))
    with pytest.raises(ValueError, match="a line of more than 1 MiB"):
        Lines().take("x" * (LINE_MAX + 1) + "\n")


def test_many_lines_may_come_at_once() -> None:
    assert len(Lines().take("y" * 1000 + ("\n" + "x" * 1000) * 3000)) == 3000


def test_news_are_whole_objects() -> None:
    news = StatusNews([RUNS])
    news.take('{"job": "digits"}')
    news.take("muster: a remark")
    assert news.status == {"job": "digits"}
    assert news.trouble == "what its sidecar says cannot be read"
    news.fail("its pod went")
    assert (news.status, news.trouble) == ({"job": "digits"}, "its pod went")
    news.take('{"job": "again"}')
    assert (news.status, news.trouble) == ({"job": "again"}, "")


def test_nothing_is_known_of_a_job_whose_sidecars_have_ended() -> None:
    news = StatusNews([RUNS])
    news.take('{"job": "digits"}')
    news.pods = []
    news.fail("no pod has a running sidecar")
    assert news.status is None


def test_the_last_object_of_a_text() -> None:
    assert last_object('{"a": 1}\n{"b": 2}\nmuster: a remark\n') == {"b": 2}
    assert last_object("[]\n" + "[" * 100_000) is None
