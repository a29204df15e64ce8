# SPDX-License-Identifier: Apache-2.0
"""The membership at one revision of the store, of which every decision is a function.

The members that are listed of it, in order, and the reason against each other one, are one pure
function for both launchers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from rdzv.dataclass import dataclass
from rdzv.records.drain import Commit, Drain, LastCommit
from rdzv.records.job import Incarnation, Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.records.quarantine import Quarantine


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole membership at one store revision, except votes; immutable.

    Votes are apart (``Membership.votes``), as only the parts that count them need them.
    """

    revision: int
    job: Job | None = None
    """The job record; None until the first member has written it."""
    members: Mapping[str, Member] = field(default_factory=dict)
    """Members by name, as ``incarnations`` and ``quarantines``."""
    incarnations: Mapping[str, Incarnation] = field(default_factory=dict)
    drains: Mapping[str, Drain] = field(default_factory=dict)
    """Drains by pod UID."""
    corrupt: Mapping[str, str] = field(default_factory=dict)
    """Keys that could not be read, with the reason."""
    unreadable_job: int = 0
    """The mod revision of an unreadable job record, for the compare of the write that replaces it;
    0 if there is none. The same holds for the other unreadable records."""
    unreadable_incarnations: Mapping[str, int] = field(default_factory=dict)
    """The same for incarnations, by member."""
    commit: Commit | None = None
    """The commit record; None until the first hold."""
    last_commit: LastCommit | None = None
    """The newest step that all ranks have saved."""
    unreadable_commit: int = 0
    quarantines: Mapping[str, Quarantine] = field(default_factory=dict)

    @property
    def all_know_sizes(self) -> bool:
        """Whether no present sidecar goes by the bounds alone, as one of 0.1.0 does."""
        return not any(member.knows_bounds_alone for member in self.members.values())

    @property
    def rules(self) -> Job | None:
        """The job with those of its values that every present sidecar goes by.

        If one knows no pauses and no sizes, none goes by them: otherwise each would break off what
        the other has the ranks held for, without end.
        """
        if self.job is None or self.all_know_sizes:
            return self.job
        return replace(self.job, policy=self.job.policy.bounds_alone, paused=False)

    @property
    def commit_to_start_from(self) -> LastCommit | None:
        """The last commit, unless it is forgotten."""
        last = self.last_commit
        return None if last is None or last.forgotten else last

    @property
    def commit_is_of_former_life(self) -> bool:
        """Whether the last commit is of an earlier job of this name that was deleted.

        Only UIDs show that: a generation may also begin without a deletion.
        """
        last, job = self.last_commit, self.job
        return bool(last and job and last.job_uid and job.uid and last.job_uid != job.uid)

    def quarantine_of(self, member: Member) -> Quarantine | None:
        """Return the quarantine that keeps ``member`` out of worlds; None if there is none.

        A quarantine of an earlier pod does not count.
        """
        record = self.quarantines.get(member.name)
        if record is None or not record.out or record.pod_uid != member.pod_uid:
            return None
        return record

    def has_name(self, drain: Drain) -> bool:
        """Return whether the drained pod is still the one behind its member's name.

        A new pod of the same name is not drained, even while that one is cut off.
        """
        holder = self.members.get(drain.member) or self.incarnations.get(drain.member)
        return holder is None or holder.pod_uid == drain.pod_uid


@dataclass(frozen=True, slots=True)
class Places:
    """The members that take part in a launcher's round, and those that ask to, by name.

    A launcher that never starts in its pod is in neither, however old its member is.
    """

    taken: frozenset[str] = frozenset()
    asking: frozenset[str] = frozenset()


NO_ROUND = Places()


@dataclass(frozen=True, slots=True)
class Listing:
    """The members that launchers may use now, at one store revision.

    ``listed`` and ``standby`` are ordered by age, oldest first, so that ranks move as little as
    possible; if a launcher says who takes part, those come first, then those that ask to.
    ``excluded`` has the reason against every other member. ``reason`` is one sentence.
    ``quarantined``: members whose torchrun dies again and again. They are excluded, unless too few
    would be listed without them for the smallest world.
    """

    revision: int
    listed: tuple[Member, ...] = ()
    standby: tuple[Member, ...] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    reason: str = "no member has registered yet"
    quarantined: frozenset[str] = frozenset()


def listing_of(snapshot: Snapshot, places: Places = NO_ROUND) -> Listing:
    """List the members of ``snapshot``; ``places`` says which of them have a place already."""
    rules = snapshot.rules
    if rules is None:
        return Listing(snapshot.revision)
    excluded: dict[str, str] = {}
    able: list[Member] = []
    out: dict[Member, str] = {}
    for member in sorted(snapshot.members.values(), key=lambda m: (_claim(m, places), m.age_order)):
        reason = _reason_against(member, snapshot)
        if reason is not None:
            excluded[member.name] = reason
        elif (quarantine := snapshot.quarantine_of(member)) is not None:
            out[member] = quarantine.sentence
        else:
            able.append(member)
    policy = rules.policy
    if len(able) < policy.smallest:
        able += out
    else:
        excluded |= {member.name: reason for member, reason in out.items()}
    room = policy.largest(len(able)) or policy.max_nodes
    listed, standby = tuple(able[:room]), tuple(able[room:])
    return Listing(
        snapshot.revision,
        listed,
        standby,
        excluded,
        _sentence(policy, listed, standby),
        frozenset(member.name for member in out),
    )


def is_enough(snapshot: Snapshot, listing: Listing) -> bool:
    """Return whether enough members for a world are listed; a member that drains is not.

    A quarantined one does not count: no pod may go because of one that may die at once.
    """
    fit = [member for member in listing.listed if member.name not in listing.quarantined]
    rules = snapshot.rules
    return rules is not None and len(fit) >= rules.policy.smallest


def first_to_go(listing: Listing) -> Member | None:
    """Return the member that scaling down takes first; None if their controller does not say.

    A StatefulSet, an Indexed Job and a PyTorchJob drop the highest index. A ReplicaSet numbers no
    pods, and drops one that is not ready before one that is.
    """
    able = [*listing.listed, *listing.standby]
    if len(able) < 2 or any(member.index < 0 for member in able):
        return None
    return max(able, key=lambda member: member.index)


def _claim(member: Member, places: Places) -> int:
    if member.name in places.taken:
        return 0
    return 1 if member.name in places.asking else 2


def _reason_against(member: Member, snapshot: Snapshot) -> str | None:
    """Return why ``member`` is not to be listed, or None."""
    assert snapshot.job is not None
    if member.role == "launcher":
        return "it is a launcher and has no slots"
    if (drain := snapshot.drains.get(member.pod_uid)) is not None:
        return f"it drains: {drain.reason}"
    if member.slots < 1:
        return "it has no slots"
    holder = snapshot.incarnations.get(member.name)
    if holder is not None and holder.number > member.incarnation:
        return f"incarnation {holder.number} of it has been given out"
    return None


def _sentence(policy: JobPolicy, listed: tuple[Member, ...], standby: tuple[Member, ...]) -> str:
    text = f"{len(listed)} listed of {policy.sizes_in_words}"
    if standby:
        text += f", {len(standby)} on standby"
    if len(listed) < policy.smallest:
        smallest = policy.smallest
        least = "min" if smallest == policy.min_nodes else f"{smallest}, the smallest size"
        text += f": {smallest - len(listed)} short of {least}"
    return text
