# SPDX-License-Identifier: Apache-2.0
"""A rank's decision on the sidecar's order, from what it has published: pure.

The rank publishes first and then looks, as at each boundary of ``muster.boundary``. A step counts
only in a world that has formed: a rank that has the state of a new world says so, and makes its
first step when the order says that all have it. No number is tried twice, as the keys of an attempt
that failed stay in the store.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

from muster.saved_steps import plain
from muster.world.order import BROKEN, FALL_BACK, FORM, HOLD, IDLE, LEAVE, OVER, TRAIN, Order

GO = "go"
WAIT = "wait"
PUBLISH = "publish"
"""Publish the new state, and look again."""
JOIN = "join"
BREAK = "break"
"""Give the process group up, publish, and look again."""
PARK = "park"
"""Wait for the SIGTERM that ends this process."""
END = "end"
TODAY = "today"
"""Go on without changes in place."""


class WorldRank(NamedTuple):
    """The part of a rank's state that concerns its world; it publishes all but the last two.

    ``number``: the formed world of its steps, -1 for none. ``step``: the last whole step, -1 if it
    holds no whole state. ``epoch``: the last order that it has obeyed. ``held``: the order for
    which it stands at ``step``. ``broken``: the world that it saw fail, -1 for none. ``formed``:
    the world that it is in with its state. ``failed``: a world that it could not form, and why.
    ``ready``: it waits for its first world. ``over``: its script has ended well. ``grouped``: it is
    in a process group; ``tried``: the highest number that it has tried, published or not.
    """

    number: int = -1
    step: int = 0
    epoch: int = 0
    held: int = 0
    broken: int = -1
    formed: int = -1
    failed: Optional[Tuple[int, str]] = None
    ready: bool = False
    over: bool = False
    grouped: bool = False
    tried: int = -1

    def told(self, torch: str) -> str:
        """Return the object of the progress line; ``torch`` is the release of torch."""
        return '{"number":%d,"step":%d,"epoch":%d%s%s%s%s%s%s,"torch":"%s"}' % (
            self.number,
            self.step,
            self.epoch,
            ',"held":%d' % self.held if self.held else "",
            ',"broken":%d' % self.broken if self.broken >= 0 else "",
            ',"formed":%d' % self.formed if self.formed >= 0 else "",
            ',"failed":[%d,"%s"]' % (self.failed[0], plain(self.failed[1])) if self.failed else "",
            ',"ready":true' if self.ready else "",
            ',"over":true' if self.over else "",
            plain(torch)[:40],
        )


def arrive(rank: WorldRank, step: int) -> WorldRank:
    """Come to the boundary after ``step``; the caller publishes the result."""
    return rank._replace(step=step, held=0)


def decide(rank: WorldRank, order: Order) -> Tuple[str, WorldRank]:
    """Return what to do now, and the new state."""
    phase = order.phase
    if phase == OVER:
        return END, rank
    if phase == LEAVE:
        # The order of a process before this one is no longer there once this one's sidecar looks.
        return (PARK if rank.number >= 0 else WAIT), rank
    if phase == FALL_BACK:
        # Without a group a rank trains in the world that its torchrun has started, if there is one.
        first = rank.tried < 0 and order.number <= 0
        return (TODAY if rank.grouped or first else PARK), rank
    if phase == FORM and order.number > rank.tried:
        return JOIN, rank._replace(epoch=order.epoch, held=0)
    if phase == BROKEN:
        return _give_up(rank, order)
    if rank.grouped and order.number == rank.formed and phase in (TRAIN, HOLD):
        rank = rank._replace(number=order.number, failed=None, broken=-1, ready=False)
        if phase == TRAIN or (order.step is not None and 0 <= rank.step < order.step):
            # A vote may rely on "held" while it is published: withdraw it, and look once more.
            return (PUBLISH if rank.held else GO), rank._replace(held=0, epoch=order.epoch)
        if rank.held != order.epoch:
            return PUBLISH, rank._replace(held=order.epoch, epoch=order.epoch)
        return WAIT, rank
    if phase == IDLE and rank.grouped and rank.number < 0:
        # The world that it has formed has not come to be, and it may have seen no order about that.
        return BREAK, rank._replace(epoch=order.epoch, held=0, ready=True)
    if phase in (IDLE, FORM) or rank.epoch == order.epoch:
        return WAIT, rank
    return PUBLISH, rank._replace(epoch=order.epoch)


def _give_up(rank: WorldRank, order: Order) -> Tuple[str, WorldRank]:
    if rank.epoch == order.epoch:
        return WAIT, rank
    # One that was to come in is to be taken in as before.
    obeyed = rank._replace(epoch=order.epoch, held=0, ready=rank.ready or rank.number < 0)
    concerned = rank.grouped and order.number >= max(rank.number, rank.formed)
    return (BREAK if concerned else PUBLISH), obeyed


def begin_form(rank: WorldRank, order: Order, place: int) -> WorldRank:
    """Begin to form a world as its rank ``place``; its number is never tried again.

    Until it has all of the state, a rank that is behind holds none that is whole.
    """
    behind = place != order.source and (rank.step != order.step or rank.number < 0)
    step = -1 if behind else rank.step
    return rank._replace(tried=order.number, grouped=False, broken=-1, step=step)


def has_formed(rank: WorldRank, order: Order, step: int) -> WorldRank:
    """Be in the world of ``order``, with the state of its source at ``step``."""
    formed = rank._replace(step=step, formed=order.number, grouped=True)
    return formed._replace(ready=False, failed=None)


def break_off(rank: WorldRank, step: int) -> WorldRank:
    """See a collective of the present world fail; ``step``: the last whole step, -1 for none."""
    return rank._replace(step=step, broken=rank.number)


def is_lost(order: Optional[Order], number: int) -> bool:
    """Return whether the order says that the group of world ``number`` cannot work any more."""
    if order is None:
        return False
    if order.phase == BROKEN:
        return order.number >= number
    return order.phase == FORM and order.number > number


def is_given_up(order: Optional[Order], number: int) -> bool:
    """Return whether world ``number``, which is forming, will not be."""
    over = (IDLE, FALL_BACK, LEAVE, OVER)
    return is_lost(order, number) or (order is not None and order.phase in over)


def confirms_loss(order: Optional[Order], rank: WorldRank) -> bool:
    """Return whether the sidecar confirms that the world of a broken step is lost."""
    return is_given_up(order, max(rank.broken, rank.number))
