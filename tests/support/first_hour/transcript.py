# SPDX-License-Identifier: Apache-2.0
"""The transcript that is kept of a newcomer's first hour."""

from __future__ import annotations

from tests.support.sources import ROOT

TRANSCRIPT = ROOT / "tests" / "e2e" / "first_hour.txt"
HEAD = """\
The first hour with Muster, typed into a clean folder that has two trainings, plain.py and
drains.py, a crash.py, and modules named as Muster's own packages. Made by
scripts/first-hour --write; tests/e2e/test_first_hour.py compares what comes in any run.
T is a time, N a number.
"""


def kept_steps() -> list[str]:
    """What each step printed when the transcript was made."""
    _, *steps = TRANSCRIPT.read_text(encoding="utf-8").split("\n$ ")
    return [f"$ {step}" for step in steps]
