# SPDX-License-Identifier: Apache-2.0
"""The drain state machine: when all ranks save the same step, and who may leave or join then.

::

    idle ─▶ hold ─▶ commit(step) ─▶ done ─▶ leaves granted, the new world allowed: the round ends
              └───────┴─▶ void        └─▶ idle, where nobody may be let go or in yet

Any sidecar may carry a decision out, by compare on all that it rests on. "All" is the frozen list
of the round, never who can be reached. What is left of a round that is over is never finished.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rdzv.drain.cursors import DIFFER, agreed, difference, left_to_others
from rdzv.drain.inputs import (
    DrainingSnapshot,
    DrainObservations,
    DrainPolicy,
    LiveRound,
    ReformCause,
)
from rdzv.drain.known_weights import is_known
from rdzv.drain.launcher_save import is_of_launcher, released
from rdzv.listing import Listing
from rdzv.records.commit import Commit, LastCommit, Vote
from rdzv.records.drain import Drain, Outcome
from rdzv.records.job import Job
from rdzv.snapshot import Snapshot

LEAST_COMMIT_S = 1.0
"""Lower bound on the expected duration of a commit. A measurement that began part-way through would
be too short."""


@dataclass(frozen=True, slots=True)
class DrainDecision:
    """The writes of one transaction; there are none if the first three fields are empty."""

    commit: Commit | None = None
    """The commit record to write."""
    last_commit: LastCommit | None = None
    """The last commit to write with it."""
    drains: Mapping[str, Drain] = field(default_factory=dict)
    """Drains that end, with their outcome, by pod UID."""
    reason: str = ""
    """One sentence."""
    wake_at_s: float = math.inf
    """When the decision may change by time alone."""


def decide(
    now: float, snapshot: DrainingSnapshot, observations: DrainObservations, policy: DrainPolicy
) -> DrainDecision:
    """Decide what becomes of the drains and of the commit."""
    if snapshot.membership.job is None:
        return DrainDecision(reason="there is no job yet")
    scene = _Scene(now, snapshot, observations, policy)
    moved = _commit(scene) if scene.round is not None else DrainDecision(reason="no round is live")
    ended = dict(moved.drains)
    moments = [moved.wake_at_s]
    reasons = []
    for uid, drain in sorted(snapshot.membership.drains.items()):
        if drain.outcome or uid in ended:
            continue
        outcome, why = _without_commit(scene, drain)
        if outcome:
            step = scene.commit.step if scene.served(uid) else None
            ended[uid] = replace(drain, outcome=outcome, step=drain.step if drain.saver else step)
            reasons.append(f"{drain.member} may go ({outcome}): {why}")
        else:
            moments.append(scene.due_s(uid))
            if uid == snapshot.pod_uid:
                launcher = is_of_launcher(snapshot.membership, drain)
                moments.append(scene.promised_s if launcher else scene.launched_s)
    if moved.commit is not None or not reasons:
        reasons.insert(0, moved.reason)
    # What is due already waits for something else than time.
    wake_at_s = min((moment for moment in moments if moment > now), default=math.inf)
    return replace(moved, drains=ended, reason="; ".join(reasons), wake_at_s=wake_at_s)


class _Scene:
    """One snapshot at one moment, and what follows from it alone."""

    def __init__(
        self,
        now: float,
        snapshot: DrainingSnapshot,
        observations: DrainObservations,
        policy: DrainPolicy,
    ) -> None:
        rules = snapshot.membership.rules
        assert rules is not None
        self.now = now
        self.snapshot = snapshot
        self.observations = observations
        self.policy = policy
        self.commit = snapshot.commit
        self.round = snapshot.round if snapshot.round and snapshot.round.live else None
        drains = snapshot.membership.drains
        # Whoever has left the round already needs no commit, and cannot give one.
        left = self.round.left if self.round else frozenset()
        self.inside = {
            uid: drain
            for uid, drain in sorted(drains.items())
            if (member := snapshot.member_of(drain)) is not None and member not in left
        }
        self.leavers = {uid: drain for uid, drain in self.inside.items() if not drain.outcome}
        self.concerned = any(snapshot.member_of(drain) is not None for drain in drains.values())
        self.enough = is_enough(snapshot.membership, snapshot.listing) and self._enough_ask(rules)
        paused = rules.paused
        self.may_grant = self.enough or paused or policy.below_min == "commit"
        # Without enough others the next world could not form: a newcomer waits with the leavers.
        self.reforms: ReformCause = ""
        if self.round is not None and (self.enough or paused):
            self.reforms = self.round.reforms

    def _enough_ask(self, rules: Job) -> bool:
        """Whether ``min`` of those who stay train or ask to; a launcher may never come at all."""
        round = self.round
        if round is None:
            return True
        there = (frozenset(round.members) - round.left) | round.asking
        listed = self.snapshot.listing.listed
        return sum(member.name in there for member in listed) >= rules.sizes.smallest

    @property
    def untrained(self) -> bool:
        """Whether no world has formed yet in this generation: nobody is kept for one."""
        round = self.snapshot.round
        return round is None or (round.first and not round.complete)

    @property
    def launched_s(self) -> float:
        """From when on no first command can be on its way to this sidecar's own pod."""
        seen = self.observations
        return -math.inf if seen.own_ran else seen.own_since_s + self.policy.launch_s

    @property
    def promised_s(self) -> float:
        """From when on a launcher waits for no promise to save any more."""
        return self.observations.own_since_s + self.policy.promise_s

    def due_s(self, uid: str) -> float:
        """When the pod's SIGTERM passes at the latest."""
        return self.observations.due_s.get(uid, math.inf)

    def is_due(self, uid: str) -> bool:
        return self.now >= self.due_s(uid)

    def last_chance_s(self, uid: str) -> float:
        """From when on a commit may only just be done before the pod's deadline."""
        return self.due_s(uid) - 2 * max(self.commit.took_s, LEAST_COMMIT_S)

    def outlived(self, uid: str) -> bool:
        """Whether the others finish their save, whatever becomes of the pod: it has saved."""
        commit, round = self.commit, self.snapshot.round
        # A sidecar whose launcher never came may know of no round: there the commit's counts.
        if round is not None and not (round.live and commit.is_of(round.run, round.number)):
            return False
        saved = savers(self.snapshot.membership, self.snapshot.votes, commit.run, commit.round)
        return uid in saved

    @property
    def unhurried_since_s(self) -> float | None:
        """Since when no deadline ends a save any more; None while one still does.

        It is for a join alone, or whoever leaves has saved and is out of time, or gone.
        """
        since_s = self.observations.since_s
        for uid, drain in self.snapshot.membership.drains.items():
            if self.snapshot.member_of(drain) is None:
                continue
            if drain.outcome or (uid in self.leavers and not self.is_due(uid)):
                return None
            if self.is_due(uid):
                since_s = max(since_s, self.due_s(uid))
        return since_s

    def served(self, uid: str) -> bool:
        """Whether the pod's ranks are parked behind a save that all have acknowledged."""
        if self.has_trained_on(uid):
            return False
        return self.commit.phase == "done" and any(
            vote.pod_uid == uid and vote.acked == self.commit.step
            for vote in self.snapshot.votes.values()
        )

    def has_trained_on(self, uid: str) -> bool:
        """Whether the pod was in a later round than that of the commit; it may be over by now."""
        round, drain = self.snapshot.round, self.snapshot.membership.drains[uid]
        if round is None or drain.member not in round.members:
            return False
        if self.commit.is_of(round.run, round.number):
            return False
        return self.snapshot.membership.has_name(drain)

    def trains_elsewhere(self, drain: Drain) -> bool:
        """Whether the ranks of this pod are in another run's round, which counts in its turn."""
        own, round = self.snapshot.own_round, self.snapshot.round
        if own is None or round is None or (own.run, own.number) == (round.run, round.number):
            return False
        return own.live and self.snapshot.membership.has_name(drain)

    def becomes(self, reason: str, **changes: object) -> DrainDecision:
        """Decide on a commit record that differs from the present one."""
        commit = replace(self.commit, reason=reason, **changes)  # type: ignore[arg-type]
        return DrainDecision(commit, reason=reason)


