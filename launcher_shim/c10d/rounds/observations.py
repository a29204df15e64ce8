# SPDX-License-Identifier: Apache-2.0
"""One sidecar's observations of a run over time, and the nodes that are gone according to them.

A delete event alone cannot tell a death from a cut to the store. So a node whose key vanished is
gone only once it has stayed away on a healthy watch, and once another node of its world shows that
the store can be reached. Nothing here is shared between sidecars: each counts for itself, and what
it concludes counts once it is written, by compare on all nodes, so that a return that it has not
read yet is no absence.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import field, replace
from typing import Literal

from launcher_shim.c10d.rounds.inputs import RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.records import Round, Seat
from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.peers import VETO_S, Suspicion
from rdzv.store import WatchEvent

START_MAX_S = 600.0
"""The longest start that newcomers wait for, in seconds. Shorter: a world that takes longer makes
no step while nodes keep coming. Longer: newcomers idle beside ranks that never report a step."""

NO_STEP = -1
"""The step of ranks that have come to no boundary yet."""


@dataclass(frozen=True, slots=True)
class RanksSeen:
    """Reports of the ranks of this pod in one round; times are monotonic, in seconds."""

    round: int
    step: int = NO_STEP
    """Their newest boundary."""
    began_s: float = math.inf
    """The time at which the first boundary was seen."""
    stepped_s: float = -math.inf
    """The time at which the newest one was first seen."""

    def at(self, now: float, number: int, step: int) -> RanksSeen:
        """Return what is known once they have reported ``step`` in round ``number``."""
        before = self if self.round == number else RanksSeen(number)
        if step == before.step:
            return before
        return replace(before, step=step, began_s=min(before.began_s, now), stepped_s=now)


def noted(
    now: float, current: Round, ranks: RanksSeen | None, formed_s: float, *, saw_it_form: bool
) -> Round | None:
    """Return the round with what the ranks of rank 0's pod report; None if that is no news.

    ``formed_s``: the time since which the round is known to be complete. ``saw_it_form``: whether
    it became complete then.
    """
    if not current.complete or current.is_ending:
        return None
    if ranks is None or ranks.round != current.number:
        return None
    if ranks.step > NO_STEP:
        took_s = min(ranks.began_s - formed_s, START_MAX_S) if saw_it_form else current.start_s
        begun = replace(current, progress="steps", start_s=round(max(took_s, 0.0), 1))
        return None if current.progress == "steps" else begun
    if not current.progress:
        return replace(current, progress="loads")
    if current.progress == "loads" and now >= formed_s + START_MAX_S:
        # Its start has taken at least that long, if its ranks ever report: so may the next one.
        return replace(current, progress="mute", start_s=START_MAX_S)
    return None


def joins_from_s(current: Round, formed_s: float) -> float:
    """Return the time from which this complete round may end for newcomers."""
    if current.progress == "steps":
        return formed_s
    return formed_s + (START_MAX_S if current.progress == "loads" else current.start_s)


CLOCK_SLACK_S = 0.1

Standing = Literal["here", "missing", "left", "replaced", "lapsed", "hung", "done"]
"""The standing of a frozen node. ``missing``: its key is away, but not for long enough to count as
gone. ``hung``: its world must form again, and it has not left for too long."""

LOST: frozenset[Standing] = frozenset({"left", "replaced", "lapsed", "hung"})
GONE: frozenset[Standing] = LOST | {"done"}


@dataclass(frozen=True, slots=True)
class RoundObservations:
    """One sidecar's observations of a run. Times are of its monotonic clock, in seconds."""

    healthy_since_s: float = math.inf
    """Start of the time in which the watch has worked without a gap."""
    return_until_s: float = -math.inf
    """End of the time in which nodes that were cut off with this sidecar may be reconnecting."""
    missing_s: Mapping[Seat, float] = field(default_factory=dict)
    """Time since which the key of a frozen node is away."""
    absent_s: Mapping[str, float] = field(default_factory=dict)
    """Time since which a listed member has no node."""
    asked_s: Mapping[Seat, float] = field(default_factory=dict)
    """Time since which a node that is not in the present world asks."""
    round_number: int = -1
    """The round that was current at the last snapshot."""
    round_since_s: float = -math.inf
    """Time since which it has been the current round."""
    ending_since_s: float = math.inf
    """Time since which its world must form again."""
    formed_s: float = -math.inf
    """Time since which it is known to be complete."""
    saw_it_form: bool = False
    """Whether it became complete then, and not before this sidecar came."""
    ranks: RanksSeen | None = None
    """Reports of the ranks of rank 0's pod, in the sidecar of that pod; None in all others."""
    met_min_s: float | None = None
    """Time since which at least ``min`` nodes have been asking in it; None while fewer do."""
    left_s: Mapping[Seat, float] = field(default_factory=dict)
    """Time since which a node is off the run and has not asked again."""
    life_since_s: float = -math.inf
    """Time since which this sidecar has been in the present generation."""
    gather_since_s: float | None = None
    """Time since which nodes wait that would make the present world larger; None: none do."""
    newest_s: float = -math.inf
    """Time at which the last node came that may join: its torchrun asked, or its member was
    listed."""
    done: frozenset[Seat] = frozenset()
    """Nodes of this round that have finished. If such a node or its pod ends, or another torchrun
    connects in its place, nothing is lost."""


