# SPDX-License-Identifier: Apache-2.0
"""The sidecar's order for its pod's ranks, and a rank's decision on it, from what it has published.

``$MUSTER_RUN_DIR/world`` is there from the sidecar's start if worlds may change in place. Each
change has a higher epoch. The rank publishes first and then looks, as at each boundary of
``muster.boundary``. A step counts only in a world that has formed. No number is tried twice, as the
keys of an attempt that failed stay in the store. The decision is pure.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Mapping, NamedTuple, Optional, Tuple

from muster.saved_steps import plain

log = logging.getLogger(__name__)

WORLD_NAME = "world"

IDLE, TRAIN, HOLD, FORM = "idle", "train", "hold", "form"
BROKEN, FALL_BACK, LEAVE, OVER = "broken", "fall-back", "leave", "over"
PHASES = (IDLE, TRAIN, HOLD, FORM, BROKEN, FALL_BACK, LEAVE, OVER)

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


class Order(NamedTuple):
    """The content of the file.

    ``number``: the world that the phase is about. ``step``: the boundary at which all stop, or the
    step whose state all have after a form; None while ranks vote. ``first_rank``: that of this
    pod's first local rank. ``source``: the rank in the new world that has the state. ``store`` and
    ``prefix``: the address of a TCPStore, and the part of it that is this world's alone. ``tag``:
    the save tag of the new world; empty for that of the source.
    """

    epoch: int = 0
    phase: str = IDLE
    number: int = -1
    step: Optional[int] = None
    size: int = 0
    first_rank: int = 0
    source: int = 0
    store: str = ""
    prefix: str = ""
    tag: str = ""
    why: str = ""


class OrderFile:
    """The file of one run directory, parsed only when it has changed; for one thread.

    The file is there from the sidecar's start if worlds may change in place, and only then. A
    rank looks by ``stat`` at each boundary, after it has published its own state: so no sidecar
    can agree on a step that the rank has already passed.
    """

    def __init__(self, run_dir: str) -> None:
        self._path = os.path.join(run_dir, WORLD_NAME)
        self._seen: Optional[Tuple[int, int]] = None
        self._order: Optional[Order] = None
        self._warned = False

    def read(self) -> Optional[Order]:
        """Return the present order; None without one.

        If it cannot be read, the last one stays in force, and a warning is logged once.
        """
        try:
            status = os.stat(self._path)
            seen = (status.st_mtime_ns, status.st_ino)
            if seen != self._seen:
                with open(self._path, "rb") as file:
                    self._order = parse(file.read())
                self._seen = seen
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            if not self._warned:
                self._warned = True
                log.warning("cannot read %s, keeping the last order, if any: %s", self._path, error)
        return self._order


def comes_later(environ: Mapping[str, str]) -> bool:
    """Return whether a rank is started beside a world that trains, into which it is to come.

    The other ranks of its launcher's world are in that one: with them it forms none.
    """
    run_dir = environ.get("MUSTER_RUN_DIR", "")
    if not run_dir or "TORCHELASTIC_RUN_ID" not in environ:
        return False
    order = OrderFile(run_dir).read()
    return order is not None and order.number > 0 and order.phase != FALL_BACK


def parse(content: bytes) -> Order:
    """Parse an order; raises ``ValueError``."""
    fields = json.loads(content.decode("utf-8"))
    try:
        if fields["phase"] not in PHASES:
            raise ValueError("no phase of a world: %r" % (fields["phase"],))
        step, number = fields.get("step"), fields.get("number")
        return Order(
            epoch=int(fields["epoch"]),
            phase=fields["phase"],
            step=None if step is None else int(step),
            number=-1 if number is None else int(number),
            size=int(fields.get("size") or 0),
            first_rank=int(fields.get("first_rank") or 0),
            source=int(fields.get("source") or 0),
            store=str(fields.get("store") or ""),
            prefix=str(fields.get("prefix") or ""),
            tag=str(fields.get("tag") or ""),
            why=str(fields.get("why") or ""),
        )
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError("a field is missing or of another type: %s" % error) from error


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
