# SPDX-License-Identifier: Apache-2.0
"""The transactions that carry out decisions about drains: each compares all that it rests on."""

from __future__ import annotations

from dataclasses import replace

from rdzv.drain.decision import DrainDecision
from rdzv.drain.inputs import DrainingSnapshot, unchanged
from rdzv.keys import GenerationKeys, JobKeys
from rdzv.records.drain import CONTROLLER, Commit, Drain, Vote
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, Delete, GuardedWrites, Operation, Put

COUNTED_MAX = 64
"""Bound on the members counted by ``min`` that one transaction compares: etcd takes 128 at most."""

TOGETHER_MOST = 40
"""Bound on the drains that one transaction starts: each compares three keys."""


def transaction(
    keys: JobKeys, snapshot: DrainingSnapshot, decision: DrainDecision
) -> GuardedWrites:
    """Build the transaction that carries out ``decision``; the caller adds its registration guard.

    It requires that the commit, the round and the job are what they are in ``snapshot``, that each
    drain that ends is still there, and that no drain has come since. If a pod is released, it also
    requires the listed members that ``min`` counts: one may have vanished since.
    """
    rules = snapshot.membership.rules
    assert rules is not None
    here = keys.in_generation(rules.generation)
    compares = unchanged(keys, snapshot)
    # Blind to deletions: a cancel changes the commit as well. Not by the membership's revision: a
    # foreign key among the drains does not advance that.
    compares.append(Compare(here.drains, "mod", "<", snapshot.revision + 1, prefix=True))
    if decision.drains:
        least = min(rules.policy.smallest, COUNTED_MAX)
        counted = snapshot.listing.listed[:least]
        compares += [Compare(here.member(one.name), "create", ">", 0) for one in counted]
        if not snapshot.listing.listed:
            # All drain, so none is kept: a member that has come since would be a replacement, also
            # one that has taken the name, and so the key, of a pod that is gone.
            compares.append(Compare(here.members, "mod", "<", snapshot.revision + 1, True))
    operations: list[Operation] = []
    if decision.commit is not None:
        operations.append(Put(here.commit, decision.commit.to_json()))
        if decision.commit.epoch != snapshot.commit.epoch:
            operations.append(Delete(here.votes, prefix=True))
    if decision.last_commit is not None:
        made = replace(decision.last_commit, job_uid=rules.uid)
        operations.append(Put(keys.last_commit, made.to_json()))
    for uid, drain in sorted(decision.drains.items()):
        compares.append(Compare(here.drain(uid), "mod", "=", drain.mod_revision))
        if drain.outcome == "expired" and snapshot.commit.phase == "commit":
            # A pod whose acknowledgement has come since does not expire: the others still save.
            vote = snapshot.votes.get(drain.member)
            known = vote.mod_revision if vote is not None else 0
            compares.append(
                Compare(here.vote(snapshot.commit.epoch, drain.member), "mod", "=", known)
            )
        operations.append(Put(here.drain(uid), drain.to_json()))
    return compares, operations


def first_write(keys: JobKeys, snapshot: Snapshot, drain: Drain) -> GuardedWrites:
    """Build the transaction that first stores a drain.

    A retry, or a delayed attempt, would find no record after a cancellation, just as at first; but
    a cancellation writes the incarnation of the member, too, which is compared here.
    """
    assert snapshot.job is not None
    key = keys.in_generation(snapshot.job.generation).drain(drain.pod_uid)
    holder = snapshot.incarnations.get(drain.member)
    known = holder.mod_revision if holder else snapshot.unreadable_incarnations.get(drain.member, 0)
    compares = [
        Compare(key, "create", "=", 0),
        Compare(keys.incarnation(drain.member), "mod", "=", known),
    ]
    return compares, [Put(key, drain.to_json())]


def take_over(keys: JobKeys, snapshot: Snapshot, drain: Drain) -> GuardedWrites | None:
    """Build the transaction that takes a drain over from the controller.

    ``drain`` is what its new source would have stored. The controller withdraws it no more, and the
    earlier deadline counts. None if there is nothing to take over.
    """
    held = snapshot.drains.get(drain.pod_uid)
    if snapshot.job is None or held is None or held.outcome or held.source != CONTROLLER:
        return None
    after = replace(held, source=drain.source, reason=drain.reason, requested_by=drain.requested_by)
    left_s, held_s = drain.seconds_left, held.seconds_left
    if left_s is not None and (held_s is None or left_s < held_s):
        after = replace(
            after,
            seconds_left=drain.seconds_left,
            reserve_s=drain.reserve_s,
            at_unix_s=drain.at_unix_s,
        )
    return change(keys, snapshot, after)


