# SPDX-License-Identifier: Apache-2.0
"""Clocks that a test sets: seconds, and the hour."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest


class HandClock:
    """Seconds, which pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class HandHour:
    """The hour, which is the present one until the test sets another."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> HandClock:
    """Seconds that pass when the test says so."""
    return HandClock()
