# SPDX-License-Identifier: Apache-2.0
"""An event loop in which nothing but a seed decides what happens next.

Time is virtual: it stands still while anybody has something to do, and then jumps to the next
timer. Every simulated process has a queue of its own, first in, first out, as a real event loop
has; which process runs its turn next is drawn. So what asyncio promises within one process holds,
and between processes any order may come. Nothing is read, sent, or done in a thread.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from itertools import count
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")

Work = Callable[..., object]

TURNS_WITHOUT_TIME = 20_000
"""So many turns at one moment are no work but somebody who runs in circles."""

DISK_S = 0.004
"""Longest time that a piece of work for another thread takes; half of it takes none at all."""


LONGEST_S = 3600.0
"""No simulation lasts longer, in virtual seconds."""

LONGEST_TEST_S = 7200.0
"""No test does, either."""

UNWIND_S = 1.0


class Spinning(AssertionError):
    """Processes went on and on while no time passed."""


class Stuck(AssertionError):
    """Nobody has anything to do, now or later, or there is no end of it."""


class Process:
    """One simulated process: frozen it does nothing, dead it never does anything again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready: deque[asyncio.Handle] = deque()
        self.frozen = False
        self.dead = False
        self.queued = False
        self.context = copy_context()
        self.context.run(_running.set, self)


_running: ContextVar[Process] = ContextVar("running process")


class _Handle(asyncio.Handle):
    """A callback; not made as asyncio makes its own: each simulation has thousands."""

    __slots__ = ()
    _repr = None
    _source_traceback = None

    def __init__(
        self,
        callback: Work,
        args: tuple[Any, ...],
        loop: SimulatedLoop,
        context: Context,
    ) -> None:
        self._context = context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False


class _Task(asyncio.Task[T]):
    """A task that sets of tasks, which asyncio has, keep in an order that no address decides."""

    def __init__(self, work: Coroutine[Any, Any, T], loop: SimulatedLoop, **how: Any) -> None:
        self._number = next(loop.numbers)
        super().__init__(work, loop=loop, **how)

    def __hash__(self) -> int:
        return self._number


