# SPDX-License-Identifier: Apache-2.0
"""A sentence is logged when it changes."""

from __future__ import annotations

import logging

import pytest

from rdzv.sentences import Diary

log = logging.getLogger("tests.diary")


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=log.name)
    return caplog


def test_a_sentence_is_logged_again_only_after_another(logged: pytest.LogCaptureFixture) -> None:
    diary = Diary(log)
    for sentence in ("waits", "waits", "goes on", "waits"):
        diary.say(sentence)
    assert logged.messages == ["waits", "goes on", "waits"]
    assert diary.last == "waits"


def test_a_topic_is_logged_once_however_it_is_spelled(logged: pytest.LogCaptureFixture) -> None:
    diary = Diary(log)
    diary.say("refuses: no rights", topic="refuses")
    diary.say("refuses: still no rights", topic="refuses")
    assert logged.messages == ["refuses: no rights"]


def test_what_is_forgotten_is_new(logged: pytest.LogCaptureFixture) -> None:
    diary = Diary(log)
    diary.say("waits")
    diary.forget()
    assert diary.last == ""
    diary.say("waits")
    assert logged.messages == ["waits", "waits"]


def test_a_line_has_the_level_and_the_fields_of_its_caller(
    logged: pytest.LogCaptureFixture,
) -> None:
    Diary(log).say("refuses", level=logging.WARNING, extra={"event": "store_version"})
    (record,) = logged.records
    assert (record.levelno, record.name, vars(record)["event"]) == (
        logging.WARNING,
        log.name,
        "store_version",
    )
