# SPDX-License-Identifier: Apache-2.0
"""The drain state machine: when all ranks save the same step, and who may leave or join then.

::

    idle ─▶ hold ─▶ commit(step) ─▶ done ─▶ leaves granted, the new world allowed: the round ends
              └───────┴─▶ void        └─▶ idle, while no leave or join may be granted yet

Any sidecar may carry out a decision, by comparing all that it rests on. "All" means the frozen list
of the round, never the members that can be reached. A commit is never completed once its round is
over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import field, replace

from rdzv.dataclass import dataclass
from rdzv.drain.inputs import (
    DrainingSnapshot,
    DrainObservations,
    DrainPolicy,
    LiveRound,
    ReformCause,
)
from rdzv.drain.saves import DIFFER, Said, difference, left_to_others, with_agreement
from rdzv.drain.standing import FINISHING, asked, is_of_launcher, released
from rdzv.records.drain import Commit, Drain, LastCommit, Outcome, Vote
from rdzv.records.job import shown_round
from rdzv.snapshot import Snapshot, is_enough

SAVES_LOOK_S = 5.0
"""Interval at which reports of periodic saves are read: they wake no sidecar."""

NAMED_MAX = 3
"""The most members to name that were too slow."""

LEAST_COMMIT_S = 1.0
"""Lower bound on the expected duration of a commit. A measurement that began part-way through would
be too short."""

_REFORMS: Mapping[ReformCause, tuple[str, str]] = {
    "join": ("newcomers join", "newcomers may join"),
    "shrink": ("the world becomes smaller", "the world may become smaller"),
    "pause": ("the job is paused", "the world may end, for the job is paused"),
    "hang": ("a silent torchrun is given up", "the world may go on without its silent torchrun"),
}
"""The purpose of a save, and the permission after it, in words."""

_NONE_PENDING = "no drain or join is pending any more"


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
    """The reason, in one sentence."""
    wake_at_s: float = math.inf
    """The time at which the decision may change by time alone."""


def decide(
    now: float, snapshot: DrainingSnapshot, observations: DrainObservations, policy: DrainPolicy
) -> DrainDecision:
    """Decide the next change of the commit record, and which drains end."""
    if snapshot.membership.job is None:
        return DrainDecision(reason="there is no job yet")
    if snapshot.lost is not None:
        return _put_back(snapshot, *snapshot.lost)
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
            cause = _too_slow(scene, uid) if outcome == "expired" else ""
            ended[uid] = replace(drain, outcome=outcome, step=scene.saved_step(drain), cause=cause)
            reasons.append(f"{drain.member} may go ({outcome}): {why}")
        else:
            moments.append(scene.due_s(uid))
            if uid == snapshot.pod_uid:
                saves = scene.save_asked(drain) is not None
                promised_s = observations.own_since_s + policy.promise_s
                moments.append(promised_s if saves else scene.launched_s)
    if moved.commit is not None or not reasons:
        reasons.insert(0, moved.reason)
    # A moment that has passed needs no wake-up: what is due waits for something else than time.
    wake_at_s = min((moment for moment in moments if moment > now), default=math.inf)
    return replace(moved, drains=ended, reason="; ".join(reasons), wake_at_s=wake_at_s)


def _put_back(snapshot: DrainingSnapshot, lost: Commit, last: LastCommit | None) -> DrainDecision:
    """Put a commit that ends its round back into a restored store, which had lost it."""
    rounds = (snapshot.round, snapshot.own_round)
    ended = [one for one in rounds if one is not None and lost.is_of(one.run, one.number)]
    if last and not all(snapshot.is_known(last.step, one) for one in ended):
        last = None  # No world could begin from it.
    why = f"the round ends after step {lost.step}: put back, as the store had lost it"
    return DrainDecision(replace(lost, reason=why), last, reason=why)


class _Scene:
    """One snapshot at one moment, and the facts that follow from it alone."""

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
        # A pod that has left the round already needs no commit, and cannot take part in one.
        left = self.round.left if self.round else frozenset()
        self.inside = {
            uid: drain
            for uid, drain in sorted(drains.items())
            if (member := snapshot.member_of(drain)) is not None and member not in left
        }
        self.leavers = {uid: drain for uid, drain in self.inside.items() if not drain.outcome}
        self.concerned = any(snapshot.member_of(drain) is not None for drain in drains.values())
        listing = snapshot.listing
        self.enough = is_enough(snapshot.membership, listing)
        if self.round is not None:
            # A launcher that neither trains nor asks may never come.
            there = (frozenset(self.round.members) - left) | self.round.asking
            present = sum(member.name in there for member in listing.listed)
            self.enough = self.enough and present >= rules.policy.smallest
        forms = self.enough or rules.paused
        self.may_grant = forms or policy.below_min == "commit" or self.is_last_world
        # Without enough others the next world could not form: newcomers wait with the leavers.
        self.reforms: ReformCause = self.round.reforms if self.round and forms else ""

    @property
    def is_last_world(self) -> bool:
        """Whether no replacement can come before a pod of it has gone: none is waited for.

        All drain, or one of them makes room for a pod that Kubernetes prefers.
        """
        listing = self.snapshot.listing
        all_drain = not listing.listed and not listing.standby
        return all_drain or any(drain.preempted for drain in self.inside.values())

    @property
    def launched_s(self) -> float:
        """The time from which no first command can be on its way to this sidecar's own pod."""
        seen = self.observations
        return -math.inf if seen.own_ran else seen.own_since_s + self.policy.launch_s

    def save_asked(self, drain: Drain) -> Drain | None:
        """Return the drain whose save this pod waits for, of a launcher that ends with it."""
        if is_of_launcher(self.snapshot.membership, drain):
            return drain
        hosts_ranks = drain.pod_uid == self.snapshot.pod_uid and self.snapshot.commands
        return asked(self.snapshot.membership) if hosts_ranks else None

    def saved_step(self, drain: Drain) -> int | None:
        """Return the step on record that the drain ends with; None without one."""
        ask = self.save_asked(drain)
        if ask is not None:
            return ask.step
        return self.commit.step if self.served(drain.pod_uid) else None

    def due_s(self, uid: str) -> float:
        """Return the latest time at which the pod gets SIGTERM; infinite without a deadline."""
        return self.observations.due_s.get(uid, math.inf)

    def is_due(self, uid: str) -> bool:
        return self.now >= self.due_s(uid)

    def finishes(self, drain: Drain) -> bool:
        """Return whether the pod's round ends well, or has, and no save of it is on record."""
        round, uid = self.snapshot.round, drain.pod_uid
        if round is None or self.served(uid):
            return False
        return self._succeeded_with(drain) or (uid in self.inside and round.finishing)

    def is_ending_well(self, drain: Drain) -> bool:
        """Return whether the pod's torchrun is about to end by itself: its run has succeeded."""
        round = self.snapshot.round
        return self._succeeded_with(drain) and round is not None and drain.member not in round.left

    def _succeeded_with(self, drain: Drain) -> bool:
        round, membership = self.snapshot.round, self.snapshot.membership
        within = round is not None and round.succeeded and drain.member in round.members
        return within and membership.has_name(drain)

    def last_chance_s(self, uid: str) -> float:
        """Return the time from which a commit may only just finish before the pod's deadline."""
        return self.due_s(uid) - 2 * max(self.commit.took_s, LEAST_COMMIT_S)

    def outlived(self, uid: str) -> bool:
        """Return whether the others finish their save whatever becomes of the pod: it has saved."""
        commit, round = self.commit, self.snapshot.round
        # A sidecar whose launcher never connected may know no round: then the commit's counts.
        if round is not None and not (round.live and commit.is_of(round.run, round.number)):
            return False
        saved = savers(self.snapshot.membership, self.snapshot.votes, commit.run, commit.round)
        return uid in saved

    @property
    def unhurried_since_s(self) -> float | None:
        """The time since which no deadline ends a save; None while one still does.

        The save is for a join alone then, or each leaver has saved and is out of time, or gone.
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
        """Return whether the pod's ranks are parked behind a save that all have acknowledged."""
        if self.has_trained_on(uid):
            return False
        return self.commit.phase == "done" and any(
            vote.pod_uid == uid and vote.acked == self.commit.step
            for vote in self.snapshot.votes.values()
        )

    def has_trained_on(self, uid: str) -> bool:
        """Return whether the pod was in a later round than the commit's; it may be over by now."""
        round, drain = self.snapshot.round, self.snapshot.membership.drains[uid]
        if round is None or drain.member not in round.members:
            return False
        if self.commit.is_of(round.run, round.number):
            return False
        return self.snapshot.membership.has_name(drain)

    def trains_elsewhere(self, drain: Drain) -> bool:
        """Return whether this pod's ranks are in another run's round, which counts later."""
        own, round = self.snapshot.own_round, self.snapshot.round
        if own is None or round is None or (own.run, own.number) == (round.run, round.number):
            return False
        return own.live and self.snapshot.membership.has_name(drain)

    def becomes(self, reason: str, **changes: object) -> DrainDecision:
        """Decide on a commit record that differs from the present one by ``changes``."""
        commit = replace(self.commit, reason=reason, **changes)  # type: ignore[arg-type]
        return DrainDecision(commit, reason=reason)


