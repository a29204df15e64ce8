# SPDX-License-Identifier: Apache-2.0
"""The records in the store, and the snapshot that every decision is a function of.

JSON carries a schema version. A reader ignores fields it does not know; a record of another
schema, or one that is no JSON at all, raises ``RecordError`` and is left out of the snapshot
with its reason, so that one corrupt key cannot stop a job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

from rdzv.errors import RecordError
from rdzv.store import KeyValue

if TYPE_CHECKING:
    from rdzv.records.commit import Commit, LastCommit
    from rdzv.records.quarantine import Quarantine

SCHEMA = 1

MAX_S = 1e9
"""No duration in a record is longer: some 30 years."""

T = TypeVar("T")

Role = Literal["worker", "launcher"]

Outcome = Literal["", "committed", "uncommitted", "expired"]
"""How a drain ended: after all had saved, without that, or at its deadline; empty while it goes on.
"""


def dump_record(fields: Mapping[str, object]) -> bytes:
    """Encode a record: compact JSON with the schema version."""
    return json.dumps({"schema": SCHEMA, **fields}, separators=(",", ":")).encode()


def load_record(key: str, value: bytes) -> dict[str, Any]:
    """Decode a record; raises ``RecordError`` where it is none of ours."""
    try:
        # Told that it is UTF-8, json need not find out.
        fields = json.loads(value.decode())
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{key}: not JSON ({error})") from error
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise RecordError(f"{key}: not a record of schema {SCHEMA}")
    return fields


def take(
    key: str, fields: Mapping[str, Any], name: str, kind: type[T], missing: T | None = None
) -> T:
    """Take one field, or ``missing`` where an older writer has not written it.

    Raises ``RecordError`` if it is of another type, or missing for no reason.
    """
    value = fields.get(name, missing)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RecordError(f"{key}: {name!r} is {value!r}, expected {kind.__name__}")
    return value


def take_seconds(key: str, fields: Mapping[str, Any], name: str) -> float:
    """Take one duration; raises ``RecordError`` if it is missing, negative or not finite."""
    value = fields.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_S:
        return float(value)
    raise RecordError(f"{key}: {name!r} is {value!r}, expected a number of seconds")


@dataclass(frozen=True, slots=True)
class Job:
    """What all members agree on.

    ``generation`` counts the lives of the job. ``desired`` is the wanted number of workers, or
    None. ``vacated`` says that the last member left on purpose. ``uid`` is empty where the
    platform gives none; ``former_uids`` are those of the lives before, the newest last, and
    bounded. ``mod_revision`` is the store's, for a compare; 0 for a record not stored.
    """

    min_workers: int
    max_workers: int
    generation: int = 1
    uid: str = ""
    desired: int | None = None
    paused: bool = False
    vacated: bool = False
    former_uids: tuple[str, ...] = ()
    mod_revision: int = 0

    def to_json(self) -> bytes:
        """Encode for the store."""
        return dump_record(
            {
                "min": self.min_workers,
                "max": self.max_workers,
                "generation": self.generation,
                "uid": self.uid,
                "desired": self.desired,
                "paused": self.paused,
                "vacated": self.vacated,
                "former_uids": list(self.former_uids),
            }
        )

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode; raises ``RecordError``."""
        fields = load_record(kv.key, kv.value)
        desired = fields.get("desired")
        former_uids = take(kv.key, fields, "former_uids", list, [])
        if not all(isinstance(uid, str) for uid in former_uids):
            raise RecordError(f"{kv.key}: 'former_uids' is {former_uids!r}, expected strings")
        return cls(
            min_workers=take(kv.key, fields, "min", int),
            max_workers=take(kv.key, fields, "max", int),
            generation=take(kv.key, fields, "generation", int),
            uid=take(kv.key, fields, "uid", str),
            desired=None if desired is None else take(kv.key, fields, "desired", int),
            paused=take(kv.key, fields, "paused", bool),
            vacated=take(kv.key, fields, "vacated", bool),
            former_uids=tuple(former_uids),
            mod_revision=kv.mod_revision,
        )


