# SPDX-License-Identifier: Apache-2.0
"""Log lines: a sentence for people, and stable fields for machines.

Fields are what a caller gives as ``extra``; ``event`` names the kind of line. JSON by default,
``plain`` for a terminal; times are UTC. A message is one line, whatever text is in it.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal, TextIO

from launcher_shim.pod.delivery import printable

__all__ = ["JsonFormatter", "PlainFormatter", "configure", "printable"]

_NOT_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    extra = {key: value for key, value in vars(record).items() if key not in _NOT_FIELDS}
    return {"event": extra.pop("event", record.name), **extra}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JsonFormatter(logging.Formatter):
    """The format of one JSON object a line; ``always`` are fields that every line carries."""

    def __init__(self, always: Mapping[str, object]) -> None:
        super().__init__()
        self._always = dict(always)

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **self._always,
            **_fields(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, separators=(", ", ": "))


class PlainFormatter(logging.Formatter):
    """The plain format: time, level unless it is INFO, and the sentence."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        text = f"{_time(record)} {level}{printable(record.getMessage())}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def configure(
    log_format: Literal["json", "plain"],
    always: Mapping[str, object],
    stream: TextIO | None = None,
) -> None:
    """Send every log line of this process to ``stream``, by default standard error."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter(always) if log_format == "json" else PlainFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