def _without_commit(scene: _Scene, drain: Drain) -> tuple[Outcome, str]:
    """Return the outcome and reason of a drain that ends now without a grant; empty for none."""
    snapshot, uid = scene.snapshot, drain.pod_uid
    if scene.outlived(uid):
        return "", ""
    # Without a world in this generation, no pod is kept for one.
    untrained = snapshot.round is None or (snapshot.round.first and not snapshot.round.complete)
    may_grant = scene.may_grant or drain.preempted
    outcome: Outcome = "committed" if scene.served(uid) else "uncommitted"
    if scene.round is not None and drain.member in scene.round.let_go:
        return "committed", "the world goes on without it, with its state"
    if uid in scene.inside:
        assert scene.round is not None
        commit, round = scene.commit, scene.round
        this_round = commit.is_of(round.run, round.number)
        refused = this_round and commit.refused and uid in commit.leaving
        if refused and scene.may_grant and not round.finishing:
            return "uncommitted", commit.reason
    elif uid == snapshot.pod_uid and (ask := scene.save_asked(drain)) is not None:
        seen_for_s = scene.now - scene.observations.own_since_s
        outcome, why = released(ask, snapshot.membership, seen_for_s, scene.policy.promise_s)
        if outcome:
            return outcome, why
    elif uid == snapshot.pod_uid and untrained and snapshot.commands is None:
        return "uncommitted", "nothing has been trained yet"
    elif uid == snapshot.pod_uid and may_grant and not snapshot.commands:
        # Only the pod's own sidecar knows whether a launcher's commands run in it.
        trains = scene.trains_elsewhere(drain) or scene.is_ending_well(drain)
        if snapshot.commands is None and not trains:
            return outcome, "it takes part in no round"
        # A worker that is on its way here must find the pod: the others would wait for it.
        if snapshot.commands is not None and scene.now >= scene.launched_s:
            return "committed", "no worker runs in it any more"
    if scene.is_due(uid) and scene.finishes(drain):
        past_s = scene.now - scene.due_s(uid)
        # Its own sidecar's deadline is that of its whole grace; the others know only the usual one.
        due = uid == snapshot.pod_uid or past_s >= drain.reserve_s
        return ("uncommitted", FINISHING) if due else ("", "")
    if scene.is_due(uid):
        return ("committed" if scene.served(uid) else "expired"), "its deadline is near"
    return "", ""