def _without_commit(scene: _Scene, drain: Drain) -> tuple[Outcome, str]:
    """Say how a drain that no commit has let go ends now, or that it does not."""
    snapshot, uid = scene.snapshot, drain.pod_uid
    if scene.outlived(uid):
        return "", ""
    outcome: Outcome = "committed" if scene.served(uid) else "uncommitted"
    if uid in scene.inside:
        assert scene.round is not None
        commit, round = scene.commit, scene.round
        this_round = commit.is_of(round.run, round.number)
        refused = this_round and commit.refused and uid in commit.leaving
        if refused and scene.may_grant and not round.finishing:
            return "uncommitted", commit.reason
    elif uid == snapshot.pod_uid and is_of_launcher(snapshot.membership, drain):
        seen_for_s = scene.now - scene.observations.own_since_s
        outcome, why = released(drain, snapshot.membership, seen_for_s, scene.policy.promise_s)
        if outcome:
            return outcome, why
    elif uid == snapshot.pod_uid and scene.untrained and snapshot.commands is None:
        return "uncommitted", "nothing has been trained yet"
    elif uid == snapshot.pod_uid and scene.may_grant and not snapshot.commands:
        # Only the pod's own sidecar knows whether a launcher's commands run in it.
        if snapshot.commands is None and not scene.trains_elsewhere(drain):
            return outcome, "it takes part in no round"
        # A worker that is on its way here must find somebody: the others would wait for it.
        if snapshot.commands is not None and scene.now >= scene.launched_s:
            return "committed", "no worker runs in it any more"
    if scene.is_due(uid):
        return ("committed" if scene.served(uid) else "expired"), "its deadline is near"
    return "", ""


