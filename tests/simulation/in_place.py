# SPDX-License-Identifier: Apache-2.0
"""Ranks whose world changes in place: what ``muster.world`` does, without torch's collectives.

The sidecar's half is the product's, and so are the rank's decisions (``muster.world.conduct``). A
rank holds a state as (step, lineage): the lineage is another one for each world in which a step of
it was made. A collective ends once all have come to it, and fails if one of them leaves its group.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from launcher_shim.rundir import layout
from muster import boundary
from muster.boundary import ENTERED_STEP
from muster.world import conduct
from muster.world.conduct import IDLE, OVER, Order, WorldRank, parse
from rdzv.records.progress import RankInWorld
from rdzv.records.world import WorldChange
from rdzv.store import WatchEvent
from tests.simulation.ranks import SAVE_EVERY, Rank, RoundId
from tests.simulation.torchrun import FIRST_PORT

if TYPE_CHECKING:
    from tests.simulation.pods import Pod, SimulatedJob

FORM_S = 30.0
"""Time that a rank gives a world to form."""

LOSS_S = 60.0
"""Time in which its sidecar has to confirm a loss."""

IMPORTS_S = (0.8, 3.0)
"""How long a rank imports torch, before it reads an order."""

TAKES_S = (0.01, 0.3)
"""How long the state takes from one rank to another."""

AMID_OPTIMIZER = 0.1
"""Of the steps that break, so many do so when the optimizer has begun."""

TORCH = "2.15.0"


class PeerLost(Exception):
    """A collective has failed."""


class Group:
    """One process group: its ranks by place, and who has come to the present collective."""

    def __init__(self, number: int, size: int, changed: Callable[[], None]) -> None:
        self.number = number
        self.size = size
        self.ranks: dict[int, InPlaceRank] = {}
        self.broken = False
        self._here: dict[int, InPlaceRank] = {}
        self._met = 0
        self._changed = changed

    @property
    def met(self) -> int:
        """How many collectives all have come to."""
        return self._met

    def enter(self, place: int, rank: InPlaceRank) -> None:
        """Become one of its ranks."""
        if place in self.ranks:
            self.broken = True  # The keys of the one before are in the store.
        self.ranks[place] = rank

    def come(
        self, place: int, rank: InPlaceRank, met: Callable[[Sequence[InPlaceRank]], None]
    ) -> int:
        """Come to the next collective; return how many there were before."""
        self._here[place] = rank
        before = self._met
        if len(self._here) == self.size and not self.broken:
            ranks = [self._here[at] for at in sorted(self._here)]
            self._here = {}
            self._met += 1
            met(ranks)
            self._changed()
        return before

    def leave(self) -> None:
        """Leave it: the others' collectives fail."""
        self.broken = True
        self._changed()


