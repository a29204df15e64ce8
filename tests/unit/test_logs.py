# SPDX-License-Identifier: Apache-2.0
"""Log lines: one line each, stable fields, UTC."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from agent.telemetry import logs


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before, level


def lines(log_format: str, *records: tuple[str, dict[str, object]]) -> list[str]:
    stream = io.StringIO()
    assert log_format in ("json", "plain")
    logs.configure(log_format, {"job": "digits", "member": "node-0"}, stream)  # type: ignore[arg-type]
    for message, extra in records:
        logging.getLogger("rdzv.members.registrar").info("%s", message, extra=extra)
    return stream.getvalue().splitlines()


def test_json_lines_carry_sentence_event_and_fields() -> None:
    (text,) = lines("json", ("registered", {"event": "registration", "revision": 7}))
    line = json.loads(text)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "info",
        "message": "registered",
        "event": "registration",
        "revision": 7,
        "job": "digits",
        "member": "node-0",
    }


def test_the_event_of_a_line_without_one_is_its_logger() -> None:
    (text,) = lines("json", ("x", {}))
    assert json.loads(text)["event"] == "rdzv.members.registrar"


@pytest.mark.parametrize("log_format", ["json", "plain"])
def test_text_from_elsewhere_cannot_make_a_line_of_its_own(log_format: str) -> None:
    found = lines(log_format, ("bad\n2026 forged\x1b[2J\r\u2028end", {}))
    assert len(found) == 1
    assert "\x1b" not in found[0]


def test_plain_lines_show_the_level_where_it_is_not_the_usual_one() -> None:
    stream = io.StringIO()
    logs.configure("plain", {}, stream)
    logging.getLogger("x").info("all is well")
    logging.getLogger("x").warning("all is not")
    usual, unusual = stream.getvalue().splitlines()
    assert usual.endswith("Z all is well")
    assert unusual.endswith("Z warning: all is not")


@pytest.mark.parametrize("log_format", ["json", "plain"])
def test_a_traceback_is_told(log_format: str) -> None:
    stream = io.StringIO()
    logs.configure(log_format, {}, stream)  # type: ignore[arg-type]
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("x").exception("a defect")
    assert "RuntimeError: boom" in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 1 or log_format == "plain"
