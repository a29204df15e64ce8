# SPDX-License-Identifier: Apache-2.0
"""The decision on when a round is complete, must end, or is over: pure, the same in every sidecar.

Agents never decide. A sidecar that sees a condition met writes it on the round key, under a compare
on everything that the decision depends on; a sidecar that loses the race sees the winner's result.
torch alone always waits for its whole last call, because it cannot know which nodes are coming:
here the membership shows that, so a round completes as soon as all that are coming have come. Only
a job whose worlds fail before their first step waits longer each time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from launcher_shim.c10d.rounds.inputs import RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.observations import GONE, RoundObservations, Standings, noted, stand
from launcher_shim.c10d.rounds.records import LOST, Node, Round
from launcher_shim.c10d.rounds.world import Reform, choose_nodes, in_rank_order
from rdzv.dataclass import dataclass
from rdzv.records.policy import JobPolicy
from rdzv.records.quarantine import DOUBLINGS_MAX, TERMS

FREE_STARTS = 3
"""Number of failed starts in a row before the first wait. Fewer: what a second try mends waits,
too. More: more starts in vain, and more lines in each log."""

FIRST_S = 20.0
"""The first wait; each is twice as long as the one before, until a world forms without one."""

LONGEST_S = 300.0
"""Upper bound of the wait. Longer than this, a torchrun whose join has a time-out (600 s unless
``--rdzv-conf`` says otherwise) could give up. Shorter: more starts in vain."""


@dataclass(frozen=True, slots=True)
class BackOff:
    """A wait since the round was opened, and ``why``, the end of a sentence; 0.0 for none.

    ``alike``: whether all have failed with one error. ``member``: whose sidecar writes it to the
    history.
    """

    wait_s: float = 0.0
    why: str = ""
    alike: bool = False
    member: str = ""

    @property
    def reason(self) -> str:
        """The wait in one sentence; empty for none."""
        return f"waits {self.wait_s:g} s {self.why}" if self.why else ""

    def left(self, left_s: float) -> str:
        """Say it with the time that is left of it."""
        return f"waits {self.wait_s:g} s ({left_s:.0f} s left) {self.why}"


NO_WAIT = BackOff()


def failed_starts(now: float, current: Round, observations: RoundObservations) -> int:
    """Return how many worlds in a row have failed before their first step, once this one is over.

    It is 0 if nobody here saw how long the world lasted: a try too many costs little.
    """
    if current.progress == "steps" or current.finishing or not observations.saw_it_form:
        return 0
    if current.ends and not current.ends.startswith(LOST):
        return current.failed_starts
    lasted_s = min(now, observations.ending_since_s) - observations.formed_s
    if current.progress != "loads" and lasted_s >= max(TERMS.brief_s, current.start_s):
        return 0
    return current.failed_starts + 1


def back_off(snapshot: RunSnapshot, chosen: Sequence[Node], policy: JobPolicy) -> BackOff:
    """Decide how long the next world, which ``chosen`` would form, waits.

    A node that is new in it, and a change of the job's record, end the wait.

    A world that all its nodes leave by a failure forms again within seconds. Where a script
    cannot start at all, that repeats for ever, and hides its own cause. So after a few worlds
    in a row that failed before their first step, the next one waits, each time for longer.
    There is no wait if a world without the nodes that failed can form; the quarantine decides
    that. Failures in a row are counted in the round key, by the sidecar that opens the next round.
    """
    current, members = snapshot.round, snapshot.membership
    failures = [members.failed[node.member] for node in chosen if node.member in members.failed]
    if current.failed_starts < FREE_STARTS or not failures or any(map(_is_new, chosen)):
        return NO_WAIT
    if members.job_revision > current.mod_revision or _can_do_without(snapshot, chosen, policy):
        return NO_WAIT
    wait_s = min(LONGEST_S, FIRST_S * 2.0 ** min(current.waits, DOUBLINGS_MAX))
    newest = max(failures, key=lambda one: (one.round, -one.mod_revision))
    row = f"{current.failed_starts} worlds in a row failed before a step was reported"
    what = f"{row}, the last by {newest.member}"
    alike = len(failures) == len(chosen) and len({(one.kind, one.where) for one in failures}) == 1
    if alike:
        what = f"all failed alike before a step was reported, {current.failed_starts} times"
    return BackOff(
        wait_s,
        f"before round {current.shown}: {what}: {newest.brief_error};"
        " a new pod or muster resume ends the wait",
        alike,
        newest.member,
    )


def _is_new(node: Node) -> bool:
    """Return whether the node's pod has been in no world yet."""
    return node.ask == 1


