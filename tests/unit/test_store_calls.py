# SPDX-License-Identifier: Apache-2.0
"""To which endpoint a call goes after one has failed, and when; in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rdzv.errors import StoreError, StoreUnavailable
from rdzv.pacing import Patience
from rdzv.store import etcd_pb2 as pb
from rdzv.store.access import Access
from rdzv.store.etcd import credentials
from rdzv.store.etcd.answers import StatusCode, StatusError
from rdzv.store.etcd.calls import Calls, Effect
from rdzv.store.etcd.endpoint import (
    AUTHENTICATE,
    HAS_LEADER,
    KEEP_ALIVE,
    RANGE,
    STATUS,
    EtcdEndpoint,
    Metadata,
    Method,
    NotSentError,
    Rotation,
)

pytestmark = pytest.mark.virtual

CLIENTS = 300
TIMEOUT_S = 2.0


class Member(EtcdEndpoint):
    """One member that answers as it is told to, over no network."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.patience = Patience()
        self.connection = 0
        self.calls: list[Method] = []
        self.kicks: list[str] = []
        self.reconnections = 0
        self.silent = False
        self.store_id = 0
        self.fails: Callable[[Method, float], Coroutine[Any, Any, None]] | None = None

    async def call(
        self, method: Method, request: Any, timeout_s: float, metadata: Metadata = HAS_LEADER
    ) -> Any:
        self.calls.append(method)
        if self.fails is not None:
            await self.fails(method, timeout_s)
        if method is STATUS:
            return pb.StatusResponse(header=pb.ResponseHeader(cluster_id=1))
        return pb.AuthenticateResponse(token="token")

    def kick(self, reason: str) -> None:
        self.kicks.append(reason)

    def reconnect(self, grace_s: float = 0) -> None:
        self.reconnections += 1
        self.silent = False

    async def close(self) -> None:
        pass


async def refused(method: Method, timeout_s: float) -> None:
    raise NotSentError("refused")


