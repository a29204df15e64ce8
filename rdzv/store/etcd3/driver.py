# SPDX-License-Identifier: Apache-2.0
"""The store driver on the etcd3 package 0.12.0, for those who want a client in common use.

The package makes every call and opens every watch. What it lacks comes from Muster: the deadlines,
the failover, the resumption of watches and the judgement of errors are those of the default driver,
for this one is the same store on other endpoints (docs/store-drivers.md tells what that costs).
Importing this raises ``ModuleNotFoundError`` if the package is not installed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from random import Random
from time import monotonic
from typing import Any, TypeVar

from rdzv.store.access import Access
from rdzv.store.etcd.client import EtcdStore
from rdzv.store.etcd.credentials import CertificateFiles
from rdzv.store.etcd.endpoint import (
    AUTHENTICATE,
    GRANT,
    HAS_LEADER,
    KEEP_ALIVE,
    RETIRE_S,
    REVOKE,
    AnswerLostError,
    BusyError,
    EtcdEndpoint,
    Metadata,
    Method,
    NotSentError,
)
from rdzv.store.etcd3.connection import Etcd3Connection, Etcd3Watch

T = TypeVar("T")

THREADS = 16
"""Threads of one store: the package blocks, and a sidecar has a handful of calls under way."""

KEPT_FREE = frozenset({AUTHENTICATE, GRANT, KEEP_ALIVE, REVOKE})
"""Calls that must not queue behind writes that wait, as a lease ends meanwhile. They have their own
threads."""

LEASE_THREADS = 2

OVERTIME_S = 0.2
"""Time by which a call may exceed its deadline before it is given up and its thread left, in
seconds."""


class Etcd3Store(EtcdStore):
    """A ``Store`` on etcd by the etcd3 package. Create it within a running event loop.

    Arguments and errors are those of ``EtcdStore``.
    """

    def __init__(
        self, access: Access | Sequence[str], *, first: int = 0, random: Random | None = None
    ) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "etcd3 call")
        self._lease_threads = ThreadPoolExecutor(LEASE_THREADS, "etcd3 lease")
        super().__init__(access, first=first, random=random)

    async def close(self) -> None:
        """Close every connection and release the threads; watches end."""
        await super().close()
        for threads in (self._threads, self._lease_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _endpoints(self, access: Access) -> Sequence[EtcdEndpoint]:
        files = CertificateFiles(access) if access.tls else None
        threads = (self._threads, self._lease_threads)
        return [Etcd3Endpoint(target, files, access, *threads) for target in access.targets]


class Etcd3Endpoint(EtcdEndpoint):
    """An ``EtcdEndpoint`` whose calls the package makes, each in a thread of its kind."""

    def __init__(
        self,
        target: str,
        files: CertificateFiles | None,
        access: Access,
        threads: ThreadPoolExecutor,
        lease_threads: ThreadPoolExecutor,
    ) -> None:
        super().__init__(target, files)
        self._access = access
        self._threads = threads
        self._lease_threads = lease_threads
        self._current: Etcd3Connection | None = None
        self._retiring: dict[asyncio.Task[None], Etcd3Connection] = {}

    async def call(
        self, method: Method, request: Any, timeout_s: float, metadata: Metadata = HAS_LEADER
    ) -> Any:
        """Make one attempt, in a thread; raise what ``EtcdEndpoint.call`` raises."""
        deadline_s = monotonic() + timeout_s
        connection, timeout_s = await self._opened(timeout_s)
        return await self._in_thread(
            lambda: connection.call(method, request, deadline_s, metadata),
            timeout_s,
            self._lease_threads if method in KEPT_FREE else self._threads,
        )

    def open_watch(self, on_kick: Callable[[str], None], metadata: Metadata = HAS_LEADER) -> Any:
        """Open a watch stream; ``on_kick`` is called, with the reason, to end it early."""
        self._on_kick.add(on_kick)
        assert self._current is not None
        run = partial(self._in_thread, threads=self._threads)
        return Etcd3Watch(self._current, run, metadata, self.patience.attempt_s)

    def reconnect(self, grace_s: float = RETIRE_S) -> None:
        """Make later calls on a new connection; those under way have ``grace_s`` to end."""
        old = self._current
        self.silent = False
        self.store_id = 0
        if self._closed or old is None:
            return
        self.connection = next(_connections)
        self._open()
        retiring = asyncio.create_task(old.close(grace=grace_s), name="retiring connection")
        self._retiring[retiring] = old
        retiring.add_done_callback(self._retiring.pop)

    async def close(self) -> None:
        """Close the connection; calls that wait on it end."""
        self._closed = True
        self.kick("the store client is closed")
        for connection in (self._current, *self._retiring.values()):
            if connection is not None:
                await connection.close()
        if self._retiring:
            await asyncio.wait(self._retiring)

    async def _opened(self, timeout_s: float) -> tuple[Etcd3Connection, float]:
        """Return a connection with the present certificates, and the time left.

        Raises ``NotSentError`` if the files cannot be read in time, or the client was closed.
        """
        current = self._current
        timeout_s = await self._look(timeout_s, ready=current is not None and current.ready)
        if self._current is None:
            self._open()
        elif self._files is not None and self._files.version != self._files_version:
            # Before the connection ends, so that no stream takes that for its own cancellation.
            self.kick("the certificate files have changed")
            self.reconnect()
        assert self._current is not None
        return self._current, timeout_s

    def _open(self) -> None:
        if self._files is not None:
            self._files_version = self._files.version
        self._current = Etcd3Connection(self.target, self._access, self.connection)

    async def _in_thread(
        self, work: Callable[[], T], timeout_s: float, threads: ThreadPoolExecutor
    ) -> T:
        """Run ``work`` in a thread; it ends by itself after ``timeout_s``, counted from now.

        Raises ``NotSentError`` if the client is closed before a thread was free.
        """
        future = threads.submit(work)
        answer = asyncio.wrap_future(future)
        try:
            # Unlike ``wait_for``, this does not take a call that ``close`` cancels for the
            # cancellation of its waiter.
            await asyncio.wait({answer}, timeout=timeout_s + OVERTIME_S)
            if answer.cancelled():
                raise NotSentError("this client was closed")
            if answer.done():
                return answer.result()
            if future.cancel():
                raise BusyError(f"no thread was free within {timeout_s:.1f} s")
            raise AnswerLostError(f"no answer within {timeout_s:.1f} s")
        finally:
            answer.cancel()


_connections = count(1)
