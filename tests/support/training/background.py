# SPDX-License-Identifier: Apache-2.0
"""An event loop in a thread: the tests that steer processes are plain functions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Background:
    """``with Background() as background: background.run(coroutine)``."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="background", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        assert not self._thread.is_alive(), "something blocks the loop in the background"
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        """Run ``work`` there and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def later(self, function: Callable[[], object]) -> None:
        """Call ``function`` there soon."""
        self._loop.call_soon_threadsafe(function)

    def call(self, function: Callable[[], None]) -> None:
        """Call ``function`` there and wait for it."""

        async def work() -> None:
            function()

        self.run(work())
