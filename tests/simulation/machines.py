# SPDX-License-Identifier: Apache-2.0
"""The machines of the pods, the lines between them, and what must hold when one is evicted.

A line is what two kernels keep up: a sidecar that stands still loses none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from agent.neighbour import ANSWER_TIMEOUT_S, CONNECT_TIMEOUT_S, Dial, PeerAway, PeerMute
from launcher_shim.c10d.rounds.records import LOST
from rdzv.errors import RecordError
from rdzv.peers import Suspicion
from rdzv.records.job import HistoryEntry, Member
from rdzv.snapshot import Snapshot
from rdzv.store import KeyValue, WatchEvent
from tests.simulation.nodes import KEYS

if TYPE_CHECKING:
    from tests.simulation.nodes import Sidecar
    from tests.simulation.pods import Pod, SimulatedJob
    from tests.simulation.story import Story

SILENT_S = (2.0, 3.0)
"""After how long a kernel gives a silent connection up."""
WAY_S = 0.01
LOOK_S = 0.1
WELL_S = 4.0
"""Who reaches the store for so long takes a suspicion away in time."""


class Wire:
    """One open line, between the sidecars that run now."""

    def __init__(self, ends: tuple[Sidecar, Sidecar], uids: tuple[str, str]) -> None:
        self.ends, self.uids = ends, uids
        self._end: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def ended(self) -> bool:
        """Wait until it ends; return whether that was silence."""
        return await asyncio.shield(self._end)

    def close(self) -> None:
        """Close it."""
        self.end(silent=False)

    def end(self, *, silent: bool) -> None:
        """Let it end so."""
        if not self._end.done():
            self._end.set_result(silent)


class Machines:
    """Each pod's machine: which reach each other, and who reached the store without a break."""

    def __init__(self, job: SimulatedJob, random: Random) -> None:
        self._job = job
        self._random = random
        self._wires: list[Wire] = []
        self._apart: set[frozenset[str]] = set()
        self._ill_s: dict[str, float] = {}
        self._joined_s: dict[frozenset[str], float] = {}

    def dial_of(self, pod: Pod, sidecar: Callable[[], Sidecar]) -> Dial:
        """Return what opens lines from a sidecar of ``pod``."""

        async def dial(member: Member) -> Wire:
            await asyncio.sleep(self._random.random() * WAY_S)
            other = self._job.pod_of(member.pod_uid)
            if other is None or other.gone or not self._reach(pod.pod_uid, other.pod_uid):
                await asyncio.sleep(CONNECT_TIMEOUT_S)
                raise PeerAway("silent")
            if other.sidecar is None:
                raise PeerAway("refused")
            if other.sidecar.process.frozen:
                await asyncio.sleep(ANSWER_TIMEOUT_S)
                raise PeerMute
            wire = Wire((sidecar(), other.sidecar), (pod.pod_uid, other.pod_uid))
            self._wires = [one for one in self._wires if not one._end.done()] + [wire]
            return wire

        return dial

    def closed(self, sidecar: Sidecar) -> None:
        """A sidecar has ended: its kernel says so to those that it reaches."""
        for wire in self._wires:
            if sidecar in wire.ends and self._reach(*wire.uids):
                self._later(WAY_S, partial(wire.end, silent=False))

    def part(self, one: Pod, others: Sequence[Pod]) -> None:
        """Let nothing through between one and others, silently."""
        for other in others:
            pair = frozenset({one.pod_uid, other.pod_uid})
            self._apart.add(pair)
            for wire in self._wires:
                if pair == set(wire.uids):
                    self._later(self._random.uniform(*SILENT_S), partial(self._give_up, wire))

    def join(self, one: Pod, others: Sequence[Pod]) -> None:
        """Let everything through again."""
        pairs = {frozenset({one.pod_uid, other.pod_uid}) for other in others}
        self._apart -= pairs
        self._joined_s |= dict.fromkeys(pairs, self._job.loop.time())

    async def look(self) -> None:
        """Note who does not reach the store, until cancelled."""
        while True:
            now = self._job.loop.time()
            for pod in self._job.everybody():
                well = pod.sidecar is not None and not pod.sidecar.process.frozen
                if not well or pod.link is None or not pod.link.whole:
                    self._ill_s[pod.pod_uid] = now
            await asyncio.sleep(LOOK_S)

    def committed(
        self, before: Snapshot, stored: Sequence[KeyValue], events: Sequence[WatchEvent]
    ) -> None:
        """A revision: see that whoever it evicts early is lost, by what was in the store."""
        for event in events:
            if event.kind == "put" and event.kv.key.endswith(".lost"):
                entry = HistoryEntry.from_kv(event.kv)
                if entry.details.get("early"):
                    self._check(before, stored, entry)

    def _check(self, before: Snapshot, stored: Sequence[KeyValue], entry: HistoryEntry) -> None:
        member, break_ = before.members[entry.member], self._job.invariants.break_
        if member.incarnation != entry.details["incarnation"]:
            break_(f"I6: {member.name} is evicted as an earlier incarnation")
        if len(before.members) < 3:
            break_(f"I5: {member.name} is evicted in a job of two")
        suspicions = [one for one in map(_suspicion, stored) if one is not None]
        known = [one for one in suspicions if _counts(one, before)]
        suspected = {one.member for one in known}
        votes = [one for one in known if one.member == member.name and one.by not in suspected]
        if len(votes) < 2:
            break_(f"I5: {member.name} is evicted by fewer than two that nobody suspects")
        current = self._job.invariants.rounds.round
        placed = member.name in {seat.member for seat in current.frozen}
        failed = current.complete and placed and current.ends.startswith(LOST)
        silent = [one for one in votes if one.sign == "silent"]
        if not failed and len(silent) < min(2, len(votes)):
            break_(f"I5: {member.name} is evicted, and only its sidecar is away")
        pod = self._job.pod_of(member.pod_uid)
        if pod is None or pod.gone:
            return
        if self._is_well(pod):
            break_(f"I5: {member.name} is evicted, and reaches the store")
        reached = [
            other
            for other in self._job.present()
            if other is not pod
            and other.name in before.members
            and self._is_well(other)
            and pod.sidecar is not None
            and self._reach(pod.pod_uid, other.pod_uid)
            and self._job.loop.time()
            > self._joined_s.get(frozenset({pod.pod_uid, other.pod_uid}), 0.0) + WELL_S
        ]
        if len(reached) >= 2:
            break_(f"I5: {member.name} is evicted, and reaches two others that have the store")

    def _is_well(self, pod: Pod) -> bool:
        ill_s = self._ill_s.get(pod.pod_uid, 0.0)
        return self._job.loop.time() - max(ill_s, pod.began_s) > WELL_S

    def _reach(self, one: str, other: str) -> bool:
        return frozenset({one, other}) not in self._apart

    def _give_up(self, wire: Wire) -> None:
        if not self._reach(*wire.uids):
            wire.end(silent=True)

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        self._job.loop.call_later(seconds, act, context=self._job.network.context)