class SimulatedLoop(asyncio.BaseEventLoop):
    """The loop of all processes. ``after_turn`` is called when a process has had its turn."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.after_turn: Callable[[], None] = lambda: None
        self.turns = 0
        self.numbers = count()
        self.longest_s = LONGEST_S
        self._random = random
        self._now_s = 0.0
        self._ending = False
        self._turns_now = 0
        self._timers: list[asyncio.TimerHandle] = []
        self.director = Process("director")
        self._processes = [self.director]
        self._able: list[Process] = []
        self._failures: list[BaseException] = []
        self.set_exception_handler(self._failed)
        self.set_task_factory(lambda _, work, **how: _Task(work, self, **how))

    # -- processes

    def process(self, name: str) -> Process:
        """Start a process with nothing to do."""
        one = Process(name)
        self._processes.append(one)
        return one

    def spawn(self, process: Process, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task of ``process``, and with it all that comes of it."""
        return self.create_task(work, name=name, context=process.context)

    def kill(self, process: Process) -> None:
        """End a process as SIGKILL does: not one more line of it runs."""
        process.dead = True

    def thaw(self, process: Process) -> None:
        """Let a frozen process go on."""
        process.frozen = False
        self._queue(process)

    @property
    def failure(self) -> BaseException | None:
        """What a callback or a task that nobody waits for has raised first."""
        return self._failures[0] if self._failures else None

    # -- asyncio's side

    def time(self) -> float:
        """Virtual seconds since the loop began."""
        return self._now_s

    def call_soon(  # type: ignore[override]
        self, callback: Work, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Queue a callback of the process that its context belongs to."""
        if context is None:
            context = copy_context()
        handle = _Handle(callback, args, self, context)
        process = context.get(_running, self.director)
        process.ready.append(handle)
        if not process.queued:
            self._queue(process)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Queue a callback at ``when``."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, timer)
        return timer

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Queue a callback in ``delay`` seconds."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, work: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Do in a later turn of the process what a thread would do for it."""
        done: asyncio.Future[T] = self.create_future()

        def carry_out() -> None:
            try:
                result = work(*args)
            except Exception as error:
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)

        if self._random.random() < 0.5:
            self.call_soon(carry_out)
        else:
            self.call_later(self._random.random() * DISK_S, carry_out)
        return done

    def _enqueue(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(_running, self.director)  # type: ignore[attr-defined]
        process.ready.append(handle)
        if not process.queued:
            self._queue(process)

    def _queue(self, process: Process) -> None:
        """Let the process have a turn, if there is anything for it to do."""
        if process.ready and not (process.queued or process.frozen or process.dead):
            process.queued = True
            self._able.append(process)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing: a cancelled timer is passed over when its time comes."""

    def _run_once(self) -> None:
        able = self._able
        if not able:
            self._advance()
            return
        self.turns += 1
        self._turns_now += 1
        if self._turns_now > TURNS_WITHOUT_TIME:
            names = ", ".join(one.name for one in able)
            raise Spinning(f"no time passes at {self._now_s:.3f} s: {names} run in circles")
        at = self._next(able) if len(able) > 1 else 0
        chosen, able[at] = able[at], able[-1]
        able.pop()
        ready = chosen.ready
        for _ in range(len(ready)):
            if chosen.frozen or chosen.dead:
                break
            handle = ready.popleft()
            if not handle._cancelled:
                try:
                    handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
                except Exception as error:
                    self._failures.append(error)
        chosen.queued = False
        self._queue(chosen)
        self.after_turn()

    def _next(self, able: list[Process]) -> int:
        """Draw whose turn it is."""
        return int(self._random.random() * len(able))

    def _advance(self) -> None:
        timers = self._timers
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Stuck(f"nobody has anything to do at {self._now_s:.3f} s")
        self._now_s = max(self._now_s, timers[0].when())
        if self._now_s > self.longest_s and not self._ending:
            raise Stuck(f"no end after {self.longest_s:.0f} s")
        self._turns_now = 0
        while timers and timers[0].when() <= self._now_s:
            timer = heapq.heappop(timers)
            if not timer._cancelled:
                self._enqueue(timer)

    def _failed(self, loop: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._failures.append(error or AssertionError(str(context["message"])))

    # -- after the last turn

    def revive(self) -> None:
        """Let dead processes unwind their tasks, too: none of it means anything any more."""
        self.after_turn = lambda: None
        self._ending = True
        for process in self._processes:
            process.dead = False
            self.thaw(process)

    def end(self) -> None:
        """Unwind every task."""
        self.revive()
        # A story that broke in its last turn has asked the loop to stop, which is still queued.
        self.call_soon(self.stop, context=self.director.context)
        self.run_forever()
        # What lay in the queues of the dead may start more.
        while tasks := asyncio.all_tasks(self):
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=UNWIND_S))
        self.close()


class VirtualLoop(SimulatedLoop):
    """The loop of a test marked ``virtual``: one process, and a wait costs nothing.

    A test that would hang ends at once, as ``Stuck`` or ``Spinning``.
    """

    def __init__(self) -> None:
        super().__init__(Random(0))
        self.longest_s = LONGEST_TEST_S

    def close(self) -> None:
        """Raise what a callback or a task that nobody waits for has raised."""
        super().close()
        if self.failure is not None:
            raise self.failure


class ScriptedLoop(SimulatedLoop):
    """The loop of a scenario: the script, which is the director, goes before every process."""

    def __init__(self) -> None:
        super().__init__(Random(0))
        self.longest_s = LONGEST_TEST_S

    def seed(self, seed: int) -> None:
        """Draw the turns of processes by ``seed`` from now on."""
        self._random = Random(seed)

    def _next(self, able: list[Process]) -> int:
        return able.index(self.director) if self.director in able else super()._next(able)


def now() -> float:
    """Seconds of the running loop: virtual ones where it is a virtual one."""
    return asyncio.get_running_loop().time()