# --- the commit of a live round ---


def _commit(scene: _Scene) -> DrainDecision:
    commit, round = scene.commit, scene.round
    assert round is not None
    if not commit.is_of(round.run, round.number):
        if commit.mod_revision:
            return _reset(scene, round)
        scene.commit = replace(commit, run=round.run, round=round.number)
    if commit.phase == "hold":
        return _hold(scene, round)
    if commit.phase == "commit":
        return _save(scene, round)
    if commit.phase == "done":
        return _done(scene)
    return _idle(scene, round)


def _reset(scene: _Scene, round: LiveRound) -> DrainDecision:
    commit = Commit(
        epoch=scene.commit.epoch,
        run=round.run,
        round=round.number,
        took_s=scene.commit.took_s,
        reason=f"round {round.number} has begun",
        mod_revision=scene.commit.mod_revision,
    )
    return DrainDecision(commit, reason=commit.reason)


def _idle(scene: _Scene, round: LiveRound) -> DrainDecision:
    """``idle`` or ``void``: whether to hold, for whom, and when."""
    commit = scene.commit
    if round.finishing:
        return DrainDecision(reason=f"round {round.number} is finishing")
    if _ends(scene, round):
        return DrainDecision(reason=f"round {round.number} is about to end")
    if commit.refused:
        asked = commit.joins and bool(scene.reforms)
        asked = asked or any(uid in commit.leaving for uid in scene.leavers)
        if asked and scene.may_grant:
            return DrainDecision(reason=commit.reason)
        # Who comes later asks again: by then all ranks may take part, and have work to lose.
        return scene.becomes(
            "no leave or join without a save is granted any more", phase="idle", refused=False
        )
    waits_s = math.inf
    wanted = bool(scene.reforms)
    for uid in scene.leavers:
        if uid not in commit.saved or scene.may_grant or scene.now >= scene.last_chance_s(uid):
            wanted = True
        else:
            waits_s = min(waits_s, scene.last_chance_s(uid))
    if not wanted:
        why = "no drain or join is pending"
        if scene.leavers:
            why = f"{_names(scene)} may not go yet: too few others are listed"
        return DrainDecision(reason=why, wake_at_s=waits_s)
    if commit.phase == "void" and commit.failures:
        pause_s = scene.policy.pause_s * 2 ** min(commit.failures - 1, 30)
        next_s = scene.observations.since_s + min(pause_s, scene.policy.pause_max_s)
        if scene.now < next_s:
            return DrainDecision(reason="the last attempt failed: backing off", wake_at_s=next_s)
    last = scene.snapshot.membership.last_commit
    epoch = max(commit.epoch, last.epoch if last else 0, scene.snapshot.used_epoch) + 1
    return scene.becomes(
        f"holding the ranks: {_purpose(scene)}",
        epoch=epoch,
        phase="hold",
        step=None,
        leaving=tuple(scene.leavers),
        joins=bool(scene.reforms),
    )


