# SPDX-License-Identifier: Apache-2.0
"""The event loop that each unit test runs in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from tests.support.clocks.hand import clock
from tests.support.clocks.virtual import VirtualLoop

__all__ = ["clock", "pytest_asyncio_loop_factories"]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What is marked ``virtual`` waits for nothing."""
    if item.get_closest_marker("virtual"):
        return {"virtual": VirtualLoop}
    return {"asyncio": asyncio.new_event_loop}