def observe(
    now: float,
    previous: RoundObservations,
    snapshot: RunSnapshot,
    policy: RoundPolicy,
    *,
    healthy_s: float,
    cut_off: bool,
    ranks: RanksSeen | None = None,
) -> RoundObservations:
    """Add one snapshot to the observations.

    ``healthy_s``: for how long the watch has worked without a gap (0 while it does not).
    ``cut_off``: whether this sidecar's own key is or was away, or the store was restored, or takes
    no writes. After a cut, or a gap in the watch, other nodes may have been cut off as well, so an
    absent key proves nothing until they have had time to return. The same holds if the first node
    returns of a world that had vanished as a whole, and for what a sidecar misses at its start.
    ``ranks``: as in ``RoundObservations``.
    """
    missing = {
        seat: previous.missing_s.get(seat, now)
        for seat in snapshot.round.frozen
        if seat.member not in snapshot.nodes
    }
    same_round = snapshot.round.number == previous.round_number
    of_round = previous if same_round else None
    world = frozenset(snapshot.round.frozen)
    all_away = bool(world) and (world == missing.keys() or world <= previous.missing_s.keys())
    # What a sidecar that has just come does not find may have been cut off before it came.
    came = previous.round_number < 0 and math.isinf(previous.healthy_since_s)
    formed_s, saw_it_form = _formed(now, previous, snapshot)
    ending_since_s = math.inf
    if snapshot.round.is_ending:
        ending_since_s = min(previous.ending_since_s, now) if same_round else now
    healthy_since_s = now - healthy_s if healthy_s > 0 else math.inf
    absent = {
        member: previous.absent_s.get(member, now)
        for member in snapshot.membership.listed
        if member not in snapshot.nodes
    }
    asked = {node.seat: previous.asked_s.get(node.seat, now) for node in snapshot.newcomers()}
    return RoundObservations(
        healthy_since_s=healthy_since_s,
        return_until_s=_return_until(
            now,
            previous,
            policy,
            healthy_since_s,
            cut_off=cut_off or all_away or (came and bool(missing)),
        ),
        missing_s=missing,
        absent_s=absent,
        asked_s=asked,
        round_number=snapshot.round.number,
        round_since_s=previous.round_since_s if same_round else now,
        ending_since_s=ending_since_s,
        formed_s=formed_s,
        saw_it_form=saw_it_form,
        ranks=ranks,
        met_min_s=_met_min_s(now, of_round, snapshot, policy),
        left_s={
            node.seat: previous.left_s.get(node.seat, now)
            for node in snapshot.nodes.values()
            if node.state == "left"
        },
        life_since_s=previous.life_since_s,
        gather_since_s=_gather_since_s(now, of_round, snapshot, policy, len(asked)),
        newest_s=max((*asked.values(), *absent.values()), default=-math.inf),
        done=_done(snapshot) | (previous.done if same_round else frozenset()),
    )


def _formed(now: float, previous: RoundObservations, snapshot: RunSnapshot) -> tuple[float, bool]:
    """Return when the round has formed, and whether this sidecar saw it."""
    same_round = snapshot.round.number == previous.round_number
    if not snapshot.round.complete:
        return -math.inf, previous.saw_it_form
    if not same_round or previous.formed_s == -math.inf:
        return now, previous.round_number >= 0
    return previous.formed_s, previous.saw_it_form


def _met_min_s(
    now: float, of_round: RoundObservations | None, snapshot: RunSnapshot, policy: RoundPolicy
) -> float | None:
    """Return since when enough nodes ask; ``of_round``: what was seen of this round before."""
    if snapshot.round.complete or len(snapshot.asking()) < policy.smallest:
        return None
    return now if of_round is None or of_round.met_min_s is None else of_round.met_min_s


def _gather_since_s(
    now: float,
    of_round: RoundObservations | None,
    snapshot: RunSnapshot,
    policy: RoundPolicy,
    newcomers: int,
) -> float | None:
    """Return since when newcomers are gathered; ``of_round``: as for ``_met_min_s``."""
    here = len(snapshot.round.frozen)
    if not snapshot.round.complete or policy.largest(here + newcomers) <= here:
        return None
    return now if of_round is None or of_round.gather_since_s is None else of_round.gather_since_s


def _done(snapshot: RunSnapshot) -> frozenset[Seat]:
    if not snapshot.round.finishing:
        return frozenset()
    frozen = frozenset(snapshot.round.frozen)
    return snapshot.done | frozenset(
        node.seat
        for node in snapshot.nodes.values()
        if (node.finished or node.left_reason == "done") and node.seat in frozen
    )


