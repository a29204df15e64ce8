# SPDX-License-Identifier: Apache-2.0
"""Unary calls to a cluster: attempts with deadlines of their own, from endpoint to endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from enum import Enum, auto
from random import Random
from typing import Any

from rdzv.errors import (
    Compacted,
    LeaseLost,
    StoreAmbiguous,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from rdzv.pacing import Doubling
from rdzv.sentences import named
from rdzv.store import etcd_pb2 as pb
from rdzv.store.access import Access
from rdzv.store.etcd.answers import Outcome, StatusCode, StatusError, explained, outcome
from rdzv.store.etcd.credentials import Login, LoginRefusedError, LoginUnansweredError
from rdzv.store.etcd.endpoint import (
    AUTHENTICATE,
    HAS_LEADER,
    STATUS,
    UNSAID,
    AnswerLostError,
    BusyError,
    EtcdEndpoint,
    Metadata,
    Method,
    NotSentError,
    OneStore,
    Rotation,
)

ROUND_PAUSE = Doubling(0.1, 0.5)
"""Backoff between two rounds over all endpoints that failed at once: mostly while members elect."""


class Effect(Enum):
    """The effect of a call that is repeated."""

    READ = auto()
    IDEMPOTENT = auto()
    ONCE = auto()


class AttemptError(Exception):
    """The failure of one attempt."""

    def __init__(
        self, outcome: Outcome, method: Method, endpoint: EtcdEndpoint, message: str
    ) -> None:
        super().__init__(f"{method.path.rpartition('/')[2]} at {endpoint.target}: {message}")
        self.outcome = outcome
        self.why = message
        self.tried: tuple[EtcdEndpoint, ...] | None = None
        """The result of ``Rotation.leave``, if the endpoint was left for this."""

    def verdict(self) -> StoreError:
        """Return the error for the caller if no other attempt is made."""
        text = str(self)
        match self.outcome:
            case Outcome.LEASE_LOST:
                return LeaseLost(text)
            case Outcome.NOT_APPLIED | Outcome.AMBIGUOUS:
                return StoreUnavailable(text)
            case Outcome.FULL:
                return StoreFull(text)
            case Outcome.COMPACTED:
                return Compacted(text, 0)  # etcd does not say here what it still has
            case _:
                return StoreRefused(text)


class Calls:
    """All calls of one client. They move on together: the first failure spares the others."""

    def __init__(
        self, endpoints: Sequence[EtcdEndpoint], first: int, access: Access, random: Random
    ) -> None:
        self.rotation = Rotation(endpoints, first, random)
        self._random = random
        self._login = Login(access, self._authenticate, random) if access.user else None
        self._login_tried: tuple[EtcdEndpoint, ...] = ()
        self._one_store = OneStore(self.rotation, self._store_id)
        self._closing = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closing.is_set()

    @property
    def metadata(self) -> Metadata:
        """The metadata that every call carries now."""
        return HAS_LEADER + self._login.metadata if self._login else HAS_LEADER

    def reject(self, metadata: Metadata) -> None:
        """Note that the store refused the metadata of a call."""
        if self._login is not None:
            self._login.reject(metadata[len(HAS_LEADER) :])

    async def call(
        self,
        method: Method,
        request: Any,
        timeout_s: float,
        effect: Effect,
        *,
        done: Outcome | None = None,
        attempt_s: float = 0.0,
    ) -> tuple[EtcdEndpoint, Any]:
        """Try the endpoints in turn until one answers, the deadline, or an ambiguous write.

        Returns the endpoint that answered and its response; an answer of outcome ``done`` is a
        success without a response. No attempt is given up before ``attempt_s``, or the deadline.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        attempts = 0
        tried: tuple[EtcdEndpoint, ...] = ()
        ambiguous = False
        login_renewed = False
        reason = ""
        while True:
            endpoint = self.rotation.current
            left_s = deadline_s - loop.time()
            try:
                answer = self.attempt(endpoint, method, request, left_s, tried, attempt_s)
                return endpoint, await answer
            except AttemptError as failed:
                if failed.outcome is done:
                    return endpoint, None
                if failed.outcome is Outcome.LOGIN_NEEDED and not login_renewed:
                    login_renewed = True
                    continue
                if failed.outcome not in (Outcome.NOT_APPLIED, Outcome.AMBIGUOUS):
                    raise failed.verdict() from None
                # An attempt that the deadline cut short says less about the store than one before
                # it.
                if not reason or left_s >= max(endpoint.patience.attempt_s, attempt_s):
                    reason = str(failed)
                if failed.tried is not None:
                    tried = failed.tried
                ambiguous |= failed.outcome is Outcome.AMBIGUOUS and effect is not Effect.READ
            attempts += 1
            if self._closing.is_set() or (ambiguous and effect is Effect.ONCE):
                break
            if attempts % len(self.rotation) == 0:
                await self.pause(attempts // len(self.rotation), deadline_s - loop.time())
            if loop.time() >= deadline_s:
                break
        kind = StoreAmbiguous if ambiguous else StoreUnavailable
        raise kind(
            f"{reason} ({attempts} attempts in {loop.time() - deadline_s + timeout_s:.1f} s)"
        )

    def attempt(
        self,
        endpoint: EtcdEndpoint,
        method: Method,
        request: Any,
        left_s: float,
        tried: tuple[EtcdEndpoint, ...],
        least_s: float = 0.0,
    ) -> Coroutine[Any, Any, Any]:
        """Make one call at one endpoint; moves the watches away as well if that is needed.

        ``tried`` have failed before in the same round. It is not given up before ``least_s``. A
        token that the store refuses is dropped, so that the next attempt gets a new one.
        """
        if self._login is not None or not self._one_store.is_sure_of(endpoint):
            return self._attempt_prepared(endpoint, method, request, left_s, tried, least_s)
        timeout_s = min(max(endpoint.patience.attempt_s, least_s), left_s)
        return self._attempt(endpoint, method, request, timeout_s, HAS_LEADER, tried)

    async def _attempt_prepared(
        self,
        endpoint: EtcdEndpoint,
        method: Method,
        request: Any,
        left_s: float,
        tried: tuple[EtcdEndpoint, ...],
        least_s: float,
    ) -> Any:
        """Make sure of the store and of a token before the attempt."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + left_s
        if not self._one_store.is_sure_of(endpoint):
            await self._introduced(endpoint, method, left_s, tried)
        if self._login is not None:
            await self._logged_in(self._login, endpoint, method, deadline_s - loop.time())
        left_s = deadline_s - loop.time()
        if left_s <= 0:
            raise AttemptError(
                Outcome.NOT_APPLIED, method, endpoint, "what comes before it took all the time"
            )
        metadata = self.metadata
        try:
            timeout_s = min(max(endpoint.patience.attempt_s, least_s), left_s)
            return await self._attempt(endpoint, method, request, timeout_s, metadata, tried)
        except AttemptError as failed:
            if failed.outcome is Outcome.LOGIN_NEEDED:
                self.reject(metadata)
            raise

    async def _introduced(
        self,
        endpoint: EtcdEndpoint,
        method: Method,
        left_s: float,
        tried: tuple[EtcdEndpoint, ...],
    ) -> None:
        """Ask ``endpoint`` of which store it is, or fail as a request that was not sent."""
        loop = asyncio.get_running_loop()
        timeout_s = min(endpoint.patience.attempt_s, left_s)
        deadline_s = loop.time() + timeout_s
        self._one_store.begin()
        store_id = endpoint.store_id
        if not store_id:
            try:
                answer = await self._attempt(
                    endpoint, STATUS, pb.StatusRequest(), timeout_s, (), tried
                )
                store_id = answer.header.cluster_id or UNSAID
            except AttemptError as failed:
                if failed.outcome in (Outcome.NOT_APPLIED, Outcome.AMBIGUOUS):
                    unsent = AttemptError(Outcome.NOT_APPLIED, method, endpoint, failed.why)
                    unsent.tried = failed.tried
                    raise unsent from None
                store_id = UNSAID
        left_s = max(deadline_s - loop.time(), 0)
        if not await self._one_store.introduce(endpoint, store_id, left_s):
            why = "it is of another store than an endpoint that does not answer now"
            unsettled = AttemptError(Outcome.NOT_APPLIED, method, endpoint, why)
            unsettled.tried = self.rotation.leave(endpoint, tried)
            raise unsettled
        if self._one_store.fault:
            raise AttemptError(Outcome.REFUSED, method, endpoint, self._one_store.fault)

    async def _store_id(self, endpoint: EtcdEndpoint) -> int:
        """Ask an endpoint that is perhaps not in use of which store it is; 0: no answer."""
        try:
            timeout_s = endpoint.patience.attempt_s
            answer = await endpoint.call(STATUS, pb.StatusRequest(), timeout_s, ())
        except (NotSentError, AnswerLostError, StatusError) as error:
            failed = _failure(error, STATUS, endpoint)
            return 0 if failed.outcome in (Outcome.NOT_APPLIED, Outcome.AMBIGUOUS) else UNSAID
        return answer.header.cluster_id or UNSAID

    async def _attempt(
        self,
        endpoint: EtcdEndpoint,
        method: Method,
        request: Any,
        timeout_s: float,
        metadata: Metadata,
        tried: tuple[EtcdEndpoint, ...],
    ) -> Any:
        if self._closing.is_set():
            raise AttemptError(Outcome.NOT_APPLIED, method, endpoint, "this client is closed")
        connection, patience = endpoint.connection, endpoint.patience
        clock = asyncio.get_running_loop().time
        asked_s = clock()
        try:
            response = await endpoint.call(method, request, timeout_s, metadata)
        except BusyError as error:
            raise _failure(error, method, endpoint) from None
        except NotSentError as error:
            failed = _failure(error, method, endpoint)
            # An immediate failure, as of files that cannot be read, says nothing about the
            # connection.
            timed_out = clock() - asked_s > timeout_s / 2
        except AnswerLostError as error:
            failed = _failure(error, method, endpoint)
            timed_out = False
        except StatusError as error:
            failed = _failure(error, method, endpoint)
            timed_out = error.code is StatusCode.DEADLINE_EXCEEDED
        else:
            endpoint.silent = False
            patience.answered(clock() - asked_s)
            if method is not STATUS and not self._one_store.is_of_it(endpoint, response):
                raise AttemptError(
                    Outcome.AMBIGUOUS, method, endpoint, "the answer came from another store"
                )
            return response
        endpoint.silent &= timed_out
        if failed.outcome in (Outcome.NOT_APPLIED, Outcome.AMBIGUOUS):
            if not timed_out or patience.blames(timeout_s):
                failed.tried = self.rotation.leave(endpoint, tried)
            if timed_out and patience.whole(timeout_s) and connection == endpoint.connection:
                patience.missed(timeout_s)
                endpoint.kick(str(failed))
                endpoint.silent = True
                if failed.outcome is Outcome.AMBIGUOUS:
                    self._reconnect_if_all_are_silent()
        raise failed

    def _reconnect_if_all_are_silent(self) -> None:
        """Reconnect all endpoints if none answers, as after a firewall has dropped all connections.

        The pings find that out for one connection after the other, only while a call waits there:
        together that may take longer than a lease.
        """
        if all(one.silent for one in self.rotation):
            for one in self.rotation:
                one.reconnect()

    async def _logged_in(
        self, login: Login, endpoint: EtcdEndpoint, method: Method, left_s: float
    ) -> None:
        """Make sure that there is a token, or fail as a request that was not sent."""
        try:
            await login.ensure(left_s)
        except LoginRefusedError as error:
            outcome = Outcome.NOT_APPLIED if self._closing.is_set() else Outcome.REFUSED
            raise AttemptError(outcome, method, endpoint, str(error)) from None
        except TimeoutError as error:
            why = f" ({error})" if str(error) else ""
            raise AttemptError(
                Outcome.NOT_APPLIED, method, endpoint, f"no token within {left_s:.1f} s{why}"
            ) from None
        except (AttemptError, LoginUnansweredError) as error:
            raise AttemptError(Outcome.NOT_APPLIED, method, endpoint, str(error)) from None

    async def _authenticate(self, user: str, password: str, timeout_s: float) -> str:
        """Exchange the password for a token at the present endpoint; return "" if none is needed.

        An endpoint that gives none is left, so that the next request goes elsewhere. A password
        takes longer the more of them there are, so its duration says nothing about the connection:
        the watches and the connection stay.
        """
        endpoint = self.rotation.current
        request = pb.AuthenticateRequest(name=user, password=password)
        try:
            response = await endpoint.call(AUTHENTICATE, request, timeout_s)
        except (NotSentError, AnswerLostError, StatusError) as error:
            failed = _failure(error, AUTHENTICATE, endpoint)
            if failed.outcome is Outcome.NO_LOGIN:
                return ""
            if isinstance(error, BusyError):
                raise failed from None
            if failed.outcome in (Outcome.NOT_APPLIED, Outcome.AMBIGUOUS):
                self._login_tried = self.rotation.leave(endpoint, self._login_tried)
                if failed.outcome is Outcome.AMBIGUOUS:
                    raise LoginUnansweredError(str(failed)) from None
                raise failed from None
            raise LoginRefusedError(
                f"the store does not let user {user} in: {failed}: check"
                f" {named('--etcd-user')} and the file of {named('--etcd-password-file')}"
            ) from None
        self._login_tried = ()
        return str(response.token)

    async def pause(self, rounds: int, longest_s: float = float("inf")) -> None:
        """Back off after so many failed rounds, unless the client is closed meanwhile."""
        pause_s = min(ROUND_PAUSE.drawn_after(rounds - 1, self._random), longest_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(pause_s, 0)):
                await self._closing.wait()

    async def close(self) -> None:
        """Close every connection; calls that wait end now."""
        if self._closing.is_set():
            return
        self._closing.set()
        await self._one_store.close()
        if self._login is not None:
            await self._login.close()
        for endpoint in self.rotation:
            await endpoint.close()


def _failure(
    error: NotSentError | AnswerLostError | StatusError,
    method: Method,
    endpoint: EtcdEndpoint,
) -> AttemptError:
    """Build the failure of an attempt from what ``EtcdEndpoint.call`` raised."""
    if isinstance(error, NotSentError):
        return AttemptError(Outcome.NOT_APPLIED, method, endpoint, str(error))
    if isinstance(error, AnswerLostError):
        return AttemptError(Outcome.AMBIGUOUS, method, endpoint, str(error))
    message = str(error)
    return AttemptError(outcome(error.code, message), method, endpoint, explained(message))
