# SPDX-License-Identifier: Apache-2.0
"""Waiting for what another process does, in tests that are plain functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

LOOK_INTERVAL_S = 0.05

DEADLINE_S = 90.0
"""Ends what hangs, in a test that says nothing else: what is well needs a fraction of it."""


def wait_until(
    condition: Callable[[], object], timeout_s: float, what: str, story: Callable[[], str] = str
) -> None:
    """Wait for a condition; fail with ``what`` and a story of what has happened instead."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s or condition(), (
            f"not within {timeout_s:g} s: {what}\n{story()}"
        )
        time.sleep(LOOK_INTERVAL_S)


class Timeline:
    """What is told of a drill, and waits that show it where they fail."""

    def __init__(self) -> None:
        self.told: list[tuple[float, str]] = []

    def tell(self, what: str) -> None:
        """Put a line into the timeline."""
        self.told.append((time.monotonic(), what))

    def until(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Wait for a condition."""
        wait_until(condition, timeout_s, what, self.timeline)

    def moments(self) -> Iterator[tuple[float, str]]:
        """What was told and seen; times are monotonic."""
        yield from self.told

    def timeline(self) -> str:
        """What happened, in order."""
        moments = sorted(self.moments())
        first_s = moments[0][0] if moments else 0.0
        return "\n".join(f"{at_s - first_s:7.1f} s  {what}" for at_s, what in moments)
