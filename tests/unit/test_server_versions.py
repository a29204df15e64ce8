# SPDX-License-Identifier: Apache-2.0
"""Which versions of etcd a job may rest on."""

from __future__ import annotations

import pytest

from rdzv.store.etcd.answers import judge_version, progress_is_certain


@pytest.mark.parametrize(
    ("version", "level", "part"),
    [
        ("3.6.16", "ok", "3.6.16"),
        ("3.6.14", "ok", ""),
        ("3.7.1", "ok", ""),
        ("4.0.0", "ok", ""),
        ("3.5.33", "ok", ""),
        ("3.6.13", "warning", "may not read"),
        ("3.5.23", "warning", "may not read"),
        ("3.6.5", "warning", "may not read"),
        ("3.7.0", "warning", "may not read"),
        ("3.6.4", "fault", "a lease that is gone"),
        ("3.5.22", "fault", "a lease that is gone"),
        ("3.5.17", "fault", "miss events"),
        ("3.5.12", "fault", "frozen"),
        ("3.5.7", "fault", "ahead of pending events"),
        ("3.5.1", "fault", "lose writes"),
        ("3.4.45", "fault", "no longer maintained"),
        ("3.4.24", "fault", "ahead of pending events"),
        ("3.4.23", "fault", "frozen"),
        ("3.3.27", "fault", "frozen"),
        ("3.6.0+memory", "warning", "keeps nothing"),
        ("nightly", "warning", "not a known version"),
        ("", "warning", "not a known version"),
    ],
)
def test_a_version_is_judged_with_the_reason(version: str, level: str, part: str) -> None:
    found, why = judge_version(version)
    assert found == level
    assert part in why


def test_what_was_mended_is_not_told_of() -> None:
    assert "ahead of pending events" not in judge_version("3.5.8")[1]
    assert "ahead of pending events" not in judge_version("3.4.25")[1]


def test_what_is_not_fatal_is_left_out_where_something_is() -> None:
    assert "may not read" not in judge_version("3.5.1")[1]
    assert "lose writes" not in judge_version("3.4.23")[1]


@pytest.mark.parametrize(
    ("version", "certain"),
    [
        ("3.7.1", True),
        ("3.6.0+memory", True),
        ("3.6.0-rc.2", True),
        ("3.5.8", True),
        ("3.5.7", False),
        ("3.4.25", True),
        ("3.4.24", False),
        ("3.3.27", False),
        ("nightly", False),
        ("", False),
    ],
)
def test_progress_is_relied_on_by_version(version: str, certain: bool) -> None:
    assert progress_is_certain(version) is certain
