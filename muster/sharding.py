# SPDX-License-Identifier: Apache-2.0
"""``muster.data.shards()``: shards for the ranks that are there, each once in the final weights.

The sidecars hand shards out from the store. A shard is done only with a save that contains it: a
world that begins from an older step gets again all that came after that step.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from muster import saved_steps
from muster.orders import ShardOrder
from muster.process import CENTRAL_LOCAL_RANK, RankIdentity, refuse
from muster.resuming import last_commit, started_from
from muster.shard_log import Save, Shard, ShardLine, ShardLog

log = logging.getLogger(__name__)

POLL_S = 0.02
"""Poll interval of a rank that has nothing to train, while others have. Shorter: more requests."""

TROUBLE_S = 300.0
"""Timeout of a rank that gets no answer of its sidecar, or of the store."""

SAVE_S = 10.0
"""Timeout of a save that waits to be put on record. One that is not does not count."""


class ShardsLost(RuntimeError):
    """The records of this rank were given to others: it must not save its weights any more."""


class Shards:
    """One epoch of a data set, as this rank is given it. Not for use by two threads at once."""

    def __init__(self, desk: "HeldShards", epoch: int) -> None:
        self._desk = desk
        self._epoch = epoch
        self._shard: Optional[Shard] = None
        self.done = False
        """Whether all ranks together have trained the epoch to its end, as far as this one knows.
        Once true it stays so. Ranks learn of it one after another."""

    def __iter__(self) -> Iterator[Shard]:
        """Yield shard after shard until the epoch is trained.

        If no shard is left to take, it waits, as those that others hold may come back. So it is for
        ranks that do not wait for each other at each step. Raises ``RuntimeError`` if the body took
        no record of a shard, which would come again for ever, and after ``TROUBLE_S`` without an
        answer.
        """
        silent_s = time.monotonic()
        while not self.done:
            shard = self._desk.log.next_shard()
            if shard is not None:
                held = len(shard)
                yield shard
                if len(shard) == held:
                    raise RuntimeError(
                        "no record was taken of the shard of %d from %d on: iterate over it, as in"
                        " `for number in shard`, or call shard.take(count)" % (held, shard.start)
                    )
                silent_s = time.monotonic()
                continue
            trouble = self._ask()
            if not trouble:
                silent_s = time.monotonic()
            elif time.monotonic() - silent_s > TROUBLE_S:
                raise RuntimeError("no shard came for %.0f s: %s" % (TROUBLE_S, trouble))
            if not self._desk.log.left and not self.done:
                time.sleep(POLL_S)

    def take(self, count: int) -> List[int]:
        """Take the numbers of up to ``count`` records for the next step.

        It returns fewer, or none, if this rank has no more at the moment: it never waits for other
        ranks, so that all come to the next collective. All ranks end the epoch in the same step if
        they share ``done`` there: see docs/shards.md.
        """
        records: List[int] = []
        asked = False
        while len(records) < count:
            if self._shard is None or not len(self._shard):
                self._shard = self._desk.log.next_shard()
            if self._shard is not None:
                records += self._shard.take(count - len(records))
            elif asked or self.done:
                break
            else:
                asked = True
                self._ask(at_most_every_s=POLL_S)
        return records

    def committed(self, step: int) -> None:
        """Report that the weights of ``step`` are saved, and contain all that was taken before.

        Only for a loop without ``muster.drain()``, such as an elastic one, at each
        ``state.commit()`` and on every rank: ``drain.committed(step)`` does it itself. Raises
        ``RuntimeError`` if the save could not be put on record; the next one then counts for both.
        """
        self._desk.log.arrive(step)
        why = self._desk.save(step)
        if why:
            raise RuntimeError("cannot record which shards step %d contains: %s" % (step, why))

    def _ask(self, at_most_every_s: float = 0.0) -> str:
        """Ask for more; return why there is no answer, or an empty string."""
        return self._desk.ask_for_more(self, self._epoch, at_most_every_s)


Ask = Callable[[Dict[str, Any]], Dict[str, Any]]


class HeldShards:
    """The shards of one data set that this rank holds in one world, over all epochs."""

    def __init__(self, order: ShardOrder, identity: Dict[str, Any], ask: Ask) -> None:
        self.order = order
        self.log = ShardLog(order)
        self.world = identity.get("world")
        self.start: int = identity.get("start", 0)
        self._identity = identity
        self._ask = ask
        self._pid = os.getpid()
        self._want = order.shard_size
        self._given_s = 0.0
        self._given = 0
        self._in_vain_s = 0.0
        """Monotonic time of the last request in vain; 0 after one that was given something."""
        self.assumed = False
        """Whether ``start`` is the last commit because the script has not given another step."""
        self.listener = saved_steps.Listener(self._arrive, self.save)

    def begin(self, epoch: int) -> None:
        """Announce this rank to the sidecar; wait until it knows of the rank.

        Raises ``RuntimeError`` after ``TROUBLE_S``.
        """
        deadline_s = time.monotonic() + TROUBLE_S
        while True:
            answer = self._send(epoch, 0)
            if not answer.get("wait"):
                return
            if time.monotonic() >= deadline_s:
                raise RuntimeError(
                    "no shards of %s within %.0f s: %s"
                    % (self._identity["name"], TROUBLE_S, answer["wait"])
                )
            time.sleep(POLL_S)

    def ask_for_more(self, shards: Shards, epoch: int, at_most_every_s: float) -> str:
        """Ask for as much as this rank trains in the time that the sidecar wishes.

        Does nothing if it was given nothing less than ``at_most_every_s`` ago. Returns why there is
        no answer, or an empty string.
        """
        now = time.monotonic()
        if now - self._in_vain_s < at_most_every_s:
            return ""
        answer = self._send(epoch, self._want)
        given = sum(high - low for low, high in answer.get("given", ()))
        if given:
            if self._given:
                rate = self._given / max(1e-6, now - self._given_s)
                self._want = max(self.order.shard_size, int(rate * answer.get("batch_s", 1.0)))
            self._given_s, self._given = time.monotonic(), given
        self._in_vain_s = 0.0 if given else now
        shards.done = shards.done or answer.get("done") is True
        return str(answer.get("wait") or "")

    def _arrive(self, step: int) -> None:
        """Come to a boundary; raises ``ValueError`` for weights older than those on record."""
        self.log.arrive(step)
        begins = step == self.start and not self.log.used  # the boundary before its first step
        if self.assumed and not begins:
            self.assumed = False
            _check_first(step, self.start)

    def save(self, step: int) -> str:
        """Put on record what the weights of ``step`` contain; return the reason if that fails."""
        why = self.log.save(step)
        deadline_s = time.monotonic() + SAVE_S
        while self.log.saves and not why:
            wait = str(self._send(0, 0).get("wait") or "")
            if wait and time.monotonic() >= deadline_s:
                return wait
            if wait:
                time.sleep(POLL_S)
        return why

    def _send(self, epoch: int, want: int) -> Dict[str, Any]:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "shards in a process that was forked from the rank, as a data loader's worker:"
                " take them in the rank's own, and give the numbers of the records to the loader"
            )
        saves: List[Save] = list(self.log.saves)
        request = dict(
            self._identity,
            epoch=epoch,
            want=want,
            left=self.log.left,
            used=self.log.used,
            saves=saves,
            confirmed=self.log.confirmed,
        )
        try:
            answer = self._ask(request)
        except OSError as error:
            return {"wait": "the sidecar does not answer at its shards.sock: %s" % error}
        if answer.get("refused"):
            raise ValueError(answer["refused"])
        if answer.get("lost"):
            raise ShardsLost(
                "%s: this process must end, and begin again from the last commit" % answer["lost"]
            )
        if not answer.get("wait"):
            self.log.told(saves)
            self.log.give((low, high) for low, high in answer["given"])
        return answer


class Alone:
    """The source of shards without a sidecar: every rank its own part, from the beginning."""

    def __init__(self, order: ShardOrder, rank: int, ranks: int) -> None:
        self._order = order
        self._rank = rank
        self._ranks = ranks
        self._next: Dict[int, int] = {}

    def ask(self, request: Dict[str, Any]) -> Dict[str, Any]:
        """Answer as a sidecar does."""
        epoch, size = request["epoch"], self._order.shard_size
        position = self._next.get(epoch, self._rank)
        given: List[Tuple[int, int]] = []
        while request["want"] > size * len(given) and position < self._order.shard_count:
            place = epoch * self._order.epoch_length + position * size
            given.append((place, place + size))
            position += self._ranks
        self._next[epoch] = position
        done = not given and not request["left"] and position >= self._order.shard_count
        return {"given": given, "done": done}


_desks: Dict[str, HeldShards] = {}


def _start(world: Optional[str]) -> Tuple[int, bool]:
    """Return the step of the weights when the world began, and whether that is assumed.

    It is assumed to be that of the last commit if the script has given none. A world that names
    itself may be a later one of the same process, which may have gone back to an earlier step; and
    by now a later step may be saved.
    """
    for desk in _desks.values():
        if desk.world == world:
            return desk.start, desk.assumed
    told = started_from() if world is None else None
    return (last_commit() or 0, True) if told is None else (told, False)


def _check_first(step: int, start: int) -> None:
    """Compare the first boundary with the step that the shards go on after.

    Raises ``ValueError`` if records would be lost, and logs a warning if some may be trained twice.
    """
    if step <= start:
        raise ValueError(
            "the first step after muster.data.shards() is %d, and its shards go on after step %d,"
            " the last commit: records would be lost; load the checkpoint of that step, or give"
            " muster.data.shards(start=) the step of the one that was loaded" % (step, start)
        )
    if step > start + 1:
        log.warning(
            "the first step after muster.data.shards() is %d, and its shards go on after step %d,"
            " the last commit: if a later checkpoint was loaded, records are trained twice; tell"
            " its step by muster.drain(start), or give muster.data.shards(start=)",
            step,
            start,
        )


def shards(
    dataset_size: int,
    *,
    shard_size: int,
    epoch: int = 0,
    seed: Optional[int] = None,
    start: Optional[int] = None,
    name: str = "train",
    world: Optional[str] = None,
    ranks: Optional[int] = None,
) -> Shards:
    """Return an iterator over this rank's shards of an epoch: ``for shard in shards(...)``.

    Every rank must give the same arguments. ``shard_size``: the least number of records that is
    handed out; a smaller one spreads the end of an epoch more evenly, and a larger one reads more
    in a row. ``seed``: that of the order of the shards, another order in each epoch; None: in their
    own order. ``start``: the step of this rank's weights when it began, 0 without a checkpoint; by
    default the one that ``muster.drain(start)`` was given, else that of the last commit. It counts
    at the first call in a world. ``name`` tells data sets of one job apart. ``world`` and
    ``ranks``, without torchrun: any name that all ranks of a world have and no other world has, and
    the number of these ranks.

    Waits until the sidecar knows of this rank's world. Raises ``ValueError`` if ranks give
    different arguments, or if it is not known what the weights of ``start`` contain, as it never is
    without a sidecar.
    """
    order = ShardOrder(int(dataset_size), int(shard_size), seed)
    if order.size < 1 or order.shard_size < 1 or epoch < 0:
        raise ValueError(
            "muster.data.shards(%d, shard_size=%d, epoch=%d): the sizes are from 1 on, the epoch"
            " from 0" % (order.size, order.shard_size, epoch)
        )
    desk = _desks.get(name)
    if desk is None or desk.world != world:
        desk = _begin(order, epoch, start, name, world, ranks)
    elif desk.order != order:
        raise ValueError(
            "muster.data.shards() was called with %s for %r before: give another data set another"
            " name" % (desk.order, name)
        )
    return Shards(desk, epoch)


def _begin(
    order: ShardOrder,
    epoch: int,
    start: Optional[int],
    name: str,
    world: Optional[str],
    ranks: Optional[int],
) -> HeldShards:
    rank = RankIdentity(os.environ)
    count = rank.world_size if ranks is None else ranks
    run_dir = os.environ.get("MUSTER_RUN_DIR")
    if run_dir and not rank.of_torchrun and not world:
        raise ValueError("without torchrun, muster.data.shards() needs world= and ranks=")
    begins, assumed = (start, False) if start is not None else _start(world)
    if begins and not run_dir:
        refuse(
            ValueError(
                "no sidecar runs here, so it is not known which records the weights of step %d"
                " contain: shards would begin the epoch again; train beside one, as muster local"
                " does, or begin at step 0" % begins
            )
        )
    identity = {
        "name": name,
        "master": "" if world else rank.master,
        "world": world,
        "ranks": count,
        "local_rank": int(os.environ.get(CENTRAL_LOCAL_RANK, rank.local_rank)),
        "size": order.size,
        "shard_size": order.shard_size,
        "seed": order.seed,
        "start": begins,
    }
    ask = ShardLine(run_dir).ask if run_dir else Alone(order, rank.rank, count).ask
    desk = HeldShards(order, {key: one for key, one in identity.items() if one is not None}, ask)
    desk.assumed = assumed and bool(run_dir)
    former = _desks.pop(name, None)
    if former is not None and former.listener in saved_steps.listeners:
        saved_steps.listeners.remove(former.listener)
    desk.begin(epoch)
    _desks[name] = desk
    if run_dir:
        saved_steps.listeners.append(desk.listener)
    return desk
