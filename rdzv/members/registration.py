# SPDX-License-Identifier: Apache-2.0
"""The decision whether a sidecar may register, under which generation and incarnation: pure.

The rules for a new generation are those of the design: another job UID; or, without a UID, a fresh
sidecar that finds no member after the last one left on purpose, or after it has watched an empty
membership for three lease TTLs. A sidecar that holds a generation registers again under it, even
into an emptied store or one that was restored from an earlier generation of the same job, and never
starts a new one: the higher generation wins.

UIDs have no order, so a late pod of a deleted job looks like the first one of a new job. The UIDs
of former generations are kept and refused. A pod with an unknown UID waits for a while if there are
members that do not drain: those of a deleted job drain, and a late pod of it is terminated.

No sidecar is refused because of its template: the job goes by that, or adopts it, or stays as it is
(``rdzv.members.templates``). A worker is refused if an object of another kind has the job's name:
two objects that share a name by accident are no job. Launchers are of another object than workers.
"""

from __future__ import annotations

from dataclasses import replace

from rdzv.dataclass import dataclass
from rdzv.members.templates import adopted, is_upheld, next_life
from rdzv.records.job import Incarnation, Job, Member, Role, change_between
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import Snapshot

EMPTY_LEASE_TIMES = 3

CONTESTED_LEASE_TIMES = 6
"""Lease TTLs for which a job stays with its members if a pod with an unknown UID wants it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a sidecar; what is not known is empty, or -1 for ``index``.

    ``tunnel_port``, ``pin`` and ``health_port`` are as in ``Member``; ``owner`` is as in ``Job``.
    """

    member: str
    pod_uid: str
    address: str
    node: str
    role: Role
    slots: int
    policy: JobPolicy
    job_uid: str = ""
    index: int = -1
    version: str = ""
    topology: str = ""
    tunnel_port: int = 0
    pin: str = ""
    owner: str = ""
    health_port: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """The registration that a sidecar has had before, in this process or in one before it."""

    generation: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Register:
    """The decision to register. ``job`` is to be written if it differs from the stored one.

    ``change``: how the job's values change, in words; empty if they stay. ``alone_at``: the job
    goes back to a former template, as no member had the newer one at that revision; 0: no.
    ``takes_over``: the pod whose name it takes over, and the revision up to which its drain is
    known.
    """

    job: Job
    job_changes: bool
    incarnation: Incarnation
    member: Member
    superseded_generation: int | None
    reason: str
    change: str = ""
    alone_at: int = 0
    takes_over: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class RetryLater:
    """The decision to wait: ask again when the membership changes, or after ``retry_in_s``."""

    retry_in_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The refusal to register, as another pod has the name, or the job.

    ``for_good``: whatever becomes of the job.
    """

    reason: str
    for_good: bool = True


def plan(
    snapshot: Snapshot,
    identity: Identity,
    held: Held | None,
    *,
    empty_for_s: float,
    lease_ttl_s: float,
    waited_s: float = 0.0,
    trained: bool = True,
    known: Job | None = None,
) -> Register | RetryLater | Refuse:
    """Decide on registering, given the snapshot and what was held before.

    ``empty_for_s`` is for how long a healthy watch has shown no member; ``waited_s`` for how long
    this sidecar has wanted to register. ``trained``: whether the present generation has ever had a
    world. ``known``: the job as the store had it last.
    """
    holder = snapshot.incarnations.get(identity.member)
    foreign = holder is not None and holder.pod_uid != identity.pod_uid
    # A holder of an older incarnation is of a store that was restored since.
    if holder is not None and foreign and held is not None and holder.number > held.incarnation:
        return Refuse(
            f"the name {identity.member} was taken over by pod {holder.pod_uid}; see"
            " docs/operations.md#two-pods-claim-one-name",
        )
    if held is None and (other := _of_another_kind(snapshot, identity, empty_for_s, lease_ttl_s)):
        return other
    if _is_of_another_job(snapshot.job, identity):
        chosen = _change_lives(
            snapshot, identity, held, empty_for_s, lease_ttl_s, waited_s, trained=trained
        )
    elif held is None and holder is not None and foreign:
        chosen = _after_the_leaver(snapshot, holder, lease_ttl_s, waited_s) or _choose_job(
            snapshot, identity, held, empty_for_s, lease_ttl_s
        )
    else:
        chosen = _choose_job(snapshot, identity, held, empty_for_s, lease_ttl_s)
    if isinstance(chosen, RetryLater | Refuse):
        return chosen
    job, reason = chosen
    if identity.role == "worker" and not job.owner:
        job = replace(job, owner=identity.owner)
    stays = identity.pod_uid not in snapshot.drains
    # A pod that was here before only comes back, perhaps before those that the roll-out has
    # brought.
    former_wins = held is None and stays and not is_upheld(snapshot, beside=identity.member)
    forward = adopted(job, identity.policy, former_wins=False)
    job = adopted(job, identity.policy, former_wins=former_wins)
    alone_at = snapshot.revision if job != forward else 0
    incarnation = _next_incarnation(snapshot, identity, held)
    stored = snapshot.job
    superseded = stored.generation if stored and stored.generation != job.generation else None
    if stored is None and known is not None:
        reason += _fallen_back(known, job)
    return Register(
        job=job,
        job_changes=stored is None or job != stored,
        incarnation=incarnation,
        member=_member(identity, incarnation),
        superseded_generation=superseded,
        reason=reason,
        change=change_between(stored, job) if stored and superseded is None else "",
        alone_at=alone_at,
        takes_over=(holder.pod_uid, snapshot.revision) if holder and foreign else None,
    )


def _fallen_back(known: Job, job: Job) -> str:
    """Name what was set by hand, and was lost with the store's data; empty for nothing."""
    lost = [change_between(known, job)] + ["it is not paused any more"] * known.paused
    lost = list(filter(None, lost))
    return f"; what was set by hand is lost with its data: {', '.join(lost)}" if lost else ""


