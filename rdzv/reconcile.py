# SPDX-License-Identifier: Apache-2.0
"""The kernel of every loop that brings the store to what a decision wants.

A part looks at its inputs and decides, in ``step``; all else is here, once: it wakes at a change, a
call or a time; waits for its turn; writes one transaction under the fence, and waits until the
mirror shows what came of it; backs off; logs what changes; and knows for how long it has been
stuck, and why. No wake-up is lost: a change between the look and the wait ends the wait.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import field
from random import Random
from typing import Literal

from rdzv.dataclass import dataclass
from rdzv.diary import Diary
from rdzv.errors import LeaseLost, StoreError
from rdzv.job import JobClient
from rdzv.race import first_of
from rdzv.store import Compare, GuardedWrites
from rdzv.store.backoff import Doubling

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

Why = Literal["", "look", "turn", "lease", "store", "race", "deadline", "disk"]
"""The reason that a loop is not done: it is still reading its inputs, it is another member's turn,
the pod is not registered, the store did not answer, another write came first, the store took longer
than the write had, or the disk refused a file."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The order in which ``members`` may write one thing: the first at once, the others later.

    One that is not among them comes last; where there are none, each writes at once. The number
    that may write doubles with each turn of ``turn_s``: hundreds that are away cost a few.
    """

    me: str
    members: Sequence[str]
    turn_s: float

    def delay_s(self, jitter: float) -> float:
        """Return how long ``me`` leaves the write to the others; ``jitter`` is within 0 and 1."""
        place = self.members.index(self.me) if self.me in self.members else len(self.members)
        return place.bit_length() * self.turn_s * (1 + SPREAD * jitter)


@dataclass(frozen=True, slots=True)
class DueWrite:
    """One transaction that is due.

    ``writes`` builds it once it may be sent: it compares all that its decision rested on, but the
    fence. ``sentence`` is logged, if it is a new one, and ``written`` is called, once it is
    certainly written and the mirror shows it. ``until_s``: how long its answer is waited for, by
    the kernel's clock.
    """

    writes: Callable[[], GuardedWrites]
    sentence: str = ""
    extra: Mapping[str, object] | None = None
    level: int = logging.INFO
    written: Callable[[], None] = lambda: None
    turn: Turn | None = None
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Outlook:
    """The outcome of one look. ``look_at_s``: when to look again though nothing has changed.

    ``changed`` waits until an input differs from what the step has seen; None: only a call or the
    time ends the wait. ``again``: the step has changed an input itself.
    """

    changed: Callable[[], Awaitable[object]] | None = None
    look_at_s: float = math.inf
    write: DueWrite | None = None
    again: bool = False


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
    loops: dict[str, Reconciler] = field(default_factory=dict)

    def stuck_s(self) -> dict[tuple[str, ...], float]:
        """Return for how long each loop has not been done, by its name and the reason."""
        return {(name, one.stuck[0]): one.stuck[1] for name, one in self.loops.items()}


class Reconciler(ABC):
    """One loop. ``name`` is what the log and the metric call it."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel = kernel
        self.name = name
        self.diary = Diary(log)
        self.answered_s = -math.inf
        """The time at which the store last answered a write of this loop."""
        self._trouble = Diary(log)
        self._woken = asyncio.Event()
        self._why: Why = ""
        self._looks_since_s: float | None = None
        self._due_since_s: float | None = None
        self._jitter = 0.0
        self._retry_at_s = -math.inf
        self._failures = 0
        self._races = 0
        self._refused_s = math.inf
        """The retry interval of a file that the disk has refused in this look."""
        kernel.loops[name] = self

    @abstractmethod
    async def step(self) -> Outlook:
        """Look at the inputs and decide; may write files by ``put``."""

    def wake(self) -> None:
        """Look again, also if that is called during a look."""
        self._woken.set()

    @property
    def stuck(self) -> tuple[Why, float]:
        """The reason that this loop is not done, and for how many seconds; empty and 0 if it is."""
        since_s = self._due_since_s
        why = self._why
        if since_s is None and self._looks_since_s is not None:
            since_s, why = self._looks_since_s, "look"
        return ("", 0.0) if since_s is None else (why, self.kernel.clock() - since_s)

    async def run(self) -> None:
        """Look, carry out and wait until cancelled."""
        while True:
            self._woken.clear()
            self._refused_s = math.inf
            self._looks_since_s = self.kernel.clock()
            step = await self.step()
            self._looks_since_s = None
            if step.write is None and self._refused_s == math.inf:
                self._settle()
            due_in_s = math.inf if step.write is None else self._due_in_s(step.write)
            if step.write is not None and due_in_s <= 0:
                await self._write(step.write)
            elif not step.again:
                await self._wait(step, due_in_s)

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
        now = self.kernel.clock()
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
        client, clock = self.kernel.client, self.kernel.clock
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
            self._due_since_s = self.kernel.clock()
        return self._due_since_s

    def _settle(self) -> None:
        """Note that nothing is due any more."""
        self._why = ""
        self._due_since_s = None

    def _back_off(self, why: Why) -> None:
        self._note(why)
        pause_s = BACKOFF.drawn_after(self._failures, self.kernel.random)
        self._failures += 1
        self._retry_at_s = self.kernel.clock() + pause_s

    # -- the wait

    async def _wait(self, step: Outlook, due_in_s: float) -> None:
        """Wait for a change, a call, the time that the step has named, or that of its write."""
        waits: list[Awaitable[object]] = [self._woken.wait()]
        if step.changed is not None:
            waits.append(step.changed())
        if step.write is not None and self.kernel.fence() is None:
            waits.append(self.kernel.registered())
        await first_of(*waits, timeout_s=self._timeout_s(step, due_in_s))

    def _timeout_s(self, step: Outlook, due_in_s: float) -> float:
        return max(REST_S, min(step.look_at_s - self.kernel.clock(), due_in_s, self._refused_s))
