# SPDX-License-Identifier: Apache-2.0
"""The membership at one revision of the store: what every decision is a function of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rdzv.records.commit import Commit, LastCommit
from rdzv.records.drain import Drain
from rdzv.records.job import Incarnation, Job, Member
from rdzv.records.quarantine import Quarantine


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole membership at one store revision; immutable.

    ``job`` is None until the first member made it, ``commit`` until the first hold. ``corrupt``
    names keys that could not be read, with the reason. ``unreadable_job``,
    ``unreadable_commit`` and ``unreadable_incarnations`` (by member) are the mod revisions of such
    records, for the compare of whoever writes them anew; 0 for none. Votes are not in it: they
    matter to nobody but who counts them (``Membership.votes``).
    """

    revision: int
    job: Job | None = None
    members: Mapping[str, Member] = field(default_factory=dict)
    incarnations: Mapping[str, Incarnation] = field(default_factory=dict)
    drains: Mapping[str, Drain] = field(default_factory=dict)
    corrupt: Mapping[str, str] = field(default_factory=dict)
    unreadable_job: int = 0
    unreadable_incarnations: Mapping[str, int] = field(default_factory=dict)
    commit: Commit | None = None
    last_commit: LastCommit | None = None
    unreadable_commit: int = 0
    quarantines: Mapping[str, Quarantine] = field(default_factory=dict)

    @property
    def commit_to_start_from(self) -> LastCommit | None:
        """The last commit, unless it is forgotten."""
        last = self.last_commit
        return None if last is None or last.forgotten else last

    @property
    def commit_is_of_former_life(self) -> bool:
        """Whether the last commit was made by a job of this name that was deleted since.

        Only UIDs tell: a generation may begin where nobody has deleted anything.
        """
        last, job = self.last_commit, self.job
        return bool(last and job and last.job_uid and job.uid and last.job_uid != job.uid)

    def quarantine_of(self, member: Member) -> Quarantine | None:
        """Why ``member`` is kept out of worlds; None where it is not. A new pod begins anew."""
        record = self.quarantines.get(member.name)
        if record is None or not record.out or record.pod_uid != member.pod_uid:
            return None
        return record

    def has_name(self, drain: Drain) -> bool:
        """Whether the drained pod still is the one behind its member's name.

        A new pod of the same name is not drained, even while that one is cut off.
        """
        holder = self.members.get(drain.member) or self.incarnations.get(drain.member)
        return holder is None or holder.pod_uid == drain.pod_uid
