# SPDX-License-Identifier: Apache-2.0
"""Counters and compare-and-sets of launchers: only a sender's wish is read, one waiter is woken."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.c10d.rounds.stages import local_world_size, round_key
from launcher_shim.c10d.rounds.views import filler
from launcher_shim.c10d.state_codec import (
    NodeDesc,
    TorchState,
    Wish,
    first_name,
    foreign_size,
    wish,
)
from launcher_shim.c10d.values.cell import ABSENT, Cell, Part, read_number, wrap_int64
from launcher_shim.c10d.values.reads import Waiters

ME = NodeDesc("10.0.0.1", 42, 0)
OTHER = NodeDesc("10.0.0.2", 42, 0)
SOON = datetime(2030, 1, 1, tzinfo=UTC)

NOWHERE = TorchState(participants={OTHER: 0})
INSIDE = TorchState(participants={ME: 0, OTHER: 0})
WAITING = TorchState(wait_list=frozenset([ME]))
REDUNDANT = TorchState(redundancy_list=frozenset([ME]))


CLOSED = replace(INSIDE, closed=True)
BEAT = replace(NOWHERE, last_heartbeats={ME: SOON}, deadline=SOON, complete=True)
LAST_TO_LEAVE = replace(TorchState(), round=8, complete=False)


@pytest.mark.parametrize(
    ("expected", "desired", "read"),
    [
        (NOWHERE, INSIDE, Wish("join")),
        (NOWHERE, WAITING, Wish("join")),
        (NOWHERE, REDUNDANT, Wish("join")),
        (INSIDE, NOWHERE, Wish("leave")),
        (WAITING, NOWHERE, Wish("leave")),
        (REDUNDANT, NOWHERE, Wish("step_off")),
        (REDUNDANT, WAITING, Wish()),
        (WAITING, INSIDE, Wish()),
        (INSIDE, INSIDE, Wish()),
        (NOWHERE, NOWHERE, Wish()),
        # It starts no round, and declares no member lost.
        (replace(INSIDE, round=7, complete=True), LAST_TO_LEAVE, Wish("leave")),
        # Heartbeats and others are no wish.
        (NOWHERE, BEAT, Wish()),
        (INSIDE, replace(INSIDE, participants={ME: 0}), Wish()),
        (INSIDE, CLOSED, Wish("", closes=True)),
        (CLOSED, CLOSED, Wish()),
    ],
)
def test_the_own_membership_and_a_close_are_the_wish(
    expected: TorchState, desired: TorchState, read: Wish
) -> None:
    assert wish(expected, desired, ME) == read


@pytest.mark.parametrize(
    ("state", "name"),
    [
        (TorchState(participants={ME: 0}), ME),
        (REDUNDANT, ME),
        (TorchState(), None),
        (TorchState(closed=True), None),
        (INSIDE, None),
        (TorchState(participants={NodeDesc("a" * 256, 1, 0): 0}), None),
        (TorchState(participants={NodeDesc("a", -1, 0): 0}), None),
        (TorchState(participants={NodeDesc("a", 1, 2**70): 0}), None),
    ],
)
def test_a_first_state_names_its_sender(state: TorchState, name: NodeDesc | None) -> None:
    assert first_name(state) == name


@pytest.mark.parametrize(
    ("deadline", "complete", "least", "most", "foreign"),
    [
        (None, False, 2, 4, False),
        (SOON, False, 1, 4, False),
        (SOON, False, 2, 4, True),
        (None, False, 1, 4, True),
        (None, True, 1, 1, False),
        (None, True, 1, 2, True),
        (SOON, False, 1, 1, True),
    ],
)
def test_another_size_shows_in_the_first_state(
    deadline: datetime | None, complete: bool, least: int, most: int, foreign: bool
) -> None:
    first = TorchState(participants={ME: 0}, deadline=deadline, complete=complete)
    assert foreign_size(first, least, most) == foreign


DESCRIPTIONS = st.builds(NodeDesc, st.sampled_from("ab"), st.integers(0, 2), st.just(0))
STATES = st.builds(
    TorchState,
    closed=st.booleans(),
    participants=st.dictionaries(DESCRIPTIONS, st.integers()),
    wait_list=st.frozensets(DESCRIPTIONS),
    redundancy_list=st.frozensets(DESCRIPTIONS),
)


@given(STATES, STATES, DESCRIPTIONS)
def test_every_pair_of_states_has_a_wish(
    expected: TorchState, desired: TorchState, me: NodeDesc
) -> None:
    read = wish(expected, desired, me)
    others = replace(
        desired,
        participants={n: r for n, r in desired.participants.items() if n == me},
        wait_list=desired.wait_list & {me},
        redundancy_list=desired.redundancy_list & {me},
    )
    assert wish(expected, others, me) == read


# --- keys of a world that will never be ---


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (b"/torch.rendezvous.job.3/MASTER_ADDR", (3, b"MASTER_ADDR")),
        (b"torch.rendezvous.job.12/torchelastic/role_info/0", (12, b"torchelastic/role_info/0")),
        (b"/torch.rendezvous.job", None),
        (b"/torch.rendezvous.other.3/MASTER_ADDR", None),
        (b"/torch.rendezvous.job.x/MASTER_ADDR", None),
        (b"/torch.rendezvous.job.3/", None),
        (b"\xff\x00", None),
    ],
)
def test_the_round_of_a_key(key: bytes, expected: tuple[int, bytes] | None) -> None:
    assert round_key(key, "job") == expected


@pytest.mark.parametrize(
    ("value", "workers"),
    [
        (b'{"role": "default", "rank": 1, "local_world_size": 8}', 8),
        (None, 0),
        (b"", 0),
        (b"[1]", 0),
        (b'{"rank": 1}', 0),
        (b'{"local_world_size": "8"}', 0),
        (b'{"local_world_size": -1}', 0),
        (b"\xff", 0),
    ],
)
def test_the_workers_that_a_node_starts(value: bytes | None, workers: int) -> None:
    assert local_world_size(value) == workers


def test_a_run_id_may_look_like_a_round() -> None:
    assert round_key(b"/torch.rendezvous.a.3.7/MASTER_PORT", "a.3") == (7, b"MASTER_PORT")


def test_fillers_make_no_world() -> None:
    ranks = filler(b"torchelastic/assigned_ranks/0")
    assert ranks is not None
    assert b"1000000" in ranks
    assert filler(b"MASTER_ADDR") == b"127.0.0.1"
    assert filler(b"MASTER_PORT") == b"1"
    assert filler(b"torchelastic/role_info/1") is not None
    assert filler(b"torchelastic/agent/terminal_state/num_members") is None
    assert filler(b"torchelastic/agent/terminal_state/last_member") == b""


def counted_anew(cell: Cell) -> tuple[bytes | None, int]:
    there = [part for part in (cell.base, *cell.addends.values()) if part.value is not None]
    revision = max((part.mod_revision for part in there), default=0)
    added = [part.value for part in cell.addends.values() if part.value is not None]
    if not added or b"word" in added or cell.base.value == b"word":
        return cell.base.value, revision
    base = read_number(cell.base.value) if cell.base.value is not None else 0
    return b"%d" % wrap_int64(base + sum(map(read_number, added))), revision


@pytest.mark.parametrize("seed", range(20))
def test_the_value_is_that_of_its_parts_whatever_becomes_of_them(seed: int) -> None:
    random = Random(seed)
    cell = Cell()
    values = [None, b"1", b"-7", b"  12abc", b"9223372036854775807", *([b"word"] * (seed % 2))]
    for revision in range(1, 300):
        part = Part(random.choice(values), revision, revision)
        if random.random() < 0.1:
            cell.base = part
        else:
            cell.put_addend(f"a{random.randrange(8)}", part)
        assert (cell.value(), cell.value_revision()) == counted_anew(cell)
        assert cell.is_sum() == any(one.value is not None for one in cell.addends.values())


def test_a_counter_without_addends_is_absent() -> None:
    cell = Cell()
    cell.put_addend("a", Part(b"1", 5, 5))
    cell.put_addend("a", Part(None, 6, 0))
    assert (cell.value(), cell.value_revision()) == (None, 0)
    assert cell.base is ABSENT


async def test_a_push_is_for_the_one_that_came_first() -> None:
    waiters = Waiters()
    with waiters.waiting({b"/q"}) as first, waiters.waiting({b"/q"}) as second:
        waiters.pushed(b"/q")
        assert (first.done.done(), second.done.done()) == (True, False)
        waiters.pushed(b"/q")
        assert second.done.done()
    assert len(waiters) == 0


async def test_a_push_is_not_spent_on_one_that_gives_up() -> None:
    waiters = Waiters()
    with waiters.waiting({b"/q"}) as first, waiters.waiting({b"/q"}) as second:
        first.done.cancel()
        waiters.pushed(b"/q")
        assert second.done.done()
    assert len(waiters) == 0


async def test_what_one_has_found_itself_is_news_for_nobody_else() -> None:
    waiters = Waiters()
    with waiters.waiting({b"/q"}) as first, waiters.waiting({b"/q"}) as second:
        waiters.shown(second, b"/q")
        assert (first.done.done(), second.done.done()) == (False, True)
        waiters.shown(second, b"/q")
    assert len(waiters) == 0
