# SPDX-License-Identifier: Apache-2.0
"""Threads in virtual time: each runs only while the event loop waits for it.

What blocks in a strand waits in the loop, so code that is written for threads (torch's rendezvous
handlers) takes its turns as a task does. ``torch_in_strands`` gives torch the loop's time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar
from unittest.mock import patch

T = TypeVar("T")

LOCKED_S = 0.005
"""Between two looks at a lock."""

_own = threading.local()


class Killed(BaseException):
    """Unwinds a strand that was killed."""


class Strand:
    """A thread beside a task that does all its waiting. Its strands are killed with it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> None:
        self.loop = loop
        self._waits: SimpleQueue[Callable[[], Awaitable[Any]] | None] = SimpleQueue()
        self._answers: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._killed = False
        self._strands: list[Strand] = []
        maker: Strand | None = getattr(_own, "strand", None)
        if maker is not None:
            maker._strands.append(self)
        threading.Thread(target=self._run, args=(work,), daemon=True).start()
        self.task = loop.create_task(self._follow())

    def kill(self) -> None:
        """End it wherever it waits, as SIGKILL does."""
        self._killed = True
        self.task.cancel()
        for one in self._strands:
            one.kill()

    def wait(self, make: Callable[[], Awaitable[T]]) -> T:
        """Wait, in the thread, for what ``make`` gives in the loop."""
        self._waits.put(make)
        result: T = self._answers.get()()
        return result

    def _run(self, work: Callable[[], object]) -> None:
        _own.strand = self
        try:
            self._answers.get()()
            work()
        except Killed:
            pass
        finally:
            for one in self._strands:
                one.kill()
            self._waits.put(None)

    async def _follow(self) -> None:
        answer: Callable[[], Any] = partial(_give, None)
        while True:
            self._answers.put(answer)
            make = self._waits.get()  # the loop stands still until the strand waits, or has ended
            if make is None:
                return
            try:
                if self._killed:
                    raise asyncio.CancelledError
                answer = partial(_give, await make())
            except asyncio.CancelledError:
                self._killed = True
                answer = partial(_raise, Killed())
            except Exception as error:
                answer = partial(_raise, error)


def _give(result: T) -> T:
    return result


def _raise(error: BaseException) -> NoReturn:
    raise error


def wait(make: Callable[[], Awaitable[T]]) -> T:
    """Wait in the strand that runs."""
    strand: Strand = _own.strand
    return strand.wait(make)


class Time:
    """What a strand has for the module ``time``."""

    @staticmethod
    def monotonic() -> float:
        strand: Strand = _own.strand
        return strand.loop.time()

    @staticmethod
    def sleep(seconds: float) -> None:
        wait(lambda: asyncio.sleep(seconds))


class Datetime(datetime):
    """What a strand has for the class ``datetime``."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime(2026, 1, 1, tzinfo=tz) + timedelta(seconds=Time.monotonic())

    @classmethod
    def utcnow(cls) -> datetime:  # type: ignore[override]
        return cls.now(UTC).replace(tzinfo=None)


class Lock:
    """What strands have for ``threading.Lock``."""

    def __init__(self) -> None:
        self._held = False

    def __enter__(self) -> None:
        while self._held:
            Time.sleep(LOCKED_S)
        self._held = True

    def __exit__(self, *raised: object) -> None:
        self._held = False


class PeriodicTimer:
    """What strands have for torch's timer of keep-alives."""

    def __init__(self, interval: timedelta, function: Callable[..., Any], *args: Any) -> None:
        self._interval_s = interval.total_seconds()
        self._function = partial(function, *args)
        self._stopped = asyncio.Event()
        self._strand: Strand | None = None

    def set_name(self, name: str) -> None:
        """Nobody reads it."""

    def start(self) -> None:
        self._strand = Strand(_own.strand.loop, self._run)

    def cancel(self) -> None:
        """Stop it, and wait until its last call is over."""
        self._stopped.set()
        if self._strand is not None:
            task = self._strand.task
            wait(lambda: asyncio.wait({task}))

    def _run(self) -> None:
        while not wait(self._is_stopped):
            self._function()

    async def _is_stopped(self) -> bool:
        try:
            async with asyncio.timeout(self._interval_s):
                return await self._stopped.wait()
        except TimeoutError:
            return False


@contextmanager
def torch_in_strands() -> Iterator[None]:
    """Let torch's rendezvous handlers tell the time, wait, and keep alive as strands do."""
    rendezvous = "torch.distributed.elastic.rendezvous"
    with (
        patch(f"{rendezvous}.utils.time", Time),
        patch.multiple(
            f"{rendezvous}.dynamic_rendezvous",
            time=Time,
            datetime=Datetime,
            _PeriodicTimer=PeriodicTimer,
        ),
    ):
        yield