def _hold(scene: _Scene, round: LiveRound) -> DrainDecision:
    votes = _votes(scene, round)
    refusers = [member for member, vote in votes.items() if vote.vote is None]
    if refusers:
        why = f"a rank of {refusers[0]} takes no part in commits"
        if not scene.may_grant:
            return _void(scene, why, failures=scene.commit.failures + 1)
        return _refused(scene, why)
    if round.finishing:
        return _void(scene, f"round {round.number} is finishing")
    if any(scene.is_due(uid) for uid in scene.leavers):
        return _void(scene, "a deadline came before the vote was complete")
    if not _anybody(scene):
        return _void(scene, _NONE_PENDING)
    missing = [member for member in round.members if member not in votes]
    if not missing and votes:
        step = max(vote.vote for vote in votes.values() if vote.vote is not None)
        return scene.becomes(
            f"all save step {step}: {_purpose(scene)}",
            phase="commit",
            step=step,
            leaving=tuple(scene.leavers),
        )
    until_s = scene.observations.since_s + scene.policy.hold_s
    if scene.now >= until_s:
        why = f"{', '.join(missing[:3])} did not vote within {scene.policy.hold_s:.0f} s"
        return _void(scene, why, failures=scene.commit.failures + 1)
    return _with_latecomers(scene, f"{len(missing)} votes are missing", until_s)


def _save(scene: _Scene, round: LiveRound) -> DrainDecision:
    votes, commit = _votes(scene, round), scene.commit
    more = commit.failures + 1
    for member, vote in votes.items():
        if vote.failed.startswith(DIFFER):
            return _differs(scene, vote.failed)
        if vote.failed:
            return _void(scene, f"{member} could not save: {vote.failed}", failures=more)
    saved = {vote.acked for vote in votes.values() if vote.acked is not None}
    if len(saved) > 1:
        return _void(scene, f"different steps were saved: {sorted(saved)}", failures=more)
    missing = [m for m in round.members if m not in votes or votes[m].acked is None]
    if not missing and saved:
        (step,) = saved
        given = [(vote.ranks, member, vote.cursor) for member, vote in votes.items()]
        differ = difference(step, given)
        if differ:
            return _differs(scene, differ)
        if not is_known(step, round, scene.snapshot.ledgers):
            return _unknown(scene, step)
        decision = scene.becomes(
            f"all have saved step {step}{left_to_others(given)}",
            phase="done",
            step=step,
            leaving=tuple(scene.leavers),
            saved=_union(commit.saved, scene.leavers),
            failures=0,
            took_s=scene.now - scene.observations.epoch_since_s,
        )
        last = LastCommit(step, round.number, commit.epoch, cursor=agreed(given))
        return replace(decision, last_commit=last)
    if not _anybody(scene):
        return _void(scene, _NONE_PENDING)
    if round.finishing:
        return _void(scene, f"round {round.number} is finishing")
    since_s = scene.unhurried_since_s
    until_s = math.inf if since_s is None else since_s + scene.policy.save_s
    if scene.now >= until_s:
        if not scene.concerned and any(vote.away for vote in votes.values()):
            return _refused(scene, "the ranks did not come back to a loop that saves")
        return _void(scene, "the save took too long", failures=more)
    return _with_latecomers(scene, f"{len(missing)} members have not saved yet", until_s)