def change(keys: JobKeys, snapshot: Snapshot, after: Drain) -> GuardedWrites:
    """Build the transaction that stores a drain as ``after``, if it is at its ``mod_revision``."""
    assert snapshot.job is not None
    key = keys.in_generation(snapshot.job.generation).drain(after.pod_uid)
    return [Compare(key, "mod", "=", after.mod_revision)], [Put(key, after.to_json())]


def cancel(
    keys: JobKeys, snapshot: Snapshot, pod_uid: str, *, sign_gone: bool = False
) -> GuardedWrites | str:
    """Build the transaction that cancels a drain, or return why it cannot be cancelled."""
    drain = snapshot.drains.get(pod_uid)
    if snapshot.job is None or drain is None:
        return f"pod {pod_uid} does not drain"
    if drain.ends:
        return (
            f"the pod of {drain.member} is being ended, and would be killed in the middle of a step"
            " (where only one of its containers was restarted, the drain is taken back by itself)"
        )
    return lift(keys, snapshot, drain, sign_gone=sign_gone)


def lift(
    keys: JobKeys, snapshot: Snapshot, drain: Drain, *, sign_gone: bool = False
) -> GuardedWrites:
    """Build the transaction that ends a drain before its pod: the pod is listed again.

    If its leave was granted, its round ends all the same, and it joins the next one. ``sign_gone``:
    whether what it was for has gone; else it is not asked for again while that lasts.
    """
    assert snapshot.job is not None
    here, uid, commit = keys.in_generation(snapshot.job.generation), drain.pod_uid, snapshot.commit
    compares = [
        Compare(here.drain(uid), "mod", "=", drain.mod_revision),
        Compare(here.commit, "mod", "=", commit.mod_revision if commit else 0),
    ]
    after = commit or Commit()
    ends = uid in after.granted
    if ends or not drain.outcome:
        # A later drain of this pod is granted anew: it may have trained by then, in another round.
        leaving, saved, left = (
            tuple(one for one in uids if one != uid)
            for uids in (after.leaving, after.saved, after.granted)
        )
        admitted = after.admitted or ends
        after = replace(after, leaving=leaving, saved=saved, granted=left, admitted=admitted)
    # Written in any case, also where there was none: a decision that rests on the drain must not be
    # applied after this.
    operations: list[Operation] = [Delete(here.drain(uid)), Put(here.commit, after.to_json())]
    if (holder := snapshot.incarnations.get(drain.member)) is not None:
        # The first write of the drain may still be retried: its compare fails then.
        incarnation = keys.incarnation(drain.member)
        compares.append(Compare(incarnation, "mod", "=", holder.mod_revision))
        dismissed = "" if sign_gone else drain.reason
        operations.append(Put(incarnation, replace(holder, dismissed=dismissed).to_json()))
    return compares, operations


def vote_transaction(
    keys: GenerationKeys, member: str, vote: Vote, commit: Commit, drain: Drain | None
) -> GuardedWrites:
    """Build the transaction that writes a vote; the caller adds its registration guard.

    A vote is created once, and only while ``commit`` is the one it was cast for. A stored one
    (``mod_revision``) gets its acknowledgement; it is deleted with its epoch. That is written only
    while the pod's ``drain`` is as it was: once that has expired at its deadline, the others leave
    the round, and the pod must not count as one that has saved in it.
    """
    key = keys.vote(vote.epoch, member)
    compares = [Compare(key, "mod", "=", vote.mod_revision)]
    if not vote.mod_revision:
        compares.append(Compare(keys.commit, "mod", "=", commit.mod_revision))
    if vote.acked is not None:
        known = drain.mod_revision if drain is not None else 0
        compares.append(Compare(keys.drain(vote.pod_uid), "mod", "=", known))
    return compares, [Put(key, vote.to_json())]