def _can_do_without(snapshot: RunSnapshot, chosen: Sequence[Node], policy: JobPolicy) -> bool:
    """Return whether a world without the nodes that failed can form, or is about to."""
    members, former = snapshot.membership, frozenset(snapshot.round.former)
    if members.quarantined & former.difference(node.member for node in chosen):
        return True
    coming = [one.member for one in snapshot.nodes.values() if one.left_reason == "exit"]
    there = former.union(coming, (one.member for one in snapshot.asking())) - members.quarantined
    sound = [one for one in there if members.may_join(one) and one not in members.failed]
    return policy.largest(len(sound)) > 0


NO_REFORM = Reform()


@dataclass(frozen=True, slots=True)
class RoundDecision:
    """The decision on a round."""

    round: Round | None
    """The round to write; None to leave it as it is."""
    reason: str
    """One sentence."""
    wake_at_s: float = math.inf
    """The time at which the decision may change by time alone."""
    wait: BackOff = NO_WAIT
    """The wait for which it leaves the round open, if worlds fail before a step."""


def decide(
    now: float,
    snapshot: RunSnapshot,
    observations: RoundObservations,
    policy: RoundPolicy,
    reforms: Reform = NO_REFORM,
) -> RoundDecision:
    """Decide whether to complete, end or keep the round."""
    current = snapshot.round
    if current.closed == "success":
        return RoundDecision(None, "the run is closed by success")
    if current.complete:
        over = _over(now, snapshot, observations, policy, reforms)
        seen = observations
        news = noted(now, current, seen.ranks, seen.formed_s, saw_it_form=seen.saw_it_form)
        return over if over.round is not None else replace(over, round=news)
    return _complete(now, snapshot, observations, policy)


def next_round(current: Round) -> Round:
    """Open the round after ``current``."""
    former = tuple(seat.member for seat in current.frozen)
    return Round(
        current.number + 1,
        former=former,
        mod_revision=current.mod_revision,
        progress="mute" if current.progress == "mute" else "",
        start_s=current.start_s,
    )


def why_it_ends(snapshot: RunSnapshot, standings: Standings, reforms: Reform) -> str:
    """Return why to write that the present world must form again; empty if it trains on, or ends.

    All leave it once that is written, and not before: somebody can write the next round then.
    """
    current, membership = snapshot.round, snapshot.membership
    if not current.complete or current.closed or current.ends:
        return ""
    granted = any(seat.member in membership.granted for seat in current.frozen)
    if current.world and not (current.finishing or membership.ends_round or granted):
        # Losses, leaves and joins change it in place, or it falls back. A save that had begun
        # before it formed is seen through.
        return ""
    if lost := [member for member in standings.lost if member not in membership.saved]:
        others = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        return f"{LOST}{', '.join(lost[:3])}{others}"
    if current.finishing:
        return ""
    if membership.ends_round or granted:
        return "a leave, a join or a pause was granted"
    # The whole world lets a newcomer in at once. Nodes that left for a newcomer, while others are
    # reconnecting after a cut, would meet those only in yet another round.
    if "missing" in standings.of.values() or membership.joins_wait:
        return ""
    return reforms.reason if reforms.cause else ""