def _after_the_leaver(
    snapshot: Snapshot, holder: Incarnation, lease_ttl_s: float, waited_s: float
) -> RetryLater | None:
    """Wait for another pod of this name that is registered and drains, until it may go.

    To take its name over would fence it, and void what all of its world save with it. The wait ends
    at its deadline, which counts from when this sidecar began to ask: the drain began before that.
    """
    drain = snapshot.drains.get(holder.pod_uid)
    if drain is None or drain.outcome or drain.member not in snapshot.members:
        return None
    left_s = lease_ttl_s if drain.seconds_left is None else drain.seconds_left - waited_s
    if left_s <= 0 or not snapshot.has_name(drain):
        return None
    return RetryLater(
        left_s,
        f"the name {holder.member} is still that of pod {holder.pod_uid}, which drains: waiting"
        " until it may go",
    )


def _next_incarnation(snapshot: Snapshot, identity: Identity, held: Held | None) -> Incarnation:
    """Return the next incarnation, above all that the store and this sidecar have seen."""
    holder = snapshot.incarnations.get(identity.member)
    newest = max(holder.number if holder else 0, held.incarnation if held else 0)
    number = max(newest + 1, snapshot.revision)
    since, dismissed = number, ""
    if holder is not None and holder.pod_uid == identity.pod_uid:
        since, dismissed = holder.since or holder.number, holder.dismissed
    unreadable = snapshot.unreadable_incarnations.get(identity.member, 0)
    stored = holder.mod_revision if holder else unreadable
    return Incarnation(identity.member, number, identity.pod_uid, since, stored, dismissed)


def _member(identity: Identity, incarnation: Incarnation) -> Member:
    return Member(
        name=identity.member,
        pod_uid=identity.pod_uid,
        incarnation=incarnation.number,
        address=identity.address,
        node=identity.node,
        role=identity.role,
        slots=identity.slots,
        min_workers=identity.policy.min_nodes,
        max_workers=identity.policy.max_nodes,
        since=incarnation.since,
        index=identity.index,
        version=identity.version,
        template=identity.policy.template,
        topology=identity.topology,
        tunnel_port=identity.tunnel_port,
        pin=identity.pin,
        health_port=identity.health_port,
    )


