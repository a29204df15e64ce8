# SPDX-License-Identifier: Apache-2.0
"""The kernel of the loops that bring something to what a decision wants.

A part looks at its inputs and decides, in ``step``. A ``Loop`` looks again at a change, a call or
a time; no wake-up is lost: a change between the look and the wait ends the wait. A ``Reconciler``
is a loop that writes to the store: it waits for its turn; writes one transaction under the fence,
and waits until the mirror shows what came of it; backs off; logs what changes; and knows for how
long it has been stuck, and why. A task that meets a defect of its own reports it, and starts
again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from random import Random
from typing import Any, Literal

from rdzv.dataclass import dataclass
from rdzv.errors import LeaseLost, StoreError
from rdzv.job import JobClient
from rdzv.pacing import Doubling
from rdzv.sentences import Diary
from rdzv.store import Compare, GuardedWrites

log = logging.getLogger(__name__)

BACKOFF = Doubling(0.4, 1.0)
"""Backoff after a write that the store did not answer, or that lost a race for the second time in a
row, in seconds."""

DISK_RETRY_S = 0.2
"""Retry interval of a file that the disk did not take, in seconds."""

REST_S = 0.01
"""Least wait for a time, in seconds, so that a decision that asks for the past does not spin."""

SPREAD = 0.2
"""Jitter of a turn: its largest random delay, as a fraction of the turn."""

DEFECT_PAUSE_S = 30.0
"""Restart delay of a task after a defect; the others, and the webhook, go on meanwhile."""


async def first_of(*waits: Awaitable[Any], timeout_s: float | None = None) -> Any:
    """Wait until one of ``waits`` has ended, and cancel the others; return its result.

    None if ``timeout_s`` has passed before; None or infinite: no limit. Raises what one that has
    ended has raised.
    """
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(
            tasks,
            timeout=None if timeout_s == math.inf else timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        return next(iter([task.result() for task in tasks if task in done]), None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


Why = Literal["", "look", "turn", "lease", "store", "race", "deadline", "disk"]
"""The reason that a loop is not done: it is still reading its inputs, it is another member's turn,
the pod is not registered, the store did not answer, another write came first, the store took longer
than the write had, or the disk refused a file."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The order in which ``members`` may write one thing: the first at once, the others later.

    One that is not among them comes last; where there are none, each writes at once. The number
    that may write doubles with each turn of ``turn_s``: hundreds that are away cost a few. ``of``:
    what is written; the turns begin again with another one.
    """

    me: str
    members: Sequence[str]
    turn_s: float
    of: object = None

    def delay_s(self, jitter: float) -> float:
        """Return how long ``me`` leaves the write to the others; ``jitter`` is within 0 and 1."""
        place = self.members.index(self.me) if self.me in self.members else len(self.members)
        return place.bit_length() * self.turn_s * (1 + SPREAD * jitter)


@dataclass(frozen=True, slots=True)
class DueWrite:
    """One transaction that is due.

    ``writes`` builds it once it may be sent: it compares all that its decision rested on, but the
    fence. ``sentence`` is logged, if it is a new one, and ``written`` is called, once it is
    certainly written and the mirror shows it; ``failed`` is called with an error of the store.
    ``until_s``: how long its answer is waited for, by the kernel's clock.
    """

    writes: Callable[[], GuardedWrites]
    sentence: str = ""
    extra: Mapping[str, object] | None = None
    level: int = logging.INFO
    written: Callable[[], None] = lambda: None
    failed: Callable[[StoreError], None] = lambda error: None
    turn: Turn | None = None
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Outlook:
    """The outcome of one look. ``look_at_s``: when to look again though nothing has changed.

    ``changed`` waits until an input differs from what the step has seen; None: only a call or the
    time ends the wait. ``again``: the step has changed an input itself. ``burst_s``: how long to
    gather more changes after the first, so that a burst of them costs one look.
    """

    changed: Callable[[], Awaitable[object]] | None = None
    look_at_s: float = math.inf
    write: DueWrite | None = None
    again: bool = False
    burst_s: float = 0.0


def loop_time() -> float:
    """Return the time of the event loop: monotonic, in seconds."""
    return asyncio.get_running_loop().time()


class Loop(ABC):
    """One loop. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = loop_time) -> None:
        self.clock = clock
        self._woken = False
        self._waiting: asyncio.Timeout | None = None

    @abstractmethod
    async def step(self) -> Outlook:
        """Look at the inputs and act; return what to wait for."""

    def wake(self) -> None:
        """Look again, also if that is called during a look."""
        self._woken = True
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(loop_time())

    async def run(self) -> None:
        """Look and wait until cancelled."""
        while True:
            self._woken = False
            step = await self._look()
            if step.again:
                continue
            if not self._woken:
                await self._wait(step)
            # What comes at the same time costs one look.
            await asyncio.sleep(step.burst_s)

    async def _look(self) -> Outlook:
        return await self.step()

    async def _wait(self, step: Outlook) -> None:
        """Wait for a change, a call or the time; a call moves the limit to now: no task is made."""
        timeout_s = self._timeout_s(step)
        limit = self._waiting = asyncio.timeout(timeout_s if timeout_s < math.inf else None)
        try:
            async with limit:
                await self._until_changed(step)
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            self._waiting = None

    async def _until_changed(self, step: Outlook) -> None:
        await (asyncio.Event().wait() if step.changed is None else step.changed())

    def _timeout_s(self, step: Outlook) -> float:
        return max(REST_S, step.look_at_s - self.clock())