def _over(
    now: float,
    snapshot: RunSnapshot,
    observations: RoundObservations,
    policy: RoundPolicy,
    reforms: Reform,
) -> RoundDecision:
    current = snapshot.round
    standings = stand(now, snapshot, observations, policy)
    failed = bool(current.closed)
    # A granted member stands still until SIGTERM and is shown no waiter, so the others must not
    # wait for it to leave. While the run may end well, nodes in the exit barrier are not disturbed.
    ends_well = current.finishing and not current.is_ending
    granted = frozenset[str]() if ends_well else snapshot.membership.granted
    # A finished node stays in the barrier, as in plain torch, until the others suffice to go on.
    least = policy.smallest
    enough = current.is_ending and len(snapshot.candidates(least)) >= least
    # A world that has failed is not kept for nodes that may return to it.
    gone = GONE | {"missing"} if failed else GONE
    staying = [
        seat
        for seat, standing in standings.of.items()
        if standing not in gone
        and seat.member not in granted
        and not (enough and standing == "here" and snapshot.nodes[seat.member].finished)
    ]
    if failed and not staying and not snapshot.anybody_asks():
        # The run's result stays on record until a torchrun asks again. After a restore, the asking
        # record may be of a torchrun that is gone: it expires with its lease, long before this.
        due_s = observations.round_since_s + policy.orphan_hold_s
        if not snapshot.left_out_ask() or now < due_s:
            reason = f"round {current.shown} is closed by failure, and no node asks"
            wake_at_s = due_s if snapshot.left_out_ask() else math.inf
            return RoundDecision(None, reason, wake_at_s)
    if not staying:
        row = failed_starts(now, current, observations)
        return RoundDecision(
            replace(next_round(current), failed_starts=row, waits=current.waits if row else 0),
            f"round {current.shown} is over: all {len(current.frozen)} nodes have left it",
        )
    if why := why_it_ends(snapshot, standings, reforms):
        ended = replace(current, ends=why)
        return RoundDecision(ended, f"round {current.shown} must form again: {why}")
    return RoundDecision(
        None,
        f"round {current.shown} goes on with {len(staying)} of {len(current.frozen)} nodes",
        standings.wake_at_s,
    )


def _complete(
    now: float, snapshot: RunSnapshot, observations: RoundObservations, policy: RoundPolicy
) -> RoundDecision:
    current = snapshot.round
    asking, chosen = snapshot.candidates(policy.smallest), would_form(snapshot, policy)
    ask = "node asks" if len(asking) == 1 else "nodes ask"
    here = f"round {current.shown}: {len(asking)} {ask}"
    if policy.paused:
        return RoundDecision(None, f"{here}, and the job is paused")
    if not chosen:
        return RoundDecision(None, f"{here}, {policy.smallest} are needed")
    if (until_s := _worlds_return_until_s(current, observations, policy)) > now:
        return RoundDecision(
            None, f"{here}, waiting for a world that a restored store may have lost", until_s
        )
    wait = back_off(snapshot, chosen, policy)
    if (until_s := observations.round_since_s + wait.wait_s) > now:
        return RoundDecision(None, wait.reason, until_s, wait)

    freeze = partial(_freeze, snapshot, chosen, waits=current.waits + 1 if wait.wait_s else 0)
    met_min_s = now if observations.met_min_s is None else observations.met_min_s
    awaited = _awaited(now, snapshot, observations, policy, met_min_s)
    if policy.largest(len(asking) + len(awaited)) == len(chosen):
        # No awaited node makes a larger world: wait only for those with a better claim.
        awaited = _holders(awaited, snapshot, chosen)
    if len(chosen) == policy.full:
        if not awaited:
            return RoundDecision(freeze(), f"{here}, which is the maximum: complete")
    elif policy.desired is not None and len(asking) < policy.desired:
        patience_s = policy.first_call_s if current.is_first else policy.last_call_s
        awaited[f"{policy.desired} desired nodes"] = met_min_s + patience_s
    pending = {name: until for name, until in awaited.items() if until > now}
    if pending:
        return RoundDecision(
            None, f"{here}, waiting for {', '.join(sorted(pending))}", min(pending.values())
        )
    if awaited:
        return RoundDecision(freeze(), f"{here}, the last call is over: complete")
    return RoundDecision(freeze(), f"{here}, no other node is expected: complete")


