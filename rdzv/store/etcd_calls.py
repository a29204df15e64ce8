# SPDX-License-Identifier: Apache-2.0
"""Unary calls to a cluster: attempts with deadlines of their own, from endpoint to endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Any

import grpc.aio

from rdzv.errors import LeaseLost, StoreAmbiguous, StoreError, StoreRefused, StoreUnavailable
from rdzv.store.endpoints import AnswerLostError, Endpoint, Method, NotSentError, Rotation
from rdzv.store.taxonomy import Outcome, outcome

ATTEMPT_S = 1.0
"""Deadline of one attempt: an election plus one lost attempt fit well into a lease of 10 s."""

ROUND_PAUSE_S = 0.1
"""Between two rounds over all endpoints that failed at once."""


class Effect(Enum):
    """What repeating a call does."""

    READ = auto()
    IDEMPOTENT = auto()
    ONCE = auto()


class AttemptError(Exception):
    """One attempt failed."""

    def __init__(self, verdict: Outcome, method: Method, endpoint: Endpoint, message: str) -> None:
        super().__init__(f"{method.path.rpartition('/')[2]} at {endpoint.target}: {message}")
        self.outcome = verdict

    def verdict(self) -> StoreError:
        """Translate into what callers see where no other attempt is made."""
        text = str(self)
        match self.outcome:
            case Outcome.LEASE_LOST:
                return LeaseLost(text)
            case Outcome.NOT_APPLIED | Outcome.AMBIGUOUS:
                return StoreUnavailable(text)
            case _:
                return StoreRefused(text)


class Calls:
    """All calls of one client. They move on together: who fails first spares the others."""

    def __init__(self, endpoints: Sequence[Endpoint], first: int) -> None:
        self.rotation = Rotation(endpoints, first)
        self._closing = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closing.is_set()

    async def call(
        self,
        method: Method,
        request: Any,
        timeout_s: float,
        effect: Effect,
        *,
        done: Outcome | None = None,
    ) -> Any:
        """Make a call; an answer of outcome ``done`` is a success without a response."""
        _, response = await self.call_somewhere(method, request, timeout_s, effect, done=done)
        return response

    async def call_somewhere(
        self,
        method: Method,
        request: Any,
        timeout_s: float,
        effect: Effect,
        *,
        done: Outcome | None = None,
    ) -> tuple[Endpoint, Any]:
        """Try the endpoints in turn until one answers, the deadline, or an ambiguous write."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        attempts = 0
        ambiguous = False
        while True:
            endpoint = self.rotation.current
            left_s = deadline_s - loop.time()
            try:
                return endpoint, await self.attempt(endpoint, method, request, left_s)
            except AttemptError as failed:
                if failed.outcome is done:
                    return endpoint, None
                if failed.outcome not in (Outcome.NOT_APPLIED, Outcome.AMBIGUOUS):
                    raise failed.verdict() from None
                reason = str(failed)
                ambiguous |= failed.outcome is Outcome.AMBIGUOUS and effect is not Effect.READ
            attempts += 1
            if self._closing.is_set() or (ambiguous and effect is Effect.ONCE):
                break
            if attempts % len(self.rotation) == 0:
                await self.pause(min(ROUND_PAUSE_S, max(deadline_s - loop.time(), 0)))
            if loop.time() >= deadline_s:
                break
        kind = StoreAmbiguous if ambiguous else StoreUnavailable
        raise kind(
            f"{reason} ({attempts} attempts in {loop.time() - deadline_s + timeout_s:.1f} s)"
        )

    async def attempt(self, endpoint: Endpoint, method: Method, request: Any, left_s: float) -> Any:
        """Make one call at one endpoint; moves the watches away as well if that is needed."""
        if self._closing.is_set():
            raise AttemptError(Outcome.NOT_APPLIED, method, endpoint, "this client is closed")
        connection = endpoint.connection
        try:
            return await endpoint.call(method, request, min(ATTEMPT_S, left_s))
        except NotSentError as error:
            failed = AttemptError(Outcome.NOT_APPLIED, method, endpoint, str(error))
            timed_out = True
        except AnswerLostError as error:
            failed = AttemptError(Outcome.AMBIGUOUS, method, endpoint, str(error))
            timed_out = False
        except grpc.aio.AioRpcError as error:
            message = error.details() or str(error.code())
            failed = AttemptError(outcome(error.code(), message), method, endpoint, message)
            timed_out = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if failed.outcome in (Outcome.NOT_APPLIED, Outcome.AMBIGUOUS):
            self.rotation.leave(endpoint)
            if timed_out and left_s >= ATTEMPT_S and connection == endpoint.connection:
                endpoint.kick(str(failed))
                if len(self.rotation) == 1 and failed.outcome is Outcome.AMBIGUOUS:
                    endpoint.reconnect(ATTEMPT_S)
        raise failed

    async def pause(self, pause_s: float) -> None:
        """Wait before another round, unless the client is closed meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._closing.wait()

    async def close(self) -> None:
        """Give every connection back; calls that wait end now."""
        if self._closing.is_set():
            return
        self._closing.set()
        for endpoint in self.rotation:
            await endpoint.close()
