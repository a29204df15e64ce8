# SPDX-License-Identifier: Apache-2.0
"""One etcd member as a client sees it, and whether all of them are members of one store.

What makes the calls is the driver's: a kind of ``EtcdEndpoint``. Endpoints of two stores, such as a
member that was added to a running etcd by its flags alone, both take writes: clients of the one do
not see those of the other. So an endpoint says of which store it is before it is sent anything
else, and while two differ, none is used. A store that was restored from a copy is another one too,
but then all agree; one that falls silent has a say for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from random import Random
from typing import Any, Protocol

from rdzv.dataclass import dataclass
from rdzv.errors import ConfigError
from rdzv.pacing import Patience
from rdzv.sentences import named
from rdzv.store import etcd_pb2 as pb
from rdzv.store.etcd.credentials import CertificateFiles

Metadata = tuple[tuple[str, str], ...]

HAS_LEADER: Metadata = (("hasleader", "true"),)
"""Metadata that makes a member without a leader say so at once, on streams too."""

RETIRE_S = 3.0
"""Time for the calls under way on a connection that is given up, in seconds: a password takes
longest."""

ASK_AGAIN_S = 30.0
"""Time between two questions while endpoints are silent, in seconds. They are not in use: it is
only for how long two stores may go unseen."""

SAY_S = 60.0
"""Time for which the last answer of a silent endpoint counts, in seconds: longer than a member
takes to start again, and shorter than a restored store should wait for one that is gone."""

REFUSED_S = 1.0
"""Time for which a refusal holds without a new question, in seconds."""

UNSAID = -1
"""The id of an endpoint that answers without one, as some proxies; it counts as any."""


@dataclass(frozen=True, slots=True)
class Method:
    """One call of etcd's v3 API."""

    path: str
    request: Any
    response: Any


