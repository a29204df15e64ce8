# SPDX-License-Identifier: Apache-2.0
"""One etcd member as a client sees it: its calls, and the streams open on it.

What makes the calls is the driver's: a kind of ``EtcdEndpoint``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Protocol

from rdzv.dataclass import dataclass
from rdzv.errors import ConfigError
from rdzv.store.etcd.certificates import CertificateFiles
from rdzv.store.etcd.deadlines import Patience
from rdzv.store.pb import etcd_pb2 as pb

Metadata = tuple[tuple[str, str], ...]

HAS_LEADER: Metadata = (("hasleader", "true"),)
"""Metadata that makes a member without a leader say so at once, on streams too."""


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


RETIRE_S = 3.0
"""Time for the calls under way on a connection that is given up, in seconds: a password takes
longest."""


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