class WorldsInPlace:
    """All groups of a story, what was saved, and what must hold of them."""

    def __init__(self, job: SimulatedJob) -> None:
        self._job = job
        self._groups: dict[tuple[str, int], Group] = {}
        self._tried = 0
        self._formed = 0
        self._kept: dict[int, int] = {}
        self.saved: dict[int, int] = {}
        """The lineage of the newest save of each step."""
        self.changed = asyncio.Event()

    def group(self, kind: str, number: int, size: int) -> Group:
        """The group of one world, or of the one that torchruns have started."""
        return self._groups.setdefault((kind, number), Group(number, size, self.tell))

    def tell(self) -> None:
        """Wake all that wait in a collective."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    # -- what must hold

    def committed(self, key_of_world: str, events: Sequence[WatchEvent]) -> None:
        """Look at one revision."""
        for event in events:
            if event.kind != "put" or event.kv.key != key_of_world:
                continue
            change = WorldChange.from_kv(event.kv)
            say = f"{change.phase} {change.number} {','.join(change.seats)} {change.reason}"
            self._job.timeline.add("world", say)
            if change.phase == "form":
                if change.number <= self._tried:
                    self._break(f"I13: world {change.number} is tried again")
                self._tried = change.number
            elif change.phase == "train" and change.number > self._formed:
                self._form(change.number)

    def _form(self, number: int) -> None:
        group = self._groups.get(("world", number))
        if group is None or len(group.ranks) < group.size:
            self._break(f"I13: world {number} has formed, and not all have come to it")
            return
        alive = [rank for rank in group.ranks.values() if rank.is_in(number)]
        if any(not rank.is_gone(number) and rank not in alive for rank in group.ranks.values()):
            self._break(f"I13: world {number} has formed, and not all have its state")
        if len({rank.state for rank in alive}) > 1:
            self._break(f"I13: world {number} has formed with {[rank.state for rank in alive]}")
        self._formed = number
        self._kept[number] = max((rank.state[0] for rank in alive), default=0)

    def meets(self, ranks: Sequence[InPlaceRank], source: int) -> None:
        """All ranks of a world to be are there, to take the state of one of them."""
        given = ranks[source].state
        if given[0] < 0:
            self._break(f"I13: {ranks[source].pod.name} holds no whole state")
        ahead = [one for one in ranks if one.state[0] > given[0] and one.me.number > 0]
        if ahead:
            self._break(f"I13: {ahead[0].pod.name} has made step {ahead[0].state[0]}: it is lost")
        for one in ranks:
            one.taken = given

    def steps(self, group: Group, ranks: Sequence[InPlaceRank]) -> None:
        """All ranks of a world have begun a step."""
        if len({rank.state for rank in ranks}) > 1:
            states = {rank.pod.name: rank.state for rank in ranks}
            self._break(f"I13: a step in world {group.number} with different states: {states}")
        current = self._job.invariants.rounds.round
        if self._groups.get(("world", group.number)) is group and (
            self._formed != group.number or current.world not in (0, group.number)
        ):
            self._break(f"I1: a step in world {group.number}, and {self._formed} has formed")

    def let_go(self, pod: Pod, rank: Rank | None) -> None:
        """SIGTERM passes to a pod without a save."""
        kept = self._kept.get(self._formed, -1)
        if not isinstance(rank, InPlaceRank) or rank.me.number < 0 or not self._formed:
            return
        if rank.is_in(self._formed):
            self._break(f"I7: {pod.name} goes, and the others have formed no world without it")
        elif rank.state[0] > kept:
            self._break(f"I7: {pod.name} goes at step {rank.state[0]}, and others have {kept}")

    def _break(self, sentence: str) -> None:
        self._job.invariants.break_(sentence)


class InPlaceRank(Rank):
    """One worker process, which lives through changes of its world."""

    def __init__(
        self,
        job: SimulatedJob,
        pod: Pod,
        round: RoundId,
        master: str,
        size: int,
        random: Random,
        *,
        place: int,
    ) -> None:
        # A torchrun in a round of its own, too, names its ranks' world as all do.
        real = (round[0], int(master.rpartition(":")[2]) - FIRST_PORT)
        super().__init__(job, pod, real, master, size, random)
        self.me = WorldRank()
        self.state = self.taken = (0, 0)
        self._launched = (place, size)
        self._group: Group | None = None
        self._place = 0
        self._today = False
        self._over = False
        self._worlds = job.in_place

    def is_in(self, number: int) -> bool:
        """Whether it is in a world, with its state."""
        group = self._group
        return (
            not self.ended
            and group is not None
            and group.number == number
            and (self.me.formed == number)
        )

    def is_gone(self, number: int) -> bool:
        """Whether it was lost to a world that it had formed, or saw it fail."""
        return self.ended or self.me.broken == number or self.me.tried > number

    def end(self) -> None:
        """Its agent kills it, and the kernel closes its connections."""
        self._leave_group()
        super().end()

    async def run(self) -> None:
        """Train until it is ended, or through with the last step."""
        self._task = asyncio.current_task()
        step = await self._start()
        self.state = (step, self._worlds.saved.get(step, 0))
        self.me = WorldRank(step=step, ready=True)
        self.world.ranks[self.pod.name] = self
        await self._publish()
        while True:
            await self._settle()
            if self._is_through:
                break
            if not await self._step():
                continue
            self._told = boundary.arrive(self._told, self.state[0])
            self.me = conduct.arrive(self.me, self.state[0])
            await self._publish()
            due = await self._follow()
            while due:
                due = await self._save(self.state[0])
            if self.state[0] % SAVE_EVERY == 0:
                await self._save_unasked(self.state[0])
        self.me = self.me._replace(over=True)
        await self._publish(takes_part=False)
        self.finished = True

    @property
    def _is_through(self) -> bool:
        return self._over or (
            self._job.last_step is not None and self.state[0] >= self._job.last_step
        )

    # -- the order

    def _order(self) -> Order:
        content = self.pod.run_dir.files.get(layout.WORLD)
        return Order(phase=IDLE) if content is None else parse(content)

    async def _settle(self) -> None:
        while not self._today:
            order = self._order()
            verdict, self.me = conduct.decide(self.me, order)
            if verdict == conduct.GO or (self._is_through and self.me.number > 0):
                return
            if verdict == conduct.PUBLISH:
                await self._publish()
            elif verdict == conduct.BREAK:
                self._leave_group()
                await self._publish()
            elif verdict == conduct.JOIN:
                await self._join(order)
                await self._publish()
            elif verdict == conduct.TODAY:
                self._go_on_as_today()
            elif verdict == conduct.END:
                self._over = True
                return
            else:
                if verdict == conduct.PARK:
                    await self._park()
                    return
                await self._look_again()

    async def _park(self) -> None:
        self._say("its rank waits to be ended")
        self._leave_group()
        await self._publish()
        while self._order().phase != OVER:
            await self._look_again()
        self._over = True

    def _go_on_as_today(self) -> None:
        self._say("its world changes by a save and a restart")
        self._today = True
        if self._group is None:
            place, size = self._launched
            self._group = self._worlds.group(self.master, 0, size)
            self._group.enter(place, self)
            self._place = place

    async def _join(self, order: Order) -> None:
        self._leave_group()
        group = self._worlds.group("world", order.number, order.size)
        self.me = conduct.begin_form(self.me, order, order.first_rank)
        self._group, self._place = group, order.first_rank
        group.enter(order.first_rank, self)
        until_s = self._job.loop.time() + FORM_S
        try:
            await self._collective(group, lambda ranks: self._worlds.meets(ranks, order.source),
                                   until_s)  # fmt: skip
            behind = order.first_rank != order.source and self.state != self.taken
            taken = self.taken
            if behind:
                self.state = (self.me.step, -1)  # A part of each, until it has all of it.
            await asyncio.sleep(self._random.uniform(*TAKES_S))
            if group.broken and self._random.random() < 0.5:
                raise PeerLost
            self.state = taken
        except PeerLost:
            self._say(f"cannot form world {order.number}")
            self._leave_group()
            self.me = self.me._replace(failed=(order.number, "a peer is lost"))
            return
        self.world.size = order.size
        self.me = conduct.has_formed(self.me, order, self.state[0])

    # -- a step

    async def _step(self) -> bool:
        """Make the next step; return whether it counts."""
        group, job, step = self._group, self._job, self.state[0] + 1
        assert group is not None
        self.world.began[self.pod.name] = step
        try:
            await self._collective(group, lambda ranks: self._worlds.steps(group, ranks))
            await asyncio.sleep(job.step_s * self._random.uniform(0.5, 1.5))
            if group.broken and self._random.random() < 0.5:
                raise PeerLost
        except PeerLost:
            if self._today:
                await self._fail()
            half = self._random.random() < AMID_OPTIMIZER
            return await self._break(-1 if half else self.state[0])
        lineage = zlib.crc32(b"%d in %d after %d" % (step, group.number, self.state[1]))
        self.state = (step, lineage)
        self.me = self.me._replace(step=step)
        self.world.trained[self.pod.name] = step
        job.invariants.trained(self, step)
        return True

    async def _break(self, step: int) -> bool:
        self._say(f"step {self.state[0] + 1} is broken")
        self.me = conduct.break_off(self.me, step)
        self._leave_group()
        if step < 0:
            self.state = (-1, self.state[1])
        await self._publish()
        until_s = self._job.loop.time() + LOSS_S
        while not conduct.confirms_loss(self._order(), self.me):
            if self._job.loop.time() > until_s:
                await self._fail()
            await self._look_again()
        return False

    async def _fail(self) -> None:
        """End the process by an exception: its torchrun starts another one."""
        self._say("its rank raises")
        self._leave_group()
        torchrun = self.pod.torchrun
        if torchrun is not None and torchrun.rank is self:
            torchrun.order("rejoin")
        await asyncio.Event().wait()

    async def _collective(
        self,
        group: Group,
        met: Callable[[Sequence[InPlaceRank]], None],
        until_s: float | None = None,
    ) -> None:
        """Come to the next collective of a group; raises ``PeerLost``."""
        before = group.come(self._place, self, met)
        given_up = conduct.is_lost if until_s is None else conduct.is_given_up
        while group.met == before:
            late = until_s is not None and self._job.loop.time() >= until_s
            cut = not self._today and given_up(self._order(), group.number)
            if group.broken or late or cut:
                raise PeerLost
            news = [asyncio.ensure_future(one.wait()) for one in (
                self._worlds.changed, self.pod.run_dir.written)]  # fmt: skip
            try:
                await asyncio.wait(news, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in news:
                    one.cancel()

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.leave()
        self.me = self.me._replace(grouped=False)

    # -- what it publishes

    async def _start(self) -> int:
        await asyncio.sleep(self._random.uniform(*IMPORTS_S))
        await super()._start()
        gate = self._gate()
        last = gate.last_commit if gate is not None and self.matched else None
        return last.step if last is not None else self.world.start

    def _progress(self, *args: Any, **kwargs: Any) -> Any:
        line = super()._progress(*args, **kwargs)
        part = None
        if not self._today:
            fields = json.loads(self.me.told(TORCH))
            failed = fields.pop("failed", None)
            part = RankInWorld(**fields, failed=None if failed is None else (failed[0], failed[1]))
        step = max(line.step, self.me.step) if line.step != ENTERED_STEP else line.step
        pid, started = self._process
        return replace(line, step=step, in_world=part, pid=pid, started=started)

    def _note_saved(self, step: int) -> None:
        self._worlds.saved[step] = self.state[1]
        super()._note_saved(step)