RANGE = Method("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse)
TXN = Method("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse)
COMPACT = Method("/etcdserverpb.KV/Compact", pb.CompactionRequest, pb.CompactionResponse)
GRANT = Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
KEEP_ALIVE = Method(
    "/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse
)
AUTHENTICATE = Method(
    "/etcdserverpb.Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse
)
AUTH_STATUS = Method("/etcdserverpb.Auth/AuthStatus", pb.AuthStatusRequest, pb.AuthStatusResponse)
USER_ADD = Method("/etcdserverpb.Auth/UserAdd", pb.AuthUserAddRequest, pb.AuthUserAddResponse)
USER_CHANGE_PASSWORD = Method(
    "/etcdserverpb.Auth/UserChangePassword",
    pb.AuthUserChangePasswordRequest,
    pb.AuthUserChangePasswordResponse,
)
USER_GRANT_ROLE = Method(
    "/etcdserverpb.Auth/UserGrantRole", pb.AuthUserGrantRoleRequest, pb.AuthUserGrantRoleResponse
)
ROLE_ADD = Method("/etcdserverpb.Auth/RoleAdd", pb.AuthRoleAddRequest, pb.AuthRoleAddResponse)
ROLE_GRANT_PERMISSION = Method(
    "/etcdserverpb.Auth/RoleGrantPermission",
    pb.AuthRoleGrantPermissionRequest,
    pb.AuthRoleGrantPermissionResponse,
)
STATUS = Method("/etcdserverpb.Maintenance/Status", pb.StatusRequest, pb.StatusResponse)
WATCH = Method("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse)


class NotSentError(Exception):
    """The request certainly did not leave this machine."""


class BusyError(NotSentError):
    """Nothing was sent, as no thread was free here: that is no fault of the member."""


class AnswerLostError(Exception):
    """The request was sent, and no caller waits for its answer any more."""


class WatchCall(Protocol):
    """The stream of one watch."""

    async def write(self, request: Any) -> None:
        """Send a request; raise ``StatusError`` if the stream is over."""
        ...

    async def read(self) -> Any:
        """Wait for a message; return None at the end, or raise ``StatusError``."""
        ...

    def cancel(self) -> None:
        """End the stream; a reader gets None."""
        ...


class EtcdEndpoint:
    """One member. Its watches end when the member is given up (``kick``).

    With ``files`` the connection is TLS, the member's name is verified, and a new connection is
    made when the files have changed.
    """

    def __init__(self, target: str, files: CertificateFiles | None = None) -> None:
        self.target = target
        self.connection = 0
        """Differs from connection to connection that ``reconnect`` has made."""
        self.patience = Patience()
        self.silent = False
        """Whether the newest attempt here took its whole timeout without any answer."""
        self.store_id = 0
        """The id of its store; 0 if it has not said so since the last failure here."""
        self._files = files
        self._files_version = 0
        self._closed = False
        self._on_kick: set[Callable[[str], None]] = set()

    async def call(
        self, method: Method, request: Any, timeout_s: float, metadata: Metadata = HAS_LEADER
    ) -> Any:
        """Make one attempt; raise ``NotSentError``, ``AnswerLostError``, ``StatusError``.

        A call whose stream carries one message each way is made as a unary one: on the wire they
        are the same, and this way a lease renewal cannot outlive its deadline.
        """
        raise NotImplementedError

    def open_watch(
        self, on_kick: Callable[[str], None], metadata: Metadata = HAS_LEADER
    ) -> WatchCall:
        """Open a watch stream; ``on_kick`` is called, with the reason, to end it early.

        Only after a ``call``, which makes the connection.
        """
        raise NotImplementedError

    def forget_watch(self, on_kick: Callable[[str], None]) -> None:
        """Stop calling ``on_kick``: the watch has ended."""
        self._on_kick.discard(on_kick)

    def kick(self, reason: str) -> None:
        """End every watch here, so that no stream has to find out again what one call has."""
        for on_kick in tuple(self._on_kick):
            on_kick(reason)

    def reconnect(self, grace_s: float = RETIRE_S) -> None:
        """Make later calls on a new connection; those under way have ``grace_s`` to end.

        A single endpoint is often one name or address for several members: a new connection may
        reach another one, where the old one would hang until its ping fails.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Close the connection; calls that wait on it end."""
        raise NotImplementedError

    async def _look(self, timeout_s: float, *, ready: bool) -> float:
        """Look whether the certificate files have changed; return the time left.

        ``ready``: there is a connection that works. Raises ``NotSentError`` if the files cannot be
        read in time, or the client was closed.
        """
        if self._files is None:
            return timeout_s
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        try:
            await self._files.look(urgent=not ready, timeout_s=timeout_s)
        except ConfigError as error:
            raise NotSentError(str(error)) from None
        except TimeoutError:
            raise NotSentError(
                f"the certificate files cannot be read within {timeout_s:.1f} s"
            ) from None
        if self._closed:
            raise NotSentError("this client was closed")
        return max(deadline_s - asyncio.get_running_loop().time(), 0.001)


class Rotation:
    """The endpoints of one cluster, and the one of them to use now."""

    def __init__(self, endpoints: Sequence[EtcdEndpoint], first: int, random: Random) -> None:
        self._endpoints = endpoints
        self._random = random
        self.current = endpoints[first % len(endpoints)]
        """The endpoint to use now."""

    def __len__(self) -> int:
        return len(self._endpoints)

    def __iter__(self) -> Iterator[EtcdEndpoint]:
        return iter(self._endpoints)

    def leave(
        self, endpoint: EtcdEndpoint, tried: tuple[EtcdEndpoint, ...]
    ) -> tuple[EtcdEndpoint, ...]:
        """Move on from ``endpoint``, unless another call has done so already.

        The next one is drawn, so that the clients of a member that ends spread over the others. It
        is none of ``tried``, which have failed before in the same round, while there is another.
        Returns what the round has tried by now: nothing once that is all of them.
        """
        endpoint.store_id = 0
        tried = (*tried, endpoint)
        others = [other for other in self._endpoints if other is not endpoint]
        fresh = [other for other in others if other not in tried]
        if self.current is endpoint:
            found = fresh or others
        else:
            found = fresh if self.current in tried else []
        if found:
            self.current = self._random.choice(found)
            self.current.patience.expect(endpoint.patience)
        return tried if fresh else ()


Ask = Callable[[EtcdEndpoint], Awaitable[int]]
"""Asks for the id of an endpoint's store; returns 0 if it does not answer in time."""


class OneStore:
    """The store of each endpoint, as it answered since the connection there was last lost."""

    def __init__(self, rotation: Rotation, ask: Ask) -> None:
        self._rotation = rotation
        self._ask = ask
        self._store_id = 0
        self._last: dict[EtcdEndpoint, tuple[int, float]] = {}
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = float("-inf")
        self.fault = ""
        """The sentence that names two stores; empty if there is one."""

    def is_sure_of(self, endpoint: EtcdEndpoint) -> bool:
        """Return whether a request may go to ``endpoint`` without a question before it.

        Asks the silent ones in the background, now and then.
        """
        if len(self._rotation) == 1:
            return True
        if self.fault or not self._is_known(endpoint):
            return False
        if any(not one.store_id for one in self._rotation) and self._since_asked_s() > ASK_AGAIN_S:
            self._ask_all()
        return True

    def begin(self) -> None:
        """Ask all endpoints at once, before the first request: one that hangs costs no more."""
        if not self._store_id:
            self._ask_all()

    async def introduce(self, endpoint: EtcdEndpoint, store_id: int, timeout_s: float) -> bool:
        """Take the answer of ``endpoint``; ask all others if it is the first, or unlike theirs.

        Returns whether ``fault`` is settled: not while one that named another store is silent.
        """
        self._note(endpoint, store_id)
        if self.fault and self._since_asked_s() <= REFUSED_S:
            return True
        if self.fault or not self._is_known(endpoint):
            await asyncio.wait({self._ask_all()}, timeout=timeout_s)
            if not self._store_id and not self.fault and not self._is_contradicted(store_id):
                self._store_id = store_id
        return bool(self.fault) or self._is_known(endpoint)

    def is_of_it(self, endpoint: EtcdEndpoint, answer: Any) -> bool:
        """Return whether an answer comes from the store in use; if not, ask before the next."""
        if len(self._rotation) == 1 or answer is None or endpoint.store_id == UNSAID:
            return True
        # Another call may have failed there meanwhile, and have left it to be asked again.
        if answer.header.cluster_id in (0, endpoint.store_id or self._store_id):
            self._last[endpoint] = (self._store_id or UNSAID, asyncio.get_running_loop().time())
            return True
        endpoint.store_id = 0
        return False

    async def close(self) -> None:
        """End a question under way."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    def _is_known(self, endpoint: EtcdEndpoint) -> bool:
        return endpoint.store_id != 0 and endpoint.store_id in (self._store_id, UNSAID)

    def _note(self, endpoint: EtcdEndpoint, store_id: int) -> None:
        endpoint.store_id = store_id
        self._last[endpoint] = (store_id, asyncio.get_running_loop().time())

    def _since_asked_s(self) -> float:
        return asyncio.get_running_loop().time() - self._asked_s

    def _ask_all(self) -> asyncio.Task[None]:
        if self._asking is None or self._asking.done():
            self._asked_s = asyncio.get_running_loop().time()
            self._asking = asyncio.create_task(self._compare(), name="whether this is one store")
        return self._asking

    async def _compare(self) -> None:
        endpoints = list(self._rotation)
        ids = await asyncio.gather(*map(self._ask, endpoints))
        told = dict(zip(endpoints, ids, strict=True))
        for endpoint, store_id in told.items():
            if store_id:
                self._note(endpoint, store_id)
        stores = {store_id for store_id in ids if store_id not in (0, UNSAID)}
        if len(stores) > 1:
            self.fault = (
                f"the endpoints belong to {len(stores)} different stores ("
                + ", ".join(f"{one.target} to {told[one]:x}" for one in told if told[one] in stores)
                + "), so nothing is read or written: name members of one store alone in"
                f" {named('--etcd-endpoints')}; see docs/etcd-members.md"
            )
            for endpoint in endpoints:
                endpoint.kick(self.fault)
        elif any(ids):
            self.fault = ""
            store_id = next(iter(stores), UNSAID)
            if not self._is_contradicted(store_id):
                self._store_id = store_id

    def _is_contradicted(self, store_id: int) -> bool:
        """Return whether the last answer of an endpoint names another store, not long ago."""
        since_s = asyncio.get_running_loop().time() - SAY_S
        others = {last for last, at_s in self._last.values() if at_s >= since_s}
        return bool(others - {store_id, UNSAID})
