# SPDX-License-Identifier: Apache-2.0
"""The job record that its pods' templates make: which one it goes by, and its next life. Pure.

The newest wins: one that the job has not gone by in this generation is that of a roll-out. A former
one is that of a pod which the roll-out has not replaced yet, or which came late, as long as a
member is there that was started with the newer one; if none is, the roll-out was taken back.
"""

from __future__ import annotations

from dataclasses import replace

from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import Snapshot

FORMER_TEMPLATES_MAX = 16
"""Bound on the former templates that a job remembers, to tell a late pod from a roll-out."""

FORMER_UIDS_MAX = 16
"""Bound on the former generations that a job remembers, to refuse their late pods."""


def is_upheld(snapshot: Snapshot, *, beside: str) -> bool:
    """Return whether a member but ``beside`` that does not drain has the job's template."""
    return snapshot.job is not None and any(
        member.name != beside
        and member.pod_uid not in snapshot.drains
        and member.own_template == snapshot.job.template_in_force
        for member in snapshot.members.values()
    )


def left_to(snapshot: Snapshot, member: str, policy: JobPolicy) -> Job | None:
    """Return the job by ``template`` that it should be if no member of the present one comes back.

    None if a member upholds the present one, or ``member`` is not the youngest that stays: that is
    a pod of the newest that a roll-out has brought, be it one that takes another back.
    """
    staying = [one for one in snapshot.members.values() if one.pod_uid not in snapshot.drains]
    youngest = max(staying, key=lambda one: one.age_order, default=None)
    if snapshot.job is None or youngest is None or youngest.name != member:
        return None
    if is_upheld(snapshot, beside=member):
        return None
    offered = adopted(snapshot.job, policy, former_wins=True)
    return None if offered == snapshot.job else offered


def adopted(job: Job, policy: JobPolicy, *, former_wins: bool) -> Job:
    """Return the job as it is once a pod with ``template`` has registered.

    ``former_wins``: whether a template wins that the job has gone by before.
    """
    text, in_force = policy.template, job.template_in_force
    if text == in_force or (text in job.former_templates and not former_wins):
        return job
    former = tuple(one for one in (*job.former_templates, in_force) if one != text)
    return replace(job.with_policy(policy), former_templates=former[-FORMER_TEMPLATES_MAX:])


def next_life(stored: Job, uid: str, policy: JobPolicy) -> Job:
    """Return the job record of the next generation, by a pod with this job UID and template.

    What was set by hand stays, unless the job is another one by its UID; values that were set by
    hand stay only if the pods come back with the template of before.
    """
    same_job = stored.uid == uid
    begun = stored if same_job else replace(stored, desired=None, paused=False)
    if not same_job or stored.template_in_force != policy.template:
        begun = begun.with_policy(policy)
    return replace(
        begun,
        generation=stored.generation + 1,
        uid=uid,
        vacated=False,
        former_uids=_former_uids(stored, uid),
        former_templates=(),
        unplaced=0,
        owner="",
    )


def _former_uids(stored: Job, uid: str) -> tuple[str, ...]:
    """Return the UIDs of all generations before that of ``uid``, but not ``uid`` itself."""
    uids = [former for former in (*stored.former_uids, stored.uid) if former not in ("", uid)]
    return tuple(dict.fromkeys(uids))[-FORMER_UIDS_MAX:]
