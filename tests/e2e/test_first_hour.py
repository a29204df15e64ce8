# SPDX-License-Identifier: Apache-2.0
"""A newcomer's first hour, typed again: each command tells and ends as ``first_hour.txt`` has it.

``scripts/first-hour --write`` makes that transcript anew. The hostile ``PYTHONPATH`` and how the
trainings end are tested for themselves in ``test_installed.py`` and ``test_local_job.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.first_hour.hour import STEPS, kept_steps, run_hour, stable_lines

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1800)]


def test_every_command_of_the_first_hour_tells_what_the_transcript_has(tmp_path: Path) -> None:
    kept = kept_steps()
    assert len(kept) == len(STEPS)
    for step, before, now in zip(STEPS, kept, run_hour(tmp_path), strict=True):
        expected = stable_lines(step, before)
        assert stable_lines(step, now) == expected, now
        assert len(expected) > len(step.stable), before
