# SPDX-License-Identifier: Apache-2.0
"""What the log says of those who are not let into the tunnel."""

from __future__ import annotations

import logging

import pytest

from agent.tunnel.worker_end import LINES, PERIOD_S, Refusals


def test_who_knocks_without_end_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    refusals = Refusals(logging.getLogger("tunnel"), lambda: now_s)
    for _ in range(LINES + 500):
        refusals.tell("10.0.0.9", "it began with no certificate")
    assert len(caplog.records) == LINES
    now_s += PERIOD_S
    refusals.tell("10.0.0.8", "it began with no certificate")
    *_, counted, last = caplog.messages
    assert (len(caplog.messages), counted.split()[0]) == (LINES + 2, "500")
    assert "10.0.0.8" in last