@dataclass(frozen=True, slots=True)
class Member:
    """One sidecar, hence one pod.

    ``incarnation`` grows each time the same member registers again; ``since`` is the first one of
    this pod, and orders members by age (0: this is the first). ``slots`` is the number of
    worker processes its pod runs (0 for a launcher pod). ``created_revision`` orders members by
    when they came; ``lease`` is the lease the record hangs on. ``index`` is the number that the
    pod's controller gave it (-1: none).
    """

    name: str
    pod_uid: str
    incarnation: int
    address: str
    node: str
    role: Role
    slots: int
    min_workers: int
    max_workers: int
    since: int = 0
    index: int = -1
    created_revision: int = 0
    mod_revision: int = 0
    lease: int = 0

    @property
    def age_order(self) -> tuple[int, str]:
        """Sorts the oldest first. A pod keeps its place when it registers again after a cut."""
        return (self.since or self.incarnation, self.name)

    def to_json(self) -> bytes:
        """Encode for the store."""
        return dump_record(
            {
                "name": self.name,
                "pod_uid": self.pod_uid,
                "incarnation": self.incarnation,
                "address": self.address,
                "node": self.node,
                "role": self.role,
                "slots": self.slots,
                "min": self.min_workers,
                "max": self.max_workers,
                "since": self.since,
                "index": self.index,
            }
        )

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode; raises ``RecordError``."""
        fields = load_record(kv.key, kv.value)
        role = fields.get("role")
        if role not in ("worker", "launcher"):
            raise RecordError(f"{kv.key}: 'role' is {role!r}, expected worker or launcher")
        return cls(
            name=take(kv.key, fields, "name", str),
            pod_uid=take(kv.key, fields, "pod_uid", str),
            incarnation=take(kv.key, fields, "incarnation", int),
            address=take(kv.key, fields, "address", str),
            node=take(kv.key, fields, "node", str),
            role=role,
            slots=take(kv.key, fields, "slots", int),
            min_workers=take(kv.key, fields, "min", int),
            max_workers=take(kv.key, fields, "max", int),
            since=take(kv.key, fields, "since", int, 0),
            index=take(kv.key, fields, "index", int, -1),
            created_revision=kv.create_revision,
            mod_revision=kv.mod_revision,
            lease=kv.lease,
        )


@dataclass(frozen=True, slots=True)
class Incarnation:
    """Who holds a member's name: the last incarnation given out, and to which pod.

    ``since`` is the first incarnation that this pod had (0: this one).
    """

    member: str
    number: int
    pod_uid: str
    since: int = 0
    mod_revision: int = 0

    def to_json(self) -> bytes:
        """Encode for the store."""
        return dump_record(
            {
                "member": self.member,
                "number": self.number,
                "pod_uid": self.pod_uid,
                "since": self.since,
            }
        )

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode; raises ``RecordError``."""
        fields = load_record(kv.key, kv.value)
        return cls(
            member=take(kv.key, fields, "member", str),
            number=take(kv.key, fields, "number", int),
            pod_uid=take(kv.key, fields, "pod_uid", str),
            since=take(kv.key, fields, "since", int, 0),
            mod_revision=kv.mod_revision,
        )


ENDING_SOURCES = frozenset({"prestop", "sigterm", "hold"})
"""Sources of notices that come from the end of a pod itself."""


@dataclass(frozen=True, slots=True)
class Drain:
    """A notice that a pod will go away; a member that drains is not listed.

    ``source`` is where the notice came from, ``requested_by`` who asked, if known.
    ``seconds_left`` is the time to the pod's deadline when the record was written, None without
    one; SIGTERM is passed on ``reserve_s`` before it at the latest. ``ending``: the pod is being
    terminated since, whoever asked for the drain first. ``step`` is the commit step of the outcome
    ``committed``; None without one.
    """

    pod_uid: str
    member: str
    reason: str
    source: str
    seconds_left: float | None = None
    reserve_s: float = 0.0
    requested_by: str = ""
    outcome: Outcome = ""
    step: int | None = None
    ending: bool = False
    created_revision: int = 0
    mod_revision: int = 0

    @property
    def ends(self) -> bool:
        """Whether the pod is being ended, which taking the drain back would not stop."""
        return self.ending or self.source in ENDING_SOURCES

    def to_json(self) -> bytes:
        """Encode for the store."""
        return dump_record(
            {
                "pod_uid": self.pod_uid,
                "member": self.member,
                "reason": self.reason,
                "source": self.source,
                "seconds_left": self.seconds_left,
                "reserve_s": self.reserve_s,
                "requested_by": self.requested_by,
                "ending": self.ending,
                "outcome": self.outcome,
                "step": self.step,
            }
        )

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode; raises ``RecordError``."""
        fields = load_record(kv.key, kv.value)
        outcome = fields.get("outcome", "")
        if outcome not in get_args(Outcome):
            raise RecordError(f"{kv.key}: 'outcome' is {outcome!r}, which no drain ends with")
        step = fields.get("step")
        left = fields.get("seconds_left")
        return cls(
            pod_uid=take(kv.key, fields, "pod_uid", str),
            member=take(kv.key, fields, "member", str),
            reason=take(kv.key, fields, "reason", str),
            source=take(kv.key, fields, "source", str),
            seconds_left=None if left is None else take_seconds(kv.key, fields, "seconds_left"),
            reserve_s=take_seconds(kv.key, {"reserve_s": 0, **fields}, "reserve_s"),
            requested_by=take(kv.key, fields, "requested_by", str, ""),
            ending=take(kv.key, fields, "ending", bool, False),
            outcome=outcome,
            step=None if step is None else take(kv.key, fields, "step", int),
            created_revision=kv.create_revision,
            mod_revision=kv.mod_revision,
        )


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
