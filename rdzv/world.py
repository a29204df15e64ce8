# SPDX-License-Identifier: Apache-2.0
"""The change of a world in place: when its ranks stop, who forms the next one, from which state.

::

    idle ─▶ form ─▶ train ─▶ hold ─▶ hold(step) ─▶ form ─▶ train
             └──────────┴──────┴──────────┴─────────┴─▶ broken ─▶ form

and from each of them to ``fall-back``: then changes of this round are those of ``rdzv.drain``, with
a save and a restart of all workers. Any sidecar may carry out a decision, by comparing all that it
rests on. Nothing is decided by a report of another change, or of another torchrun.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Literal

from rdzv.dataclass import dataclass
from rdzv.records.policy import JobPolicy
from rdzv.records.world import WorldChange, WorldReport

WorldAction = Literal["keep", "hold", "commit", "break", "form", "formed", "release", "fall back"]

KNOWN_TORCH = ("2.6", "2.9", "2.15")
"""Releases of torch whose torchrun a test has run in a round of its own."""


_OLDER = "the sidecar of {} knows no world that changes in place"


@dataclass(frozen=True, slots=True)
class WorldSnapshot:
    """Everything that the decision depends on, at one revision of the store; immutable."""

    change: WorldChange
    round: int
    """The number of the present round."""
    live: bool = True
    """Whether a world trains in it, and none of its ranks has ended."""
    world: int = 0
    """The world that has formed in it in place; 0 for none."""
    members: tuple[str, ...] = ()
    """The members of the present world, in rank order."""
    lost: frozenset[str] = frozenset()
    """Those of all members that count as lost."""
    leaving: frozenset[str] = frozenset()
    newcomers: tuple[str, ...] = ()
    """Members with a round of their own, in the order in which places are given."""
    reports: Mapping[str, WorldReport] = field(default_factory=dict)
    """By member, for its present torchrun alone."""
    older: frozenset[str] = frozenset()
    """Members, and nodes that ask, whose sidecar knows no world that changes in place."""
    reforms: str = ""
    """The cause for which the whole world is to form again, if there is another one."""
    sizes: JobPolicy = JobPolicy(1, 1)


@dataclass(frozen=True, slots=True)
class WorldPolicy:
    """The timeouts of a change, in seconds."""

    hold_s: float = 10.0
    """For all to vote. While one rank stands, others may wait for it in a collective."""
    stop_s: float = 120.0
    """For all to reach the step that was agreed on: at most one step for each."""
    form_s: float = 30.0
    """For all to form a world, or to give up one that is broken."""
    start_s: float = 600.0
    """For the first world, from the first rank that waits in it: the others import and compile."""
    tries: int = 3
    """Attempts of a change after which it falls back."""


@dataclass(frozen=True, slots=True)
class WorldDecision:
    """The next write, if there is one."""

    action: WorldAction
    reason: str
    change: WorldChange | None = None
    """The record to write."""
    whole: bool = True
    """``fall back``: whether every rank holds a whole state, so that it can save it."""
    wake_at_s: float = math.inf


class Lasting:
    """Since when the present change has lasted, as one sidecar sees it."""

    def __init__(self) -> None:
        self._of = (-1, -1)
        self._seen_s = 0.0

    def since_s(self, now: float, snapshot: WorldSnapshot, answers_for_s: float) -> float:
        """Return the time; ``answers_for_s``: how long the store has answered without a gap.

        No time counts in which the store is away, and none before: what the members had to write
        comes only now. A round that has just formed still finds the record of the one before.
        """
        of = (snapshot.round, snapshot.change.epoch)
        if of != self._of:
            self._of, self._seen_s = of, now
        return max(self._seen_s, now - answers_for_s)


def decide(
    now: float, since_s: float, snapshot: WorldSnapshot, policy: WorldPolicy
) -> WorldDecision:
    """Decide on the next change.

    ``since_s``: since when the present one has lasted, as of ``Lasting``.
    """
    change = snapshot.change
    if change.round != snapshot.round:
        # Epochs and numbers go on: ranks of the round before may still read them.
        change = WorldChange(
            change.epoch,
            round=snapshot.round,
            number=change.number,
            mod_revision=change.mod_revision,
        )
    if not snapshot.live:
        return WorldDecision("keep", "no world trains, or it is about to end")
    at = _Moment(now, since_s, snapshot, policy, change)
    if change.phase == "fall-back":
        number, reports = change.number, _of(snapshot, snapshot.members)
        if number and any(one.broken == number for one in reports):
            # A rank without its group comes to no save, and no order brings it back.
            return at.fall_back(f"a collective failed as {change.reason}", whole=False)
        return WorldDecision("keep", f"changes need a restart: {change.reason}")
    if any(one.over for one in _of(snapshot, snapshot.members)):
        return WorldDecision("keep", "its training has ended")
    if change.phase == "idle":
        return _first(at)
    if not snapshot.world and change.phase not in ("form", "broken"):
        return at.fall_back("the record of its change is another world's")
    if change.phase == "train":
        return _train(at)
    if change.phase == "hold":
        return _hold(at)
    if change.phase == "form":
        return _form(at)
    return _broken(at)


@dataclass(frozen=True, slots=True)
class _Moment:
    """One snapshot at one moment."""

    now: float
    since_s: float
    snapshot: WorldSnapshot
    policy: WorldPolicy
    change: WorldChange

    @property
    def epoch(self) -> int:
        """The epoch after the present one: above all that ranks have ever obeyed.

        A restored store may have an earlier one.
        """
        seen = (one.epoch for one in self.snapshot.reports.values())
        return max(self.change.epoch, *seen, 0) + 1

    @property
    def number(self) -> int:
        """A number for a world that no rank was ever asked to form."""
        tried = (max(one.number, one.formed, one.failed) for one in self.snapshot.reports.values())
        return max(self.change.number, self.snapshot.world, *tried, 0) + 1

    def report(self, member: str) -> WorldReport:
        """Return the report of ``member``; an empty one if there is none."""
        return self.snapshot.reports.get(member) or WorldReport(member)

    def is_over(self, limit_s: float) -> bool:
        """Return whether the present change has lasted for ``limit_s``."""
        return self.now >= self.since_s + limit_s

    def waits(self, reason: str, limit_s: float = math.inf) -> WorldDecision:
        """Decide to wait, at most until the change has lasted for ``limit_s``."""
        return WorldDecision("keep", reason, wake_at_s=self.since_s + limit_s)

    def becomes(self, action: WorldAction, reason: str, **fields: object) -> WorldDecision:
        """Decide on a change that differs from the present one by ``fields``."""
        change = replace(self.change, epoch=self.epoch, reason=reason, **fields)  # type: ignore[arg-type]
        return WorldDecision(action, reason, change)

    def fall_back(self, why: str, *, whole: bool = True) -> WorldDecision:
        """Decide that changes of this round need a restart."""
        decision = self.becomes("fall back", why, phase="fall-back", seats=(), sizes=(), source="")
        return replace(decision, whole=whole)

    def breaks(self, why: str) -> WorldDecision:
        """Decide that the present group is given up; a form that fails counts as an attempt."""
        failed = self.change.attempts + (self.change.phase == "form")
        if failed >= self.policy.tries:
            return self.fall_back(f"{failed} attempts failed, the last as {why}", whole=False)
        return self.becomes("break", why, phase="broken", attempts=failed, step=None)

    def forms(self, base: Iterable[str], step: int, why: str) -> WorldDecision:
        """Decide that ``base``, and the newcomers for whom there is room, form the next world."""
        stay = tuple(base)
        source = next(name for name in stay if self.report(name).step == step)
        room = self.snapshot.sizes.largest(len(stay) + len(self.comers))
        seats = (*stay, *self.comers[: max(0, room - len(stay))])
        sizes = tuple(self.report(name).ranks for name in seats)
        return self.becomes(
            "form",
            why,
            phase="form",
            number=self.number,
            step=step,
            seats=seats,
            sizes=sizes,
            source=source,
            holder=self.report(source).holder,
        )

    @property
    def comers(self) -> tuple[str, ...]:
        """The newcomers that wait to be taken in."""
        gone = self.snapshot.lost | self.snapshot.leaving
        known = (self.report(name) for name in self.snapshot.newcomers if name not in gone)
        return tuple(one.member for one in known if one.ready and not one.over and knows(one.torch))

    @property
    def leavers(self) -> tuple[str, ...]:
        """The members of the present world that leave."""
        return tuple(one for one in self.snapshot.members if one in self.snapshot.leaving)

    @property
    def stays(self) -> tuple[str, ...]:
        """The members of the present world that neither leave nor are lost."""
        gone = self.snapshot.lost | self.snapshot.leaving
        return tuple(one for one in self.snapshot.members if one not in gone)

    def harm(self, members: Iterable[str], number: int) -> str:
        """Say what has befallen the group ``number`` of ``members``; empty for nothing."""
        names = tuple(members)
        lost = [one for one in names if one in self.snapshot.lost]
        if lost:
            return f"{_named(lost)} is lost"
        broken = [one for one in names if number and self.report(one).broken == number]
        if broken:
            return f"a collective failed in {_named(broken)}"
        for one in names:
            if number and self.report(one).failed == number:
                return f"{one} could not form it: {self.report(one).why}"
        return ""


def knows(torch: str) -> bool:
    """Return whether ``torch`` is a release that a test has run."""
    return any(torch == one or torch.startswith(f"{one}.") for one in KNOWN_TORCH)


def _of(snapshot: WorldSnapshot, members: Iterable[str]) -> list[WorldReport]:
    return [snapshot.reports[one] for one in members if one in snapshot.reports]


def _named(members: Iterable[str]) -> str:
    return ", ".join(list(members)[:3])


def _first(at: _Moment) -> WorldDecision:
    """Decide on the first world of a round, whose workers torchrun has just started."""
    snapshot = at.snapshot
    reports = [one for one in _of(snapshot, snapshot.members) if one.ranks]
    if not reports:
        return WorldDecision("keep", "no rank takes part in changes in place")
    if plain := [one for one in snapshot.members if at.report(one).plain]:
        return at.fall_back(f"the ranks of {_named(plain)} take no part in changes in place")
    if snapshot.older:
        return at.fall_back(_OLDER.format(_named(sorted(snapshot.older))))
    if unknown := [one for one in reports if not knows(one.torch)]:
        release = unknown[0].torch or "an unknown release"
        return at.fall_back(f"torch {release} of {unknown[0].member} is in no table")
    if snapshot.lost.intersection(snapshot.members) or snapshot.reforms or at.leavers:
        return WorldDecision("keep", "it is about to form again")
    missing = [one for one in snapshot.members if not at.report(one).ready]
    if missing:
        if at.is_over(at.policy.start_s):
            return at.fall_back(f"the ranks of {_named(missing)} did not come")
        return at.waits(f"waiting for the ranks of {_named(missing)}", at.policy.start_s)
    step = max(at.report(one).step for one in snapshot.members)
    if step < 0:
        return at.fall_back("no rank holds a whole state", whole=False)
    return at.forms(snapshot.members, step, "all ranks have started")


def _train(at: _Moment) -> WorldDecision:
    snapshot = at.snapshot
    if why := at.harm(snapshot.members, snapshot.world):
        return at.breaks(why)
    if snapshot.reforms:
        return at.fall_back(snapshot.reforms)
    if snapshot.older:
        return at.fall_back(_OLDER.format(_named(sorted(snapshot.older))))
    if not at.leavers and not _has_room(at):
        return WorldDecision("keep", "no pod comes or leaves")
    if at.leavers and not _may_let_go(at):
        return at.fall_back(f"{_named(at.leavers)} may not leave without a save: too few stay")
    return at.becomes(
        "hold", _purpose(at), phase="hold", step=None, seats=(), sizes=(), source="", attempts=0
    )


def _has_room(at: _Moment) -> bool:
    stay = len(at.stays)
    return bool(at.comers) and at.snapshot.sizes.largest(stay + len(at.comers)) > stay


def _may_let_go(at: _Moment) -> bool:
    """Return whether the leavers may go without a save: enough others hold their state."""
    together = len(at.stays) + len(at.comers)
    return 0 < len(at.stays) <= at.snapshot.sizes.largest(together)


def _purpose(at: _Moment) -> str:
    parts = []
    if at.leavers:
        parts.append(f"{_named(at.leavers)} leaves")
    if _has_room(at):
        parts.append(f"{_named(at.comers)} joins")
    return " and ".join(parts)


def _hold(at: _Moment) -> WorldDecision:
    snapshot, change, policy = at.snapshot, at.change, at.policy
    if why := at.harm(snapshot.members, snapshot.world):
        return at.breaks(why)
    if snapshot.reforms:
        return at.fall_back(snapshot.reforms)
    if not at.leavers and not _has_room(at):
        return at.becomes("release", "no pod comes or leaves any more", phase="train", step=None)
    if at.leavers and not _may_let_go(at):
        return at.fall_back(f"{_named(at.leavers)} may not leave without a save: too few stay")
    reports = [at.report(one) for one in snapshot.members]
    if change.step is None:
        missing = [one.member for one in reports if one.voted != change.epoch or one.vote is None]
        if not missing:
            step = max(one.vote for one in reports if one.vote is not None)
            return at.becomes("commit", f"all stop at step {step}", step=step)
        limit_s = policy.hold_s
    else:
        stop = (change.epoch, change.step)
        missing = [one.member for one in reports if (one.held, one.step) != stop]
        if not missing:
            return at.forms(at.stays, change.step, _purpose(at))
        limit_s = policy.stop_s
    if at.is_over(limit_s):
        return at.fall_back(f"{_named(missing)} did not stop within {limit_s:.0f} s")
    return at.waits(f"waiting for {_named(missing)} to stop", limit_s)


def _form(at: _Moment) -> WorldDecision:
    change = at.change
    missing = [one for one in change.seats if at.report(one).formed != change.number]
    if why := at.harm(change.seats, change.number):
        return at.breaks(why)
    if not missing:
        return at.becomes("formed", f"world {change.number} has formed", phase="train")
    if at.is_over(at.policy.form_s):
        return at.breaks(f"{_named(missing)} did not form it in {at.policy.form_s:.0f} s")
    return at.waits(f"waiting for {_named(missing)} to form it", at.policy.form_s)


def _broken(at: _Moment) -> WorldDecision:
    """Decide who goes on, once all that are left have reported their step."""
    snapshot, change = at.snapshot, at.change
    stays = at.stays
    waiting = [one for one in stays if at.report(one).epoch < change.epoch]
    if not snapshot.sizes.largest(len(stays) + len(at.comers)):
        return at.fall_back(f"{len(stays)} are left, too few for a world", whole=False)
    if waiting:
        if at.is_over(at.policy.form_s):
            return at.fall_back(f"{_named(waiting)} did not answer", whole=False)
        return at.waits(f"waiting for {_named(waiting)}", at.policy.form_s)
    step = max((at.report(one).step for one in stays), default=-1)
    if step < 0:
        return at.fall_back("no rank holds a whole state", whole=False)
    return at.forms(stays, step, change.reason)