def _done(scene: _Scene) -> DrainDecision:
    commit = scene.commit
    granted = [uid for uid in scene.leavers if scene.may_grant or scene.is_due(uid)]
    if granted or (scene.reforms and not commit.admitted):
        names = ", ".join(scene.leavers[uid].member for uid in granted)
        who = [f"{names} may go"] if granted else []
        who += [_ALLOWED[scene.reforms]] if scene.reforms else []
        decision = scene.becomes(
            " and ".join(who),
            leaving=tuple(scene.leavers),
            saved=_union(commit.saved, scene.leavers),
            granted=_union(commit.granted, granted),
            admitted=commit.admitted or bool(scene.reforms),
        )
        drains = {
            uid: replace(scene.leavers[uid], outcome="committed", step=commit.step)
            for uid in granted
        }
        return replace(decision, drains=drains)
    if commit.granted or commit.admitted:
        return DrainDecision(reason=f"step {commit.step} is saved, the round is about to end")
    chance_s = min((scene.last_chance_s(uid) for uid in scene.leavers), default=math.inf)
    until_s = scene.observations.since_s + scene.policy.done_s
    if not _anybody(scene) or (scene.now >= until_s and scene.now < chance_s):
        kept = f"{_names(scene)} may not go yet: too few others" if scene.leavers else ""
        return scene.becomes(f"{kept or _NONE_PENDING}; training continues", phase="idle")
    waits = f"step {commit.step} is saved; {_names(scene)} may not go yet: too few others"
    return _with_latecomers(scene, waits, until_s)


# --- parts of the above ---


def _void(scene: _Scene, why: str, **changes: object) -> DrainDecision:
    return scene.becomes(why, phase="void", step=None, **changes)


def _refused(scene: _Scene, why: str) -> DrainDecision:
    """Let go and in without a save whom this attempt was for."""
    return _void(scene, why, refused=True, leaving=tuple(scene.leavers), joins=bool(scene.reforms))


def _differs(scene: _Scene, why: str) -> DrainDecision:
    """Void the save; who leaves goes without one where an attempt before it has failed, too.

    What a script gives it gives again, so a leaver would only wait for its deadline. Newcomers
    alone are not let in so: the world would lose the steps since its last save.
    """
    if scene.commit.failures and scene.leavers and scene.may_grant:
        return _refused(scene, why)
    return _void(scene, why, failures=scene.commit.failures + 1)


def _unknown(scene: _Scene, step: int) -> DrainDecision:
    """Void a save that no world could begin from. Another attempt would be of the same world.

    Its ranks are told by their next requests for shards to end, and newcomers come in then.
    """
    why = f"the store has lost which records the weights of step {step} contain"
    if scene.leavers and scene.may_grant:
        return _refused(scene, why)
    return _void(scene, why, failures=scene.commit.failures + 1)


def _with_latecomers(scene: _Scene, otherwise: str, wake_at_s: float) -> DrainDecision:
    """Take drains and joins in that came after the hold began; else wait."""
    commit = scene.commit
    late = [uid for uid in scene.leavers if uid not in commit.leaving]
    if late or (scene.reforms and not commit.joins):
        reason = f"also serves {_purpose(scene)}" if commit.phase != "done" else commit.reason
        return scene.becomes(
            reason,
            leaving=tuple(scene.leavers),
            saved=_union(commit.saved, late if commit.phase == "done" else ()),
            joins=commit.joins or bool(scene.reforms),
        )
    return DrainDecision(reason=otherwise, wake_at_s=wake_at_s)