def _too_slow(scene: _Scene, uid: str) -> str:
    """Say what a pod whose deadline has come waited for; empty if that is unknown."""
    commit, round = scene.commit, scene.round
    if round is None or not commit.is_of(round.run, round.number) or uid not in commit.leaving:
        return ""
    votes, took_s = _votes(scene, round), scene.now - scene.observations.epoch_since_s
    ranks = {one.member: one.ranks for one in scene.snapshot.saves}

    def spelled(members: list[str]) -> str:
        of = {one: ranks.get(one, ()) for one in members[:NAMED_MAX]}
        names = [f"rank {at[0]} on {one}" if len(at) == 1 else one for one, at in of.items()]
        more = [f"{len(members) - NAMED_MAX} more"] if len(members) > NAMED_MAX else []
        return ", ".join(names + more)

    if commit.phase == "commit":
        slow = [m for m in round.members if m not in votes or votes[m].acked is None]
        after = f" after {took_s:.0f} s" if 0 <= took_s < math.inf else ""
        return f"the save of step {commit.step} was not done{after}: no report of {spelled(slow)}"
    if commit.phase == "hold":
        silent = [m for m in round.members if m not in votes]
        return f"no vote on a step to save: {spelled(silent)}" if silent else ""
    return commit.reason if commit.phase in ("void", "idle") else ""


# --- the commit of a live round ---


def _commit(scene: _Scene) -> DrainDecision:
    commit, round = scene.commit, scene.round
    assert round is not None
    if round.in_place and commit.phase in ("idle", "void"):
        return DrainDecision(reason="the world changes in place, without a save")
    if not commit.is_of(round.run, round.number):
        fresh = Commit(commit.epoch, round.run, round.number, mod_revision=commit.mod_revision)
        fresh = replace(fresh, took_s=commit.took_s)
        if commit.mod_revision:
            reason = f"round {shown_round(round.number)} has begun"
            return DrainDecision(replace(fresh, reason=reason), reason=reason)
        scene.commit = fresh
    if commit.phase == "hold":
        return _hold(scene, round)
    if commit.phase == "commit":
        return _save(scene, round)
    if commit.phase == "done":
        return _done(scene)
    return _idle(scene, round)


