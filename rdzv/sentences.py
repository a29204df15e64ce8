# SPDX-License-Identifier: Apache-2.0
"""Sentences for people: counts, durations, names of settings, and a log that writes each once."""

from __future__ import annotations

import logging
from collections.abc import Mapping

PREFIX = "MUSTER_"


class Diary:
    """The log of one condition's changes. ``last``: the newest sentence; empty before the first."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._topic = ""
        self.last = ""

    def say(
        self,
        sentence: str,
        *,
        level: int = logging.INFO,
        extra: Mapping[str, object] | None = None,
        topic: str = "",
    ) -> None:
        """Log ``sentence``, unless it, or its ``topic`` if given, is the same as last time."""
        topic = topic or sentence
        if topic != self._topic:
            self._topic, self.last = topic, sentence
            self._log.log(level, "%s", sentence, extra=extra)

    def forget(self) -> None:
        """Forget the last sentence, so that the next one is logged in any case."""
        self._topic = self.last = ""


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 node``, ``2 nodes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(seconds: float) -> str:
    """Spell a duration in its two largest units: ``41 s``, ``4 min 12 s``, ``2 h 14 min``."""
    whole = int(seconds)
    minutes, hours = whole // 60, whole // 3600
    if whole < 60:
        return f"{whole} s"
    if hours == 0:
        return f"{minutes} min {whole % 60} s"
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def variable_of(flag: str) -> str:
    """Return the variable that means the same as ``flag``, or as its ``--no-`` form."""
    name = flag.removeprefix("--").removeprefix("no-")
    return PREFIX + name.replace("-", "_").upper()


def named(flag: str) -> str:
    """Return the flag with its variable behind it, in brackets."""
    return f"{flag} ({variable_of(flag)})"
