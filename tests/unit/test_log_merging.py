# SPDX-License-Identifier: Apache-2.0
"""Lines of several pods in the order of their times: what waits, for how long, and how much."""

from __future__ import annotations

from random import Random

from console.logs.following import HOLD_S, Merge


def drained(merge: Merge[str], now_s: float) -> list[str]:
    found = []
    while (item := merge.take(now_s)) is not None:
        found.append(item)
    return found


def test_an_item_waits_for_an_earlier_one_of_another_source() -> None:
    merge: Merge[str] = Merge()
    a, b = merge.open(0), merge.open(0)
    merge.put(a, 20, "later", 1, 0)
    assert merge.take(0) is None
    assert merge.due_s() == HOLD_S
    merge.put(b, 10, "earlier", 1, 0.1)
    assert drained(merge, 0.1) == ["earlier"]  # and then b may have another one before 20
    assert drained(merge, 0.1 + HOLD_S) == ["later"]


def test_no_item_waits_longer_than_the_hold_though_others_keep_coming() -> None:
    merge: Merge[str] = Merge()
    sources = [merge.open(0) for _ in range(3)]
    merge.put(sources[0], 100, "old", 1, 0)
    for number in range(10):
        at_s = number * HOLD_S / 10
        merge.put(sources[1], number, "new", 1, at_s)
        drained(merge, at_s)
    assert "old" in drained(merge, HOLD_S)


def test_a_source_that_has_ended_is_not_waited_for() -> None:
    merge: Merge[str] = Merge()
    a, b = merge.open(0), merge.open(0)
    merge.put(a, 20, "a", 1, 0)
    merge.put(b, 30, "b", 1, 0)
    merge.close(a)
    merge.close(b)
    assert drained(merge, 0) == ["a", "b"]


def test_a_quiet_source_holds_nobody_up() -> None:
    merge: Merge[str] = Merge()
    a = merge.open(0)
    merge.open(0)
    merge.put(a, 1, "a", 1, HOLD_S)
    assert drained(merge, HOLD_S) == ["a"]


def test_each_source_keeps_its_own_order_and_all_come_out() -> None:
    random, merge = Random(7), Merge[str]()
    sources = {name: merge.open(0) for name in "abc"}
    put: list[str] = []
    got: list[str] = []
    for number in range(300):
        name = random.choice("abc")
        merge.put(sources[name], random.randrange(50), f"{name}{number:03}", 1, number)
        put.append(f"{name}{number:03}")
        if number % 7 == 0:
            got += drained(merge, number)
    for source in sources.values():
        merge.close(source)
    got += drained(merge, 300)
    for name in "abc":
        assert [one for one in got if one[0] == name] == [one for one in put if one[0] == name]
    assert len(got) == 300


def test_sources_share_one_budget_of_memory() -> None:
    merge: Merge[str] = Merge(budget_bytes=100)
    a, b = merge.open(0), merge.open(0)
    merge.put(a, 1, "huge", 1000, 0)
    assert not merge.has_room(a)
    assert merge.has_room(b)
    merge.put(b, 2, "small", 40, 0)
    assert merge.has_room(b)
    merge.put(b, 3, "small", 40, 0)
    assert not merge.has_room(b)
    drained(merge, HOLD_S)
    assert merge.has_room(a)
    assert merge.has_room(b)