@dataclass(frozen=True, slots=True)
class Kernel:
    """The surroundings that the loops of one member share. ``clock`` is monotonic, in seconds.

    ``fence`` returns the compares that every write carries, None while the member is not
    registered; ``registered`` waits until it is.
    """

    client: JobClient
    fence: Callable[[], Sequence[Compare] | None]
    registered: Callable[[], Awaitable[object]]
    clock: Callable[[], float]
    random: Random
    loops: set[Reconciler] = field(default_factory=set)

    def stuck_s(self) -> dict[tuple[str, ...], float]:
        """Return for how long the loops of each name have not been done, by name and reason."""
        found: dict[tuple[str, ...], float] = {}
        for one in self.loops:
            why, stuck_s = one.stuck
            found[one.name, why] = max(stuck_s, found.get((one.name, why), 0.0))
        return found


class Reconciler(Loop):
    """One loop that writes to the store. ``name`` is what the log and the metric call it."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        super().__init__(kernel.clock)
        self.kernel = kernel
        self.name = name
        self.diary = Diary(log)
        self.answered_s = -math.inf
        """The time at which the store last answered a write of this loop."""
        self._trouble = Diary(log)
        self._why: Why = ""
        self._looks_since_s: float | None = None
        self._due_since_s: float | None = None
        self._jitter = 0.0
        self._retry_at_s = -math.inf
        self._failures = 0
        self._races = 0
        self._refused_s = math.inf
        """The retry interval of a file that the disk has refused in this look."""
        self._turn_of: object = None

    async def run(self) -> None:
        """Look, carry out and wait until cancelled."""
        self.kernel.loops.add(self)
        try:
            await super().run()
        finally:
            self.kernel.loops.discard(self)

    @property
    def stuck(self) -> tuple[Why, float]:
        """The reason that this loop is not done, and for how many seconds; empty and 0 if it is."""
        since_s = self._due_since_s
        why = self._why
        if since_s is None and self._looks_since_s is not None:
            since_s, why = self._looks_since_s, "look"
        return ("", 0.0) if since_s is None else (why, self.clock() - since_s)

    async def _look(self) -> Outlook:
        """Look, and carry out what is due by now."""
        self._refused_s = math.inf
        self._looks_since_s = self.clock()
        step = await self.step()
        self._looks_since_s = None
        if step.write is None:
            if self._refused_s == math.inf:
                self._settle()
            return step
        due_in_s = self._due_in_s(step.write)
        if due_in_s <= 0:
            await self._write(step.write)
            return replace(step, again=True)
        return replace(step, look_at_s=min(step.look_at_s, self.clock() + due_in_s))

    async def put(
        self,
        putting: Callable[[], object],
        complain: Callable[[OSError], None],
        *,
        retry_s: float = DISK_RETRY_S,
    ) -> bool:
        """Write a file in a thread; if the disk refuses it, return False, and look again soon."""
        try:
            await asyncio.to_thread(putting)
        except OSError as error:
            complain(error)
            self._refused_s = retry_s
            self._note("disk")
            return False
        return True

    # -- the write

    def _due_in_s(self, write: DueWrite) -> float:
        """Return the seconds until ``write`` may be sent, infinite without a registration."""
        now = self.clock()
        if write.turn is not None and write.turn.of != self._turn_of:
            self._turn_of, self._due_since_s = write.turn.of, None
        if self._due_since_s is None:
            self._jitter = self.kernel.random.random()
        since_s = self._note(self._why or "turn")
        if self.kernel.fence() is None:
            self._note("lease")
            return math.inf
        turn_s = since_s + write.turn.delay_s(self._jitter) if write.turn else now
        if turn_s > max(now, self._retry_at_s):
            self._note("turn")
        return max(turn_s, self._retry_at_s) - now

    async def _write(self, write: DueWrite) -> None:
        """Send the transaction once; return when the mirror shows what came of it.

        If the watch lags or the store is away, it returns before: the compares make it harmless to
        decide again from an old mirror.
        """
        client, clock = self.kernel.client, self.clock
        try:
            left_s = write.until_s - clock()
            async with asyncio.timeout(left_s if 0 < left_s < math.inf else None):
                compares, operations = write.writes()
                guarded = [*compares, *(self.kernel.fence() or ())]
                result = await client.store.txn(guarded, list(operations))
        except TimeoutError:
            self._back_off("deadline")
            return
        except StoreError as error:
            if not isinstance(error, LeaseLost):
                self._trouble.say(f"{self.name}: retrying a write: {error}")
            self._back_off("store")
            write.failed(error)
            return
        self.answered_s = clock()
        self._failures = 0
        await client.mirror.shown(result.revision)
        if result.succeeded:
            self._races = 0
            self._settle()
            if write.sentence:
                self.diary.say(write.sentence, level=write.level, extra=write.extra)
            write.written()
            return
        # After one loss the mirror shows the winner. This sidecar may lose every time, though.
        self._races += 1
        self._note("race")
        if self._races > 1:
            self._back_off("race")

    def _note(self, why: Why) -> float:
        """Note that something is due, and why it is not done; return since when it is."""
        self._why = why
        if self._due_since_s is None:
            self._due_since_s = self.clock()
        return self._due_since_s

    def _settle(self) -> None:
        """Note that nothing is due any more."""
        self._why = ""
        self._due_since_s = None

    def _back_off(self, why: Why) -> None:
        self._note(why)
        pause_s = BACKOFF.drawn_after(self._failures, self.kernel.random)
        self._failures += 1
        self._retry_at_s = self.clock() + pause_s

    # -- the wait

    async def _until_changed(self, step: Outlook) -> None:
        changed = super()._until_changed(step)
        unfenced = step.write is not None and self.kernel.fence() is None
        await (first_of(changed, self.kernel.registered()) if unfenced else changed)

    def _timeout_s(self, step: Outlook) -> float:
        return min(super()._timeout_s(step), max(REST_S, self._refused_s))


def log_defect(sentence: str, error: BaseException, **fields: str) -> None:
    """Log ``sentence`` as a defect of Muster, with the traceback; ``fields`` are for machines."""
    extra = {"event": "defect", **fields}
    log.critical("a defect of muster: %s", sentence, exc_info=error, extra=extra)


async def restarted(what: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work`` until cancelled, and restart it after a defect, ``DEFECT_PAUSE_S`` later."""
    while True:
        try:
            await work()
        except* Exception as group:
            for error in errors_in(group):
                log_pause(what, error)
        await asyncio.sleep(DEFECT_PAUSE_S)


def log_pause(what: str, error: BaseException) -> None:
    """Report a defect after which a task pauses for ``DEFECT_PAUSE_S``."""
    log_defect(f"{what} pauses for {DEFECT_PAUSE_S:g} s: {error}", error)


def errors_in(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors of a group, and of the groups in it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from errors_in(error)
        else:
            yield error