def _choose_job(
    snapshot: Snapshot,
    identity: Identity,
    held: Held | None,
    empty_for_s: float,
    lease_ttl_s: float,
) -> tuple[Job, str] | RetryLater | Refuse:
    """Return the job record to register under, with the reason."""
    stored = snapshot.job
    if stored is None:
        if snapshot.unreadable_job and held is None:
            return RetryLater(
                lease_ttl_s,
                "the job record cannot be read: waiting for a member that knows the job to write"
                " it anew, or for its removal",
            )
        job = Job(
            identity.policy,
            generation=held.generation if held else 1,
            uid=identity.job_uid,
            template=identity.policy.template,
            mod_revision=snapshot.unreadable_job,
        )
        return job, "the job was not in the store" if held else "first member of the job"
    present = replace(stored, vacated=False)
    if held is not None and held.generation > stored.generation:
        # The store was restored from a backup: a sidecar that has run on does not go back.
        return replace(present, generation=held.generation), (
            f"the store went back to generation {stored.generation}:"
            f" the job continues in generation {held.generation}"
        )
    if held is not None or identity.job_uid or snapshot.members:
        return present, f"joins generation {stored.generation}"
    if stored.vacated:
        return _next_life(
            stored, identity
        ), "the last member of the previous generation left in good order"
    patience_s = EMPTY_LEASE_TIMES * lease_ttl_s
    if empty_for_s >= patience_s:
        return next_life(
            stored, identity.job_uid, identity.policy
        ), f"no member was registered for {patience_s:.0f} s"
    return RetryLater(
        patience_s - empty_for_s,
        f"generation {stored.generation} has no member but may come back: waiting to see",
    )


def _of_another_kind(
    snapshot: Snapshot, identity: Identity, empty_for_s: float, lease_ttl_s: float
) -> RetryLater | Refuse | None:
    """Refuse a worker whose object is of another kind, until the job has ended."""
    stored = snapshot.job
    if stored is None or identity.role != "worker" or stored.vacated:
        return None
    if not stored.owner or not identity.owner or stored.owner == identity.owner:
        return None
    reason = (
        f"an object of another kind has the same name: the job is of a {stored.owner}, and this pod"
        f" of a {identity.owner}; rename one, or name the job at both by muster.dev/job if they are"
        " to train together"
    )
    if snapshot.members:
        return Refuse(reason, for_good=False)
    patience_s = EMPTY_LEASE_TIMES * lease_ttl_s
    left_s = patience_s - empty_for_s
    return (
        RetryLater(left_s, f"{reason}; waiting to see whether it is gone") if left_s > 0 else None
    )


def _is_of_another_job(stored: Job | None, identity: Identity) -> bool:
    return stored is not None and bool(identity.job_uid) and stored.uid != identity.job_uid


def _change_lives(
    snapshot: Snapshot,
    identity: Identity,
    held: Held | None,
    empty_for_s: float,
    lease_ttl_s: float,
    waited_s: float,
    *,
    trained: bool,
) -> tuple[Job, str] | RetryLater | Refuse:
    """Decide whether a pod whose job has another UID than the stored one may take the job over.

    A fenced pod may take it back only from a generation that never had a world, as with any other
    its own job may have ended since; or from an earlier generation, which a restored store has.
    """
    stored = snapshot.job
    assert stored is not None
    former = identity.job_uid in stored.former_uids
    patience_s = EMPTY_LEASE_TIMES * lease_ttl_s
    deserted = not snapshot.members and empty_for_s >= patience_s
    if held is not None and held.generation > stored.generation and not former and deserted:
        # A generation that began after this one would have members: a backup has brought back an
        # earlier one.
        return replace(_next_life(stored, identity), generation=held.generation), (
            f"the store went back to generation {stored.generation}, which has had no member"
            f" for {patience_s:.0f} s: the job continues in generation {held.generation}"
        )
    if (held is not None and (trained or not former)) or (former and not deserted):
        return Refuse(
            f"the job was created again with UID {stored.uid or '(none)'}; see"
            " docs/operations.md#a-pod-of-a-deleted-job-comes-late",
            for_good=False,
        )
    if former:
        # A late pod that no sidecar knew as such took it over and is gone: this one is there.
        return next_life(
            stored, identity.job_uid, identity.policy
        ), f"no member was registered for {patience_s:.0f} s"
    staying = sum(member.pod_uid not in snapshot.drains for member in snapshot.members.values())
    patience_s = CONTESTED_LEASE_TIMES * lease_ttl_s
    if stored.uid and staying and waited_s < patience_s:
        return RetryLater(
            patience_s - waited_s,
            f"{staying} members of the job with UID {stored.uid} are registered and not draining:"
            f" waiting to see which of the two jobs continues, that one or this pod's"
            f" ({identity.job_uid})",
        )
    return next_life(
        stored, identity.job_uid, identity.policy
    ), f"the job has a new UID {identity.job_uid}"


def _next_life(stored: Job, identity: Identity) -> Job:
    return next_life(stored, identity.job_uid, identity.policy)