async def unanswered(method: Method, timeout_s: float) -> None:
    await asyncio.sleep(timeout_s)
    raise StatusError(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


async def unanswered_login(method: Method, timeout_s: float) -> None:
    if method is AUTHENTICATE:
        await unanswered(method, timeout_s)


def members(count: int) -> list[Member]:
    return [Member(f"m{number}") for number in range(count)]


def clients(of: list[Member]) -> list[Rotation]:
    """Spread over the members as sidecars are."""
    return [Rotation(of, number, Random(number)) for number in range(CLIENTS)]


def at(rotations: list[Rotation]) -> Counter[str]:
    return Counter(rotation.current.target for rotation in rotations)


def test_the_clients_of_a_member_that_ends_spread_over_the_others() -> None:
    three = members(3)
    rotations = clients(three)
    for rotation in rotations:
        rotation.leave(three[0], ())
    assert at(rotations)["m0"] == 0
    assert min(at(rotations)["m1"], at(rotations)["m2"]) > CLIENTS / 3
    # Those that somebody has left already are not left again.
    before = at(rotations)
    for rotation in rotations:
        assert rotation.leave(three[0], ()) == (three[0],)
    assert at(rotations) == before
    for member in three[1:]:
        for rotation in rotations:
            rotation.leave(member, ())
    # After all have started again no one serves most: the last had to let all go.
    assert min(at(rotations)["m0"], at(rotations)["m1"]) > CLIENTS / 4


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_round_tries_every_endpoint_once(count: int) -> None:
    for seed in range(20):
        some = members(count)
        rotation = Rotation(some, seed, Random(seed))
        for _ in range(3):
            seen: list[str] = []
            tried: tuple[EtcdEndpoint, ...] = ()
            while True:
                seen.append(rotation.current.target)
                tried = rotation.leave(rotation.current, tried)
                if not tried:
                    break
            assert sorted(seen) == [one.target for one in some]


def test_a_round_goes_on_where_it_has_not_been_though_others_move_meanwhile() -> None:
    three = members(3)
    for seed in range(20):
        rotation = Rotation(three, 0, Random(seed))
        tried = rotation.leave(three[0], ())
        second = rotation.current
        # Somebody else leaves it first, for the one that this round began with.
        rotation.current = three[0]
        assert isinstance(second, Member)
        rotation.leave(second, tried)
        assert rotation.current not in (three[0], second)


async def test_a_call_tries_each_endpoint_once_a_round_and_ends_in_time() -> None:
    loop = asyncio.get_running_loop()
    three = members(3)
    for member in three:
        member.fails = refused
    calls = Calls(three, 0, Access(("m0:1",)), Random(3))
    began_s = loop.time()
    with pytest.raises(StoreUnavailable, match="refused"):
        await calls.call(RANGE, None, TIMEOUT_S, Effect.READ)
    assert loop.time() - began_s == pytest.approx(TIMEOUT_S)
    counts = {len(member.calls) for member in three}
    assert max(counts) - min(counts) <= 1


async def test_rounds_that_fail_at_once_become_ever_rarer() -> None:
    """What says at once that it has no leader is asked seldom while it elects one, yet in time."""
    loop = asyncio.get_running_loop()
    for seed in range(20):
        (member,) = members(1)
        times: list[float] = []

        async def note(method: Method, timeout_s: float, times: list[float] = times) -> None:
            times.append(loop.time())
            raise NotSentError("no leader")

        member.fails = note
        calls = Calls([member], 0, Access(("m0:1",)), Random(seed))
        with pytest.raises(StoreUnavailable):
            await calls.call(RANGE, None, TIMEOUT_S, Effect.READ)
        pauses_s = [later - earlier for earlier, later in pairwise(times)]
        assert len(times) <= 10
        for number, pause_s in enumerate(pauses_s[:-1]):
            longest_s = min(0.1 * 2**number, 0.5)
            assert longest_s / 2 <= pause_s <= longest_s + 1e-9


@pytest.mark.parametrize("count", [1, 3])
async def test_a_login_without_answer_moves_on_and_breaks_nothing(
    count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The store is at the password still: neither its watches nor its line are at fault."""
    monkeypatch.setattr(credentials, "read_password", lambda _: "password")
    some = members(count)
    for member in some:
        member.fails = unanswered_login
    access = Access(("m0:1",), user="job", password_file=str(tmp_path))
    calls = Calls(some, 0, access, Random(4))
    for _ in range(10):
        with pytest.raises(StoreUnavailable, match=r"no token|Deadline"):
            await calls.call(RANGE, None, TIMEOUT_S, Effect.READ)
    for member in some:
        assert member.calls
        assert {*member.calls} - {STATUS} == {AUTHENTICATE}
        assert member.kicks == []
        assert member.reconnections == 0
        assert member.patience.attempt_s == Patience().attempt_s
        member.fails = None
    # Of whatever the pause leaves of its time.
    await calls.call(RANGE, None, 30, Effect.READ)
    await calls.close()


@pytest.mark.parametrize("count", [1, 3])
async def test_where_no_connection_answers_each_is_made_anew(count: int) -> None:
    """As when a firewall has forgotten them all: no ping tells it within a lease."""
    some = members(count)

    def dead_until_made_anew(member: Member) -> None:
        async def fails(method: Method, timeout_s: float) -> None:
            if not member.reconnections:
                await unanswered(method, timeout_s)

        member.fails = fails

    for member in some:
        dead_until_made_anew(member)
    calls = Calls(some, 0, Access(("m0:1",)), Random(5))
    # Two calls in turn: what the first has found out, the second knows.
    for _ in range(2):
        with suppress(StoreError):
            await calls.call(KEEP_ALIVE, None, TIMEOUT_S, Effect.IDEMPOTENT)
    assert [member.reconnections for member in some] == [1] * count
    # Of several, each has been asked first of which store it is.
    assert sum(member.calls.count(KEEP_ALIVE) for member in some) == (1 if count > 1 else 3)


async def test_a_silent_member_beside_one_that_answers_keeps_its_connection() -> None:
    three = members(3)
    three[0].fails = three[1].fails = unanswered
    calls = Calls(three, 0, Access(("m0:1",)), Random(6))
    for _ in range(10):
        await calls.call(KEEP_ALIVE, None, 10 * TIMEOUT_S, Effect.IDEMPOTENT)
        calls.rotation.current = three[0]
    assert [member.reconnections for member in three] == [0, 0, 0]


async def test_an_attempt_that_the_deadline_cuts_short_does_not_tell_why() -> None:
    (one,) = members(1)
    calls = 0

    async def first_refused_then_slow(method: Method, timeout_s: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise NotSentError("connection refused")
        await asyncio.sleep(timeout_s)
        raise StatusError(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    one.fails = first_refused_then_slow
    client = Calls([one], 0, Access(("m0:1",)), Random(5))
    with pytest.raises(StoreUnavailable, match="connection refused"):
        await client.call(RANGE, None, one.patience.attempt_s, Effect.READ)
    assert calls > 1
    # One that had its time does.
    with pytest.raises(StoreUnavailable, match="Deadline Exceeded"):
        await client.call(RANGE, None, TIMEOUT_S, Effect.READ)
