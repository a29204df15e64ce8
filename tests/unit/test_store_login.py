# SPDX-License-Identifier: Apache-2.0
"""When a password is sent, and when once more; in virtual time."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from rdzv.pacing import Doubling
from rdzv.store.access import Access
from rdzv.store.etcd import credentials
from rdzv.store.etcd.credentials import (
    LOGIN,
    REFUSED_PAUSE,
    UNANSWERED_PAUSE,
    Login,
    LoginRefusedError,
    LoginUnansweredError,
)

pytestmark = pytest.mark.virtual

ACCESS = Access(("etcd:2379",), user="job", password_file="/password")
SOON_S = 0.1
"""For what does not wait; reading a file takes a moment of virtual time."""

CLIENTS = 100
CORES = 2
PASSWORD_S = 0.1
"""What one costs the store: a hundred of them keep it busy for longer than a first login waits."""


class Store:
    """Answers each request as it is told to; ``asked`` has time, password and timeout of each."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, str, float]] = []
        self.password = "right"
        self.answers = True
        self.connected = True

    async def authenticate(self, user: str, password: str, timeout_s: float) -> str:
        self.asked.append((asyncio.get_running_loop().time(), password, timeout_s))
        if not self.connected:
            raise ConnectionRefusedError
        if not self.answers:
            await asyncio.sleep(timeout_s)
            raise LoginUnansweredError("nothing came")
        if password != self.password:
            raise LoginRefusedError("wrong")
        return "token"


class Client(Login):
    """Its password is at hand, where a sidecar's is in a file."""

    def __init__(
        self, store: Store | BusyStore, monkeypatch: pytest.MonkeyPatch, seed: int = 0
    ) -> None:
        super().__init__(ACCESS, store.authenticate, Random(seed))
        self.password = "right"
        monkeypatch.setattr(credentials, "read_password", lambda _: self.password)

    async def has_token(self, within_s: float) -> bool:
        """Ask again and again, as calls do."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + within_s
        while loop.time() < deadline_s:
            try:
                await self.ensure(min(2.0, deadline_s - loop.time()))
            except (TimeoutError, LoginUnansweredError, LoginRefusedError):
                await asyncio.sleep(0.1)
            else:
                return True
        return False


def test_a_time_doubles_up_to_its_bound_and_is_drawn_from_its_upper_half() -> None:
    doubling = Doubling(1.0, 30.0)
    assert [doubling.after(failures) for failures in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert doubling.after(10**9) == 30
    random = Random(2)
    drawn = [doubling.drawn_after(2, random) for _ in range(1000)]
    assert 2 <= min(drawn) < 2.1
    assert 3.9 < max(drawn) <= 4


async def test_a_login_without_answer_is_repeated_ever_more_rarely_and_given_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    store.answers = False
    client = Client(store, monkeypatch)
    assert not await client.has_token(200)
    timeouts = [timeout_s for _, _, timeout_s in store.asked]
    assert timeouts[:4] == [3, 6, 12, 12]
    assert set(timeouts[3:]) == {LOGIN.longest_s}
    for failures, ((began_s, _, timeout_s), (again_s, _, _)) in enumerate(
        zip(store.asked, store.asked[1:], strict=False)
    ):
        pause_s = again_s - began_s - timeout_s
        longest_s = min(2.0**failures, UNANSWERED_PAUSE.longest_s)
        assert longest_s / 2 <= pause_s <= longest_s + SOON_S
    store.answers = True
    assert await client.has_token(UNANSWERED_PAUSE.longest_s + SOON_S)

    # One that was answered starts the count anew.
    client.reject(client.metadata)
    store.answers = False
    store.asked.clear()
    assert not await client.has_token(5)
    assert [timeout_s for _, _, timeout_s in store.asked] == [3, 6]


async def test_a_deadline_ends_the_wait_of_its_caller_and_close_ends_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    store = Store()
    store.answers = False
    client = Client(store, monkeypatch)
    assert not await client.has_token(60)
    requests = len(store.asked)
    with pytest.raises(TimeoutError, match="nothing came"):
        await client.ensure(0.5)
    waiting = asyncio.create_task(client.ensure(1000))
    await asyncio.sleep(1)
    began_s = loop.time()
    await client.close()
    with pytest.raises(LoginRefusedError, match="closed"):
        await waiting
    with pytest.raises(LoginRefusedError, match="closed"):
        await client.ensure(1)
    assert loop.time() - began_s < SOON_S
    await asyncio.sleep(100)
    assert len(store.asked) == requests


async def test_a_password_that_was_not_sent_is_tried_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    store.connected = False
    client = Client(store, monkeypatch)
    for _ in range(10):
        with pytest.raises(ConnectionRefusedError):
            await client.ensure(SOON_S)
    store.connected = True
    await client.ensure(SOON_S)
    assert {timeout_s for _, _, timeout_s in store.asked} == {LOGIN.first_s}


async def test_a_refused_password_waits_ever_longer_and_a_changed_one_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    client = Client(store, monkeypatch)
    client.password = "wrong"
    assert not await client.has_token(400)
    for refusals, ((began_s, _, _), (again_s, _, _)) in enumerate(
        zip(store.asked, store.asked[1:], strict=False)
    ):
        longest_s = min(5.0 * 2**refusals, 60.0)
        assert longest_s / 2 <= again_s - began_s <= longest_s + 2 * SOON_S
    assert len(store.asked) > 8
    client.password = "wrong too"
    with pytest.raises(LoginRefusedError):
        await client.ensure(SOON_S)
    assert store.asked[-1][1] == "wrong too"
    asked_s = store.asked[-1][0]
    requests = len(store.asked)
    assert not await client.has_token(REFUSED_PAUSE.first_s + SOON_S)
    assert store.asked[requests][0] - asked_s <= REFUSED_PAUSE.first_s + 2 * SOON_S
    client.password = "right"
    await client.ensure(SOON_S)


class BusyStore:
    """Spends ``PASSWORD_S`` of a processor on each password, on all at hand at once.

    It goes on with those that nobody waits for any more, as etcd does.
    """

    TICK_S = 0.02

    def __init__(self) -> None:
        self._left_s: dict[asyncio.Future[None], float] = {}

    async def work(self) -> None:
        while True:
            await asyncio.sleep(self.TICK_S)
            if self._left_s:
                share_s = self.TICK_S * min(1, CORES / len(self._left_s))
                for one in tuple(self._left_s):
                    self._left_s[one] -= share_s
                    if self._left_s[one] <= 0:
                        del self._left_s[one]
                        one.set_result(None)

    async def authenticate(self, user: str, password: str, timeout_s: float) -> str:
        done = asyncio.get_running_loop().create_future()
        self._left_s[done] = PASSWORD_S
        await asyncio.wait({done}, timeout=timeout_s)
        if not done.done():
            raise LoginUnansweredError("nothing came")
        return "token"


async def test_many_clients_of_a_store_that_started_again_all_get_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = BusyStore()
    working = asyncio.create_task(store.work())
    clients = [Client(store, monkeypatch, seed) for seed in range(CLIENTS)]
    served = await asyncio.gather(*(client.has_token(60) for client in clients))
    assert all(served), f"{served.count(False)} of {CLIENTS} have no token"
    working.cancel()
