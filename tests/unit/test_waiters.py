# SPDX-License-Identifier: Apache-2.0
"""Whom a push wakes: one waiter, and none that has given up."""

from __future__ import annotations

from launcher_shim.c10d.values.reads import Waiters


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
