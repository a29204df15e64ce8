# SPDX-License-Identifier: Apache-2.0
"""Whether all endpoints of a client are members of one store.

Those of two, such as a member that was added to a running etcd by its flags alone, both take
writes: clients of the one do not see those of the other. So an endpoint says of which store it is
before it is sent anything else, and while two differ, none is used. A store that was restored from
a copy is another one too, but then all agree; one that falls silent has a say for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rdzv.flags import named
from rdzv.store.etcd.endpoint import EtcdEndpoint, Rotation

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