def would_form(snapshot: RunSnapshot, policy: JobPolicy) -> list[Node]:
    """Return the nodes that form the world if no other one comes; none if they are too few."""
    asking = snapshot.candidates(policy.smallest)
    return _chosen(snapshot, asking, policy.largest(len(asking)))


def _chosen(snapshot: RunSnapshot, asking: Sequence[Node], size: int) -> list[Node]:
    members = snapshot.membership
    return choose_nodes(asking, size, snapshot.round.former, members.quarantined, members.blocks)


def _freeze(snapshot: RunSnapshot, chosen: Sequence[Node], *, waits: int) -> Round:
    """Complete the round with ``chosen`` in the order of their ranks."""
    current, locations = snapshot.round, snapshot.membership.locations
    frozen = tuple(node.seat for node in in_rank_order(chosen, current.former, locations))
    return replace(current, complete=True, frozen=frozen, former=(), waits=waits)


def _worlds_return_until_s(
    current: Round, observations: RoundObservations, policy: RoundPolicy
) -> float:
    """Return until when a world that a restored store has lost may return.

    A pod that has just come cannot tell that the store was restored, be it to a past round or to an
    earlier generation. Nodes that have trained all along return as soon as they see it. Before the
    first world a restored store looks like a new one, and no job starts later for that.
    """
    return observations.life_since_s + policy.life_s if current.number > 0 else -math.inf


def _holders(
    awaited: Mapping[str, float], snapshot: RunSnapshot, chosen: Sequence[Node]
) -> dict[str, float]:
    """Return those of ``awaited`` that would have the place of one of ``chosen``.

    There is a node for every place. Only a torchrun that trained in the world before, and is on its
    way into this one, has a better claim; one that has ended, or never connected, has none. Of a
    world that becomes smaller, all have trained: those that may stay go by ``choose``.
    """
    former = frozenset(snapshot.round.former)
    coming = [
        node
        for member in awaited
        if member in former
        and (node := snapshot.nodes.get(member)) is not None
        and (node.state == "in" or node.left_reason == "exit")
    ]
    if not coming:
        return {}
    claims = snapshot.in_order_of_claims([*snapshot.asking(), *coming])
    seated = {node.member for node in _chosen(snapshot, claims, len(chosen))}
    return {node.member: awaited[node.member] for node in coming if node.member in seated}


def _awaited(
    now: float,
    snapshot: RunSnapshot,
    observations: RoundObservations,
    policy: RoundPolicy,
    met_min_s: float,
) -> dict[str, float]:
    """Return the listed members that may still come, and until when to wait for each."""
    current = snapshot.round
    awaited: dict[str, float] = {}
    for member in snapshot.membership.listed:
        node = snapshot.nodes.get(member)
        asks = node is not None and node.state == "asking"
        if asks or not snapshot.membership.may_join(member):
            continue
        if member in snapshot.membership.quarantined:
            continue
        # A torchrun that was here before comes back within moments or not at all; one that has
        # never connected may still be pulling its image or importing torch.
        if node is None:
            since_s = observations.absent_s.get(member, met_min_s)
            if current.is_first:
                # Images are pulled while sidecars wait: the first call begins once a world could
                # form.
                since_s = max(since_s, met_min_s)
            awaited[member] = since_s + policy.first_call_s
        else:
            since_s = observations.left_s.get(node.seat, met_min_s)
            if node.left_reason == "exit":
                # It left the former round to ask for this one, and could not ask before this one
                # was open.
                since_s = max(since_s, observations.round_since_s)
            awaited[member] = since_s + policy.last_call_s
    return awaited
