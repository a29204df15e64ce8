# SPDX-License-Identifier: Apache-2.0
"""The membership at one revision of the store, of which every decision is a function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from rdzv.dataclass import dataclass
from rdzv.records.commit import Commit, LastCommit
from rdzv.records.drain import Drain
from rdzv.records.job import Incarnation, Job, Member
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
        return replace(self.job, allowed_sizes=(), unit=1, gather_s=0.0, paused=False)

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