def _idle(scene: _Scene, round: LiveRound) -> DrainDecision:
    """Decide in phase ``idle`` or ``void`` whether to hold, for whom, and when."""
    commit = scene.commit
    if round.finishing:
        return DrainDecision(reason=f"round {shown_round(round.number)} is finishing")
    if _ends(scene, round):
        return DrainDecision(reason=f"round {shown_round(round.number)} is about to end")
    if commit.refused:
        asked = commit.joins and bool(scene.reforms)
        asked = asked or any(uid in commit.leaving for uid in scene.leavers)
        if asked and scene.may_grant:
            return DrainDecision(reason=commit.reason)
        # Later leaves and joins ask again: by then all ranks may take part, and have work to lose.
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
    missed = commit.missed if commit.phase == "void" and commit.mute else 0
    if any(math.isfinite(scene.due_s(uid)) for uid in scene.leavers):
        missed = 0  # who has a deadline has it to try in
    if missed >= scene.policy.tries and _is_given_up(scene):
        return _without_the_mute(scene, round)
    if commit.phase == "void" and commit.failures:
        next_s = scene.observations.since_s + _pause_s(commit, scene.policy)
        if scene.now < next_s:
            why = "the last attempt failed: backing off"
            if missed >= scene.policy.tries:
                why = f"{_silent(commit)}: waiting for a save of all others, or another attempt"
                next_s = min(next_s, scene.now + SAVES_LOOK_S)
            return DrainDecision(reason=why, wake_at_s=next_s)
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
        return _void(scene, f"round {shown_round(round.number)} is finishing")
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
            missed=0,
            mute=(),
        )
    until_s = scene.observations.since_s + scene.policy.hold_s
    if scene.now >= until_s:
        why = f"{', '.join(missing[:3])} did not vote within {scene.policy.hold_s:.0f} s"
        failures, missed = scene.commit.failures + 1, scene.commit.missed + 1
        return _void(scene, why, tuple(missing), failures=failures, missed=missed)
    return _with_latecomers(scene, f"{len(missing)} votes are missing", until_s)


def _pause_s(commit: Commit, policy: DrainPolicy) -> float:
    """Return the backoff after a failed attempt: missed votes count apart from failed saves."""
    failed = min(commit.missed or commit.failures, 30)
    return min(policy.pause_s * 2.0 ** (failed - 1), policy.pause_max_s)


def _silent(commit: Commit) -> str:
    return f"{', '.join(commit.mute[:3])} did not vote ({commit.missed} votes in a row were missed)"


def _is_given_up(scene: _Scene) -> bool:
    """Return whether the world forms again now without the vote that was missed last.

    It does right after a save of all who vote, or after as many misses as are ever waited for.
    """
    saved = scene.snapshot.saved_by_others > scene.observations.saved_before
    return saved or scene.commit.missed >= scene.policy.tries_max


def _without_the_mute(scene: _Scene, round: LiveRound) -> DrainDecision:
    """Form the world again without a save.

    Other members' saves may be parts of one that is not whole: the next world begins from the last
    commit, unless its script finds a newer checkpoint by itself.
    """
    snapshot = scene.snapshot
    why = f"{_silent(scene.commit)}: {_purpose(scene)} without a save"
    mute, step = scene.commit.mute, max((one.step for one in snapshot.saves), default=-1)
    if step < 0:
        return _refused(scene, f"{why}; the steps since the last save are made again", mute)
    membership = snapshot.membership
    last = None if membership.commit_is_of_former_life else membership.commit_to_start_from
    begins = last.step if last is not None and last.is_of(round.run) else 0
    repeated = f"up to {max(0, step - begins)} steps since step {begins} are made again"
    return _refused(scene, f"{why}; {repeated}", mute)