def _anybody(scene: _Scene) -> bool:
    """Whether anybody still leaves or joins. One let go at its deadline still ends the round."""
    return scene.concerned or bool(scene.reforms)


def _ends(scene: _Scene, round: LiveRound) -> bool:
    return bool(
        round.left
        or scene.commit.granted
        or scene.commit.admitted
        or any(drain.outcome or scene.is_due(uid) for uid, drain in scene.inside.items())
    )


def _votes(scene: _Scene, round: LiveRound) -> dict[str, Vote]:
    """Votes of this epoch, of members of this round."""
    return {
        member: vote
        for member in round.members
        if (vote := scene.snapshot.votes.get(member)) is not None
        and (vote.epoch, vote.round) == (scene.commit.epoch, round.number)
    }


_PURPOSES: Mapping[ReformCause, str] = {
    "join": "newcomers join",
    "shrink": "the world becomes smaller",
    "pause": "the job is paused",
}
_NONE_PENDING = "no drain or join is pending any more"

_ALLOWED: Mapping[ReformCause, str] = {
    "join": "newcomers may join",
    "shrink": "the world may become smaller",
    "pause": "the world may end, for the job is paused",
}


def _purpose(scene: _Scene) -> str:
    who = [f"{_names(scene)} leaves"] if scene.leavers else []
    who += [_PURPOSES[scene.reforms]] if scene.reforms else []
    return " and ".join(who) or "nobody"


def _names(scene: _Scene) -> str:
    return ", ".join(drain.member for drain in scene.leavers.values())


def _union(pods: Iterable[str], more: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({*pods, *more}))


# --- for the others ---


def is_enough(membership: Snapshot, listing: Listing) -> bool:
    """Whether members enough for a world are listed; whoever drains is not.

    A quarantined one does not count: nobody is let go because of who may die at once.
    """
    fit = [member for member in listing.listed if member.name not in listing.quarantined]
    rules = membership.rules
    return rules is not None and len(fit) >= rules.sizes.smallest


def savers(
    membership: Snapshot, votes: Mapping[str, Vote], run: str, number: int
) -> Mapping[str, str]:
    """Who drains and has saved while others of this round still do: member by pod UID.

    Nothing that happens to them ends the save of the others, who finish it without them.
    """
    commit = membership.commit
    if commit is None or commit.phase != "commit" or not commit.is_of(run, number):
        return {}
    return {
        uid: drain.member
        for uid, drain in membership.drains.items()
        if (vote := votes.get(drain.member)) is not None
        and (vote.epoch, vote.round, vote.pod_uid) == (commit.epoch, number, uid)
        and vote.acked is not None
    }


def joins_wait(membership: Snapshot, listing: Listing, run: str, number: int) -> bool:
    """Whether this round saves before it forms again; else it does so at once."""
    rules = membership.rules
    paused = rules is not None and rules.paused
    if not paused and not is_enough(membership, listing):
        return True
    commit = membership.commit
    if commit is None or not commit.is_of(run, number):
        return True
    return not (commit.admitted or (commit.refused and commit.joins))


def join_agreed(commit: Commit | None, run: str, number: int) -> bool:
    """Whether the ranks of this round are held, or save, to form it again, or do so without."""
    if commit is None or not commit.is_of(run, number):
        return False
    return commit.joins and (commit.refused or commit.phase in ("hold", "commit", "done"))


def ends_round(membership: Snapshot, run: str, number: int) -> bool:
    """Whether somebody was let go or in after a save of this round.

    Its ranks stay parked, so it must end, even if the newcomer or the leaver has vanished since.
    """
    commit = membership.commit
    if commit is None or not commit.is_of(run, number):
        return False
    return commit.admitted or bool(commit.granted)


def granted(commit: Commit | None, drain: Drain) -> bool:
    """Whether the drained pod may go: SIGTERM passes."""
    return bool(drain.outcome) or (commit is not None and drain.pod_uid in commit.granted)