def _return_until(
    now: float,
    previous: RoundObservations,
    policy: RoundPolicy,
    healthy_since_s: float,
    *,
    cut_off: bool,
) -> float:
    was_healthy = math.isfinite(previous.healthy_since_s)
    gap = was_healthy and healthy_since_s > previous.healthy_since_s + CLOCK_SLACK_S
    back = not was_healthy and math.isfinite(previous.return_until_s)
    if cut_off or gap or back:
        return now + policy.return_s
    return previous.return_until_s


@dataclass(frozen=True, slots=True)
class Standings:
    """The standing of each frozen node."""

    of: Mapping[Seat, Standing]
    wake_at_s: float = math.inf
    """The time at which a standing may change by time alone."""
    is_last: bool = False
    """Whether it is finishing, and too few would be left for another one: finished nodes ask for
    none. A node whose sidecar is away is not lost then: its last work would be cut off in vain."""

    @property
    def lost(self) -> list[str]:
        """The members whose nodes had not finished and are gone: the world must form again."""
        lost = LOST - {"lapsed"} if self.is_last else LOST
        return [seat.member for seat, standing in self.of.items() if standing in lost]


def stand(
    now: float, snapshot: RunSnapshot, observations: RoundObservations, policy: RoundPolicy
) -> Standings:
    """Decide on the standing of each frozen node of the present round."""
    of: dict[Seat, Standing] = {}
    hung_at_s = max(observations.ending_since_s, observations.healthy_since_s) + policy.leave_s
    for seat in snapshot.round.frozen:
        node = snapshot.nodes.get(seat.member)
        if seat in observations.done and (node is None or node.seat != seat):
            of[seat] = "done"
        elif node is None:
            of[seat] = "missing"
        elif node.seat != seat:
            of[seat] = "replaced"
        elif node.state == "left":
            of[seat] = "done" if node.left_reason == "done" else "left"
        else:
            of[seat] = "here" if node.finished or now < hung_at_s else "hung"
    wake_at_s = hung_at_s if now < hung_at_s else math.inf
    is_last = snapshot.round.finishing and _are_too_few(snapshot, of, policy.smallest)
    missing = [seat for seat, standing in of.items() if standing == "missing"]
    if not missing:
        return Standings(of, wake_at_s, is_last)
    since = {
        seat: max(observations.missing_s.get(seat, now), observations.healthy_since_s)
        for seat in missing
    }
    if any(standing in ("here", "left", "replaced") for standing in of.values()):
        back_s = observations.return_until_s
        finishing = snapshot.round.finishing and _is_anybody_at_work(of, observations.done)
        wait_s = policy.orphan_hold_s if finishing else policy.confirm_s
        due = {seat: max(since[seat] + wait_s, back_s) for seat in missing}
    elif snapshot.asking() or snapshot.left_out_ask():
        # All at once: a cut, not a death, unless no node comes back for very long.
        due = dict.fromkeys(missing, max(since.values()) + policy.orphan_hold_s)
    else:
        return Standings(of, wake_at_s, is_last)
    for seat in missing:
        if now >= due[seat]:
            of[seat] = "lapsed"
    return Standings(of, min([wake_at_s, *(at for at in due.values() if at > now)]), is_last)


def _are_too_few(snapshot: RunSnapshot, of: Mapping[Seat, Standing], least: int) -> bool:
    """Return whether fewer than ``least`` nodes ask for another world, or would after this one."""
    at_work = [
        seat.member
        for seat, standing in of.items()
        if standing == "here" and not snapshot.nodes[seat.member].finished
    ]
    staying = {*at_work} - snapshot.membership.granted
    return len(snapshot.candidates(least)) + len(staying) < least


def _is_anybody_at_work(of: Mapping[Seat, Standing], done: frozenset[Seat]) -> bool:
    """Return whether a node that is here has not finished, in a round that is finishing.

    Those that have finished need no other, and the rest may be about to: their last work, such as
    an upload, is not cut short for one that is cut off. If there is none, nothing is cut short.
    """
    return any(standing == "here" and seat not in done for seat, standing in of.items())


class SilentMembers:
    """Follows the suspicions in the store. Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._since_s: dict[str, tuple[str, float]] = {}

    def note(self, event: WatchEvent, now_s: float) -> None:
        """Take in a change of the store, of whatever key."""
        key = event.kv.key
        if "/suspicions/" not in key:
            return
        before = self._since_s.pop(key, None)
        if event.kind != "put":
            return
        try:
            one = Suspicion.from_kv(event.kv)
        except RecordError:
            return
        # One whose connection is refused is evicted once its world has failed: torch sees that.
        if one.sign == "silent":
            same = before is not None and before[0] == one.member
            self._since_s[key] = before if before and same else (one.member, now_s)

    def evicts_s(self, world: Collection[str]) -> float:
        """Return when the first of ``world`` may be evicted; infinite if none is called silent."""
        since = [at_s for member, at_s in self._since_s.values() if member in world]
        return min(since) + VETO_S if since else math.inf