def _suspicion(kv: KeyValue) -> Suspicion | None:
    if not kv.key.startswith(KEYS.generations) or "/suspicions/" not in kv.key:
        return None
    try:
        return Suspicion.from_kv(kv)
    except RecordError:
        return None


def _counts(one: Suspicion, snapshot: Snapshot) -> bool:
    member, by = snapshot.members.get(one.member), snapshot.members.get(one.by)
    return (
        (member is not None and member.incarnation == one.incarnation)
        and by is not None
        and by.lease == one.lease
    )


# -- events


def lose_machine(story: Story) -> None:
    """Lose a machine with all that is on it, silently; a pod of that name may come elsewhere."""
    pod = story.any()
    if pod is None or len(story.job.present()) <= 1:
        return
    _lose(story, pod)


def _lose(story: Story, pod: Pod) -> None:
    assert story.job.machines is not None
    story.job.machines.part(pod, story.job.everybody())
    pod.die()
    story.later(story.random.uniform(0.5, 25.0), lambda: story.replace(pod))


def cut_machine(story: Story) -> None:
    """Cut a machine off from everything, for a while."""
    pod = story.any()
    if pod is not None:
        _cut_off(story, pod)


def _cut_off(story: Story, pod: Pod) -> None:
    if pod.link is not None and pod.link.whole and not pod.cut_off:
        story.say(pod, "its machine is cut off")
        _part_for_a_while(story, pod, story.job.present())
        _cut_for_a_while(story, pod)


def part_from_all(story: Story) -> None:
    """Cut a machine off from all others; both have the store."""
    pod = story.any()
    if pod is not None:
        story.say(pod, "its machine reaches no other, but the store")
        _part_for_a_while(story, pod, story.job.present())


def part_from_some(story: Story) -> None:
    """Cut a machine off from the store, and from some others; the rest stand still at times."""
    pod, random = story.any(), story.random
    if pod is None or pod.link is None or not pod.link.whole or pod.cut_off:
        return
    others = [one for one in story.job.present() if one is not pod]
    some = random.sample(others, random.randint(0, len(others)))
    story.say(pod, f"its machine reaches neither the store nor {[one.name for one in some]}")
    _part_for_a_while(story, pod, some)
    _cut_for_a_while(story, pod)
    for other in others:
        if other not in some and random.random() < 0.5:
            _stop_for_a_while(story, other, story.outage_s())


def part_two(story: Story) -> None:
    """Let two machines not reach each other."""
    pods = story.job.present()
    if len(pods) > 1:
        one, other = story.random.sample(pods, 2)
        story.say(one, f"its machine does not reach that of {other.name}")
        _part_for_a_while(story, one, [other])


def lose_one_after_another(story: Story) -> None:
    """Lose one of three machines while another one stands still, and then cut off the third."""
    pods, random = story.job.present(), story.random
    if len(pods) < 3 or any(pod.link is None or not pod.link.whole for pod in pods):
        return
    lost, third, still = random.sample(pods, 3)
    _stop_for_a_while(story, still, random.uniform(5.0, 8.0))
    _lose(story, lost)
    story.later(random.uniform(3.0, 3.5), lambda: _cut_off(story, third))


def _part_for_a_while(story: Story, pod: Pod, others: Sequence[Pod]) -> None:
    machines = story.job.machines
    assert machines is not None
    parted = [one for one in others if one is not pod]
    machines.part(pod, parted)
    story.later(story.outage_s(), lambda: _join(story, pod, parted))


def _join(story: Story, pod: Pod, others: Sequence[Pod]) -> None:
    assert story.job.machines is not None
    story.say(pod, "its machine reaches the others again")
    story.job.machines.join(pod, others)


def _cut_for_a_while(story: Story, pod: Pod) -> None:
    assert pod.link is not None
    pod.link.cut(refuses=False)
    pod.cut_off = True
    story.later(story.outage_s(), lambda: _mend(story, pod))


def _mend(story: Story, pod: Pod) -> None:
    pod.cut_off = False
    if pod.link is not None and story.job.whole:
        story.say(pod, "has the store again")
        pod.link.mend()


def _stop_for_a_while(story: Story, pod: Pod, seconds: float) -> None:
    sidecar = pod.sidecar
    if sidecar is None or sidecar.process.frozen:
        return
    sidecar.process.frozen = True
    story.say(pod, "its sidecar freezes")
    story.later(seconds, lambda: story.job.loop.thaw(sidecar.process))