def _save(scene: _Scene, round: LiveRound) -> DrainDecision:
    votes, commit = _votes(scene, round), scene.commit
    more = commit.failures + 1
    for member, vote in votes.items():
        if vote.failed.startswith(DIFFER):
            return _useless(scene, vote.failed, for_good=False)
        if vote.failed:
            return _void(scene, f"{member} could not save: {vote.failed}", failures=more)
    saved = {vote.acked for vote in votes.values() if vote.acked is not None}
    if len(saved) > 1:
        return _void(scene, f"different steps were saved: {sorted(saved)}", failures=more)
    missing = [m for m in round.members if m not in votes or votes[m].acked is None]
    if not missing and saved:
        (step,) = saved
        said = [
            Said(vote.ranks, member, vote.cursor, vote.tag, vote.samples)
            for member, vote in votes.items()
        ]
        if differ := difference(step, said):
            return _useless(scene, differ, for_good=False)
        if not scene.snapshot.is_known(step, round):
            # Another attempt would be of the same world. The next requests of its ranks for shards
            # tell them to end, and newcomers come in then.
            why = f"the store has lost which records the weights of step {step} contain"
            return _useless(scene, why, for_good=True)
        decision = scene.becomes(
            f"all have saved step {step}{left_to_others(said)}",
            phase="done",
            step=step,
            leaving=tuple(scene.leavers),
            saved=_union(commit.saved, scene.leavers),
            failures=0,
            took_s=scene.now - scene.observations.epoch_since_s,
        )
        last = LastCommit(step, round.number, commit.epoch, run=round.run)
        return replace(decision, last_commit=with_agreement(last, said))
    if not _anybody(scene):
        return _void(scene, _NONE_PENDING)
    if round.finishing:
        return _void(scene, f"round {shown_round(round.number)} is finishing")
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
        who += [_REFORMS[scene.reforms][1]] if scene.reforms else []
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


def _void(scene: _Scene, why: str, mute: tuple[str, ...] = (), **changes: object) -> DrainDecision:
    return scene.becomes(why, phase="void", step=None, mute=mute, **changes)


def _refused(scene: _Scene, why: str, mute: tuple[str, ...] = ()) -> DrainDecision:
    """Void this attempt, and grant the leaves and joins that it was for without a save."""
    leaving, joins = tuple(scene.leavers), bool(scene.reforms)
    return _void(scene, why, mute, refused=True, leaving=leaving, joins=joins)


def _useless(scene: _Scene, why: str, *, for_good: bool) -> DrainDecision:
    """Void a save that no world could begin from; leavers go without one if that is ``for_good``.

    So it is after an earlier failure, too: a script gives the same cursors again, and a leaver
    would only wait for its deadline. Newcomers alone are not let in like this: the world would lose
    the steps since its last save.
    """
    if (for_good or scene.commit.failures) and scene.leavers and scene.may_grant:
        return _refused(scene, why)
    return _void(scene, why, failures=scene.commit.failures + 1)


def _with_latecomers(scene: _Scene, otherwise: str, wake_at_s: float) -> DrainDecision:
    """Take in drains and joins that came after the hold began; wait if there are none."""
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
    """Return whether a leave or a join is pending; a pod released at its deadline counts.

    Its leave still ends the round.
    """
    return scene.concerned or bool(scene.reforms)


def _ends(scene: _Scene, round: LiveRound) -> bool:
    return bool(
        round.left
        or scene.commit.granted
        or scene.commit.admitted
        or any(drain.outcome or scene.is_due(uid) for uid, drain in scene.inside.items())
    )


def _votes(scene: _Scene, round: LiveRound) -> dict[str, Vote]:
    """Return the votes of this epoch by members of this round."""
    return {
        member: vote
        for member in round.members
        if (vote := scene.snapshot.votes.get(member)) is not None
        and (vote.epoch, vote.round) == (scene.commit.epoch, round.number)
    }


def _purpose(scene: _Scene) -> str:
    who = [f"{_names(scene)} leaves"] if scene.leavers else []
    who += [_REFORMS[scene.reforms][0]] if scene.reforms else []
    return " and ".join(who) or "nobody"


def _names(scene: _Scene) -> str:
    return ", ".join(drain.member for drain in scene.leavers.values())


def _union(pods: Iterable[str], more: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({*pods, *more}))


def savers(
    membership: Snapshot, votes: Mapping[str, Vote], run: str, number: int
) -> Mapping[str, str]:
    """Return the leavers that have saved while others of the round still do: member by pod UID.

    Nothing that happens to them ends the save of the others, who finish it without them.
    """
    commit = membership.commit
    if commit is None or not commit.is_of(run, number) or commit.phase != "commit":
        return {}
    return {
        uid: drain.member
        for uid, drain in membership.drains.items()
        if (vote := votes.get(drain.member)) is not None
        and (vote.epoch, vote.round, vote.pod_uid) == (commit.epoch, number, uid)
        and vote.acked is not None
    }
